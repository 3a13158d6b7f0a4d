"""The blocks that each worker holds, as far as this router has heard, and thus how much of a prompt. Pure: no I/O.

A block has one number whose bits stand for workers, so that it costs as much to index for a thousand of them as for
one. Two kinds of knowledge lie over each other:

    held       the workers' reports: a snapshot, then every change, numbered, so that a gap is seen
    expected   the outcome of this router's own decisions until workers report it; it expires

A guess is all that a router needs: a worker that holds less than expected computes the rest. The names of a prompt's
blocks are computed once a prompt and block size, not once a choice, a worker or an attempt.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from twostroke.protocol.block_hash import (
    BlockHash,
    ShortName,
    chain_hashes,
    next_hash,
    root_hash,
    short_name,
    unpack_names,
)
from twostroke.protocol.clock import Clock
from twostroke.protocol.messages import BlocksChanged, BlocksHeld
from twostroke.protocol.requests import GenerateRequest, Peer
from twostroke.protocol.stats import WorkerInfo

_SWEEP = 1024
"""Names that are swept with each message while bits of forgotten workers are left."""
_Layer = dict[ShortName, int]  # a block's bits: who has it


@dataclass(slots=True)
class _Worker:
    column: int  # which bit is the worker's
    is_clean: bool = True  # nothing was stored with that bit yet
    sequence: int | None = None  # of the last message heard; None: only a snapshot helps
    is_asked: bool = False  # for one


class BlockIndex:
    """One router replica's knowledge. Every replica hears all workers itself, so that they agree without talking.

    Of at most `max_blocks` different blocks; what does not fit is not known. Expected blocks are so for `expected_s` to
    twice as long. Indexes of one router share the `names` of prompts.
    """

    def __init__(self, *, clock: Clock, max_blocks: int, expected_s: float, names: "PromptNames | None" = None):
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
        self._free_columns: list[int] = []
        self._retired = 0  # bits that may still be set and mean no worker
        self._sweeping = 0  # those of them that are being wiped out
        self._unswept: list[ShortName] = []
        self._names = PromptNames() if names is None else names

    def __len__(self) -> int:
        """Blocks that some worker was heard to hold."""
        return len(self._held)

    def cached_tokens(self, infos: Sequence[WorkerInfo], request: GenerateRequest, sent: Sequence[int]) -> list[int]:
        """Return the tokens of the prompt with the outputs `sent` that each of these workers has, or will soon have."""
        blocks: dict[int, list[int]] = {}  # by block size
        tokens: list[int] = []
        for info in infos:
            size = info.layout.block_size
            if size not in blocks:
                find = self.find_last if info.layout.state_numbers else self.find
                blocks[size] = find(self._names.of(request.token_ids, request.cache_salt, size, sent))
            worker = self._workers.get(info.peer)
            tokens.append(0 if worker is None else blocks[size][worker.column] * size)
        return tokens

    def expect(self, worker: WorkerInfo, request: GenerateRequest, sent: Sequence[int]) -> None:
        """The worker will soon hold the prompt and the outputs `sent`, as far as they fill blocks, if all goes well."""
        names = self._names.of(request.token_ids, request.cache_salt, worker.layout.block_size, sent)
        self.expect_blocks(worker.peer, names)

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget all others: a worker that has left, or has restarted, holds nothing."""
        present = set(workers)
        for worker in [worker for worker in self._workers if worker not in present]:
            self._retire(self._workers.pop(worker).column)
        if not self._workers:  # no bit means anything, and no message will come to sweep with
            for layer in (self._held, self._expected, self._expected_before):
                layer.clear()
            self._unswept.clear()
            self._num_columns = self._retired = self._sweeping = 0
            self._free_columns.clear()

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

    def expect_blocks(self, worker: Peer, names: Sequence[ShortName]) -> None:
        """`worker` will soon hold these blocks."""
        self._expire()
        known = self._known(worker)
        known.is_clean = False
        bit = 1 << known.column
        layer, held = self._expected, self._held
        # What it is known to hold, or was lately expected to, is the prompt's beginning, and often most of it.
        new = bisect_left(names, True, key=lambda name: not bit & (held.get(name, 0) | layer.get(name, 0)))
        names = names[new : new + self._max_blocks - len(layer)]
        # All in one go: this is done for each request.
        expected = list(map(layer.setdefault, names, repeat(bit)))
        if expected.count(bit) < len(names):
            for name, bits in zip(names, expected, strict=True):
                layer[name] = bits | bit

    def find(self, names: Sequence[ShortName]) -> list[int]:
        """Return the number of a prompt's first blocks that each worker holds or will hold, by its column.

        A worker with a block is taken to hold all before it, which is nearly always true: caches evict from the end.
        """
        self._expire()
        blocks = [0] * self._num_columns
        if not names:
            return blocks
        held, expected, before = self._held.get, self._expected.get, self._expected_before.get
        first = names[0]
        # Groups of workers that all hold `low` blocks, and none more than `high`: each look halves a group's range.
        groups = [((held(first, 0) | expected(first, 0) | before(first, 0)) & self._active, 1, len(names))]
        while groups:
            group, low, high = groups.pop()
            if group and low == high:
                _fill(blocks, group, low)
            elif group:
                middle = (low + high + 1) // 2
                name = names[middle - 1]
                able = (held(name, 0) | expected(name, 0) | before(name, 0)) & group
                groups.append((able, middle, high))
                groups.append((group ^ able, low, middle - 1))
        return blocks

    def find_last(self, names: Sequence[ShortName]) -> list[int]:
        """Return the number of a prompt's first blocks behind the last of which each worker has a state, by its column.

        A prefix is found where a state was left, whatever was left before it. Blocks of such models are so large that a
        prompt has few, and all of them are looked at.
        """
        self._expire()
        blocks = [0] * self._num_columns
        left = self._active
        for count in range(len(names), 0, -1):
            name = names[count - 1]
            able = left & (self._held.get(name, 0) | self._expected.get(name, 0) | self._expected_before.get(name, 0))
            left ^= able
            _fill(blocks, able, count)
            if not left:
                break
        return blocks

    def _known(self, worker: Peer) -> _Worker:
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = _Worker(self._take_column())
        return known

    def _missed(self, worker: _Worker) -> bool:
        """Note a gap. Return whether the worker has been asked for a snapshot already."""
        worker.sequence = None
        was_asked, worker.is_asked = worker.is_asked, True
        return was_asked

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


def _fill(blocks: list[int], bits: int, count: int) -> None:
    """Set the entries of the columns whose bits are set."""
    for column, bit in enumerate(reversed(f"{bits:b}")):
        if bit == "1":
            blocks[column] = count


def _clear(layer: _Layer, name: ShortName, keep: int) -> None:
    before = layer.get(name)
    if before is None:
        return
    after = before & keep
    if after:
        layer[name] = after
    else:
        del layer[name]


_MAX_TOKENS = 1 << 20
"""Most tokens of the prompts whose names are kept."""


@dataclass(frozen=True, slots=True)
class _Chain:
    token_ids: tuple[int, ...]  # kept, so that no other tuple can have its id
    names: list[ShortName]  # of the full blocks
    last: BlockHash  # of the last of these


class PromptNames:
    """Remembers the prompts that were asked for last. Sequences of one request share their tuple of tokens."""

    def __init__(self) -> None:
        self._chains: OrderedDict[tuple[int, bytes, int], _Chain] = OrderedDict()
        self._num_tokens = 0

    def of(
        self, token_ids: tuple[int, ...], cache_salt: bytes, block_size: int, sent: Sequence[int] = ()
    ) -> list[ShortName]:
        """Names of all full blocks of a prompt, with the outputs `sent` after it. Not to be changed."""
        key = id(token_ids), cache_salt, block_size
        chain = self._chains.get(key)
        if chain is None:
            hashes = chain_hashes(token_ids, block_size, cache_salt)
            last = hashes[-1] if hashes else root_hash(cache_salt)
            chain = self._chains[key] = _Chain(token_ids, [short_name(one) for one in hashes], last)
            self._num_tokens += len(token_ids)
            while self._num_tokens > _MAX_TOKENS and len(self._chains) > 1:
                _, oldest = self._chains.popitem(last=False)
                self._num_tokens -= len(oldest.token_ids)
        else:
            self._chains.move_to_end(key)
        names, parent = chain.names, chain.last
        rest = len(names) * block_size
        if len(token_ids) + len(sent) < rest + block_size:
            return names
        names = names.copy()
        tail = (*token_ids[rest:], *sent)
        for end in range(block_size, len(tail) + 1, block_size):
            parent = next_hash(parent, tail[end - block_size : end])
            names.append(short_name(parent))
        return names
