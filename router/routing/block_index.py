"""Which worker holds which blocks, as far as this router has heard, and so how much of a prompt. Pure: no I/O.

A block has one number whose bits stand for workers, so that it costs as much to index for a thousand of them as for
one. Two kinds of knowledge lie over each other:

    held       what workers tell: a snapshot, then every change, numbered, so that a gap is seen and asked about
    expected   what this router's own decisions will lead to, until the workers tell of it; it ends by itself

A guess is all that a router needs: who holds less than was thought computes the rest. The names of a prompt's blocks
are computed once a prompt and block size, not once a choice, a worker or an attempt.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.blocks import BlockHash, ShortName, chain_hashes, next_hash, root_hash, short_name, unpack_names
from twostroke.protocol.clock import Clock
from twostroke.protocol.messages import BlocksChanged, BlocksHeld
from twostroke.protocol.requests import GenerateRequest, Peer
from twostroke.protocol.stats import WorkerInfo

_SWEEP = 1024  # names that are looked at with each message while bits of forgotten workers are left
_Layer = dict[ShortName, int]  # a block's bits: who has it


@dataclass(slots=True)
class _Worker:
    column: int  # which bit is the worker's
    is_clean: bool = True  # nothing was stored with that bit yet
    sequence: int | None = None  # of the last message heard; None: only a snapshot helps
    is_asked: bool = False  # for one


class BlockIndex:
    """At most `max_blocks` different blocks; what does not fit is not known. Expected blocks are so for `expected_s` to
    twice as long.
    """

    def __init__(self, *, clock: Clock, max_blocks: int, expected_s: float):
        """Raises ValueError unless there is room for one block."""
        if max_blocks < 1:
            raise ValueError(f"an index of {max_blocks} blocks holds nothing")
        self._clock = clock
        self._max_blocks = max_blocks
        self._expected_s = expected_s
        self._held: _Layer = {}
        self._expected: _Layer = {}
        self._expected_before: _Layer = {}
        self._expected_since = clock()
        self._workers: dict[Peer, _Worker] = {}
        self._active = 0  # bits of `_workers`
        self._num_columns = 0
        self.version = 0  # changes whenever a worker gets another column
        self._free_columns: list[int] = []
        self._retired = 0  # bits that may still be set and mean nobody
        self._sweeping = 0  # those of them that are being wiped out
        self._unswept: list[ShortName] = []

    def __len__(self) -> int:
        """Blocks that some worker was heard to hold."""
        return len(self._held)

    def columns(self, workers: Sequence[Peer]) -> NDArray[np.int64]:
        """Where the next `find` has the numbers of these workers. Good for as long as `version` stays the same."""
        return np.array([self._known(worker).column for worker in workers], np.int64)

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget all others: a worker that has left, or has restarted, holds nothing."""
        present = set(workers)
        for worker in [worker for worker in self._workers if worker not in present]:
            self._retire(self._workers.pop(worker).column)
        if not self._workers:  # nobody's bits mean anything, and no message will come to sweep with
            for layer in (self._held, self._expected, self._expected_before):
                layer.clear()
            self._unswept.clear()
            self._num_columns = self._retired = self._sweeping = 0
            self._free_columns.clear()
            self.version += 1

    def heard(self, worker: Peer, message: BlocksHeld | BlocksChanged) -> bool:
        """Take in what a worker says. False where something was missed: the worker must be asked for all it holds.

        Raises ProtocolError for bytes that are no names.
        """
        known = self._known(worker)
        self._sweep()
        if isinstance(message, BlocksHeld):
            if message.is_first:
                self._begin_again(known)
                known.sequence, known.is_asked = message.sequence, False
            if message.sequence != known.sequence:
                return self._missed(known)
            self._store(known, unpack_names(message.names))
            return True
        if known.sequence is None or message.sequence != known.sequence + 1:
            return self._missed(known)
        known.sequence = message.sequence
        self._remove(known, unpack_names(message.removed))
        self._store(known, unpack_names(message.stored))
        return True

    def expect(self, worker: Peer, names: Sequence[ShortName], *, known_blocks: int = 0) -> None:
        """`worker` will soon hold these blocks, if all goes well.

        `known_blocks` is how many of them it is known to hold: as good a guess as there is, which spares looking.
        """
        self._expire()
        known = self._known(worker)
        known.is_clean = False
        bit = 1 << known.column
        layer = self._expected
        depth = self._known_depth(names, bit, known_blocks)
        names = names[depth : depth + self._max_blocks - len(layer)]
        # All in one go: this is done for each request.
        expected = list(map(layer.setdefault, names, repeat(bit)))
        if expected.count(bit) < len(names):
            for name, bits in zip(names, expected, strict=True):
                layer[name] = bits | bit

    def find(self, names: Sequence[ShortName]) -> NDArray[np.int64]:
        """How many of a prompt's first blocks each worker holds or will hold, by its column.

        Whoever holds a block is taken to hold all before it, which is so nearly always: caches evict from the end.
        """
        self._expire()
        blocks = np.zeros(self._num_columns, np.int64)
        if not names:
            return blocks
        held, expected, before = self._held.get, self._expected.get, self._expected_before.get
        first = names[0]
        # Groups of workers that all hold `low` blocks, and none more than `high`: each look halves a group's range.
        groups = [((held(first, 0) | expected(first, 0) | before(first, 0)) & self._active, 1, len(names))]
        while groups:
            group, low, high = groups.pop()
            if not group:
                continue
            if low == high:
                self._assign(blocks, group, low)
                continue
            middle = (low + high + 1) // 2
            name = names[middle - 1]
            able = (held(name, 0) | expected(name, 0) | before(name, 0)) & group
            groups.append((able, middle, high))
            groups.append((group ^ able, low, middle - 1))
        return blocks

    def _known(self, worker: Peer) -> _Worker:
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = _Worker(self._take_column())
        return known

    def _missed(self, worker: _Worker) -> bool:
        """Whether nobody needs to ask."""
        worker.sequence = None
        was_asked, worker.is_asked = worker.is_asked, True
        return was_asked

    def _known_depth(self, names: Sequence[ShortName], bit: int, guess: int) -> int:
        """How many of the first of `names` need not be expected again of the worker with this bit: about `guess`."""

        def is_known(count: int) -> int:
            name = names[count - 1]
            return bit & (self._held.get(name, 0) | self._expected.get(name, 0))

        low, high = 0, len(names)
        for count in (guess, guess + 1):  # a right guess is found out by its two sides
            if low < count <= high:
                low, high = (count, high) if is_known(count) else (low, count - 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if is_known(middle) else (low, middle - 1)
        return low

    def _assign(self, blocks: NDArray[np.int64], group: int, count: int) -> None:
        if group & (group - 1) == 0:
            blocks[group.bit_length() - 1] = count
            return
        packed = np.frombuffer(group.to_bytes((self._num_columns + 7) // 8, "little"), np.uint8)
        blocks[np.unpackbits(packed, count=self._num_columns, bitorder="little").view(bool)] = count

    def _store(self, worker: _Worker, names: Iterable[ShortName]) -> None:
        bit = 1 << worker.column  # one object for all blocks that this worker alone holds
        worker.is_clean = False
        held = self._held
        room = self._max_blocks - len(held)
        for name in names:
            before = held.get(name)
            if before is not None:
                held[name] = before | bit
            elif room > 0:
                held[name] = bit
                room -= 1

    def _remove(self, worker: _Worker, names: Iterable[ShortName]) -> None:
        keep = ~(1 << worker.column)
        for name in names:
            for layer in (self._held, self._expected, self._expected_before):
                _clear(layer, name, keep)

    def _begin_again(self, worker: _Worker) -> None:
        """Forget what the worker holds, at no cost now: it gets another bit, and the old one is wiped out later."""
        if not worker.is_clean:
            self._retire(worker.column)
            worker.column = self._take_column()
            worker.is_clean = True

    def _take_column(self) -> int:
        if self._free_columns:
            column = self._free_columns.pop()
        else:
            column = self._num_columns
            self._num_columns += 1
        self._active |= 1 << column
        self.version += 1
        return column

    def _retire(self, column: int) -> None:
        self._active &= ~(1 << column)
        self._retired |= 1 << column

    def _sweep(self) -> None:
        """Wipe retired bits from some blocks; when they are gone from all, their columns are free again."""
        if not self._sweeping:
            if not self._retired:
                return
            self._sweeping, self._retired = self._retired, 0
            self._unswept = [*self._held, *self._expected, *self._expected_before]
        keep = ~self._sweeping
        for name in self._unswept[-_SWEEP:]:
            for layer in (self._held, self._expected, self._expected_before):
                _clear(layer, name, keep)
        del self._unswept[-_SWEEP:]
        if not self._unswept:
            while self._sweeping:
                column = self._sweeping.bit_length() - 1
                self._sweeping ^= 1 << column
                self._free_columns.append(column)

    def _expire(self) -> None:
        """Let go of what was expected too long ago. All at once, by layers: no block has a time of its own."""
        elapsed_s = self._clock() - self._expected_since
        if elapsed_s < self._expected_s:
            return
        self._expected_before = self._expected if elapsed_s < 2 * self._expected_s else {}
        self._expected = {}
        self._expected_since = self._clock()


def _clear(layer: _Layer, name: ShortName, keep: int) -> None:
    before = layer.get(name)
    if before is None:
        return
    after = before & keep
    if after:
        layer[name] = after
    else:
        del layer[name]


_MOST_TOKENS = 1 << 20  # of the prompts whose names are kept


@dataclass(slots=True)
class _Prompt:
    token_ids: tuple[int, ...]  # kept, so that no other tuple can have its id
    chains: dict[int, tuple[list[ShortName], BlockHash]] = field(default_factory=dict)  # by block size; the last's hash


class PromptNames:
    """Remembers the prompts that were asked for last. Sequences of one request share their tuple of tokens."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[int, bytes], _Prompt] = OrderedDict()
        self._num_tokens = 0

    def of(
        self, token_ids: tuple[int, ...], cache_salt: bytes, block_size: int, sent: Sequence[int] = ()
    ) -> list[ShortName]:
        """Names of all full blocks of a prompt, with the outputs `sent` after it. Not to be changed."""
        prompt = self._prompt(token_ids, cache_salt)
        chain = prompt.chains.get(block_size)
        if chain is None:
            hashes = chain_hashes(token_ids, block_size, cache_salt)
            last = hashes[-1] if hashes else root_hash(cache_salt)
            chain = prompt.chains[block_size] = [short_name(one) for one in hashes], last
        names, parent = chain
        rest = len(names) * block_size
        if len(token_ids) + len(sent) < rest + block_size:
            return names
        names = names.copy()
        tail = (*token_ids[rest:], *sent)
        for end in range(block_size, len(tail) + 1, block_size):
            parent = next_hash(parent, tail[end - block_size : end])
            names.append(short_name(parent))
        return names

    def _prompt(self, token_ids: tuple[int, ...], cache_salt: bytes) -> _Prompt:
        key = id(token_ids), cache_salt
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt(token_ids)
            self._num_tokens += len(token_ids)
            while self._num_tokens > _MOST_TOKENS and len(self._prompts) > 1:
                _, oldest = self._prompts.popitem(last=False)
                self._num_tokens -= len(oldest.token_ids)
        else:
            self._prompts.move_to_end(key)
        return prompt


class CachedPrefixes:
    """One router replica's knowledge. Every replica hears all workers itself, so that they agree without talking."""

    def __init__(self, *, clock: Clock, max_blocks: int, expected_s: float):
        self._index = BlockIndex(clock=clock, max_blocks=max_blocks, expected_s=expected_s)
        self._names = PromptNames()
        self._infos: Sequence[WorkerInfo] = ()
        self._version = -1  # of the index, when the columns of `_infos` were asked for
        self._columns: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}  # by block size: rows, and columns

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget what others held."""
        self._index.keep(workers)

    def heard(self, worker: Peer, message: BlocksHeld | BlocksChanged) -> bool:
        """As BlockIndex.heard."""
        return self._index.heard(worker, message)

    def expect(
        self, worker: WorkerInfo, request: GenerateRequest, sent: Sequence[int], *, known_tokens: int = 0
    ) -> None:
        """The worker will soon hold the prompt and the outputs `sent`, as far as they fill blocks.

        `known_tokens` of them it is thought to hold already.
        """
        block_size = worker.layout.block_size
        names = self._names.of(request.token_ids, request.cache_salt, block_size, sent)
        self._index.expect(worker.peer, names, known_blocks=known_tokens // block_size)

    def held(self, infos: Sequence[WorkerInfo], request: GenerateRequest, sent: Sequence[int]) -> list[int]:
        """How many tokens of the prompt with the outputs `sent` each of these workers has. Quick for the same list."""
        if self._infos is not infos or self._version != self._index.version:
            self._remember_columns(infos)  # before anything is found: new workers get columns now
        held = np.zeros(len(infos), np.int64)
        for block_size, (rows, columns) in self._columns.items():
            names = self._names.of(request.token_ids, request.cache_salt, block_size, sent)
            held[rows] = self._index.find(names)[columns] * block_size
        tokens: list[int] = held.tolist()
        return tokens

    def _remember_columns(self, infos: Sequence[WorkerInfo]) -> None:
        self._columns = {}
        for block_size in {info.layout.block_size for info in infos}:
            rows = [row for row, info in enumerate(infos) if info.layout.block_size == block_size]
            self._columns[block_size] = np.array(rows), self._index.columns([infos[row].peer for row in rows])
        self._infos, self._version = infos, self._index.version
