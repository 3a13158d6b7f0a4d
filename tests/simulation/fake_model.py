"""A model that is a hash function, with KV that can be wrong.

The "KV" of a position is 8 bytes for each layer: a hash of the position before (read from the store), the token and the
layer. The next token is a hash of all KV bytes up to the last position, or of those in a layer's window, read from the
store through the block table.
So one wrong, missing, stale or overwritten block anywhere gives a wrong token, and an oracle that never saw a block
knows which tokens are right.
"""

import asyncio
import struct
from collections.abc import Sequence
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from twostroke.model.step import BlockCopy, Engine, OnLayer, ScoredRows, SequenceStep, is_penalised, with_drawn_tokens
from twostroke.protocol.kv_layout import first_seen
from twostroke.protocol.requests import GenerateRequest, SampledToken, SamplingParams, finish_reason, forbidden_tokens
from twostroke.protocol.stats import Role
from twostroke.simulator.memory_store import FakeStore, FakeSwapSpace, Grip

VOCAB = 61
POISON = 2**32 - 1
"""A token of no vocabulary that kills the engine which computes its KV."""
_TOKEN = struct.Struct("<II")


def position_kv(before: bytes, token_id: int, layer: int) -> bytes:
    """KV of a position in a layer, from the KV of the position before (empty for the first that it sees)."""
    return xxhash.xxh64_digest(before + _TOKEN.pack(token_id, layer))


def draw(kv: Sequence[bytes], sampling: SamplingParams, forbidden: Sequence[int], position: int) -> int:
    """The token that follows; `kv` is all positions' bytes of each layer.

    Answers of even seeds mostly repeat themselves, so that drafts are right now and then.
    """
    state = xxhash.xxh64(seed=sampling.seed)
    for layer in kv:
        state.update(layer)
    digest = state.intdigest()
    token = position % 7 if sampling.seed % 2 == 0 and digest % 16 else digest % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def hidden_state(kv: bytes) -> NDArray[np.float32]:
    """[4], of a position with this KV."""
    return np.frombuffer(xxhash.xxh128_digest(kv), np.uint32).astype(np.float32)


def scored(kv: bytes, token_id: int, num_alternatives: int) -> tuple[list[int], list[float], int]:
    """The likeliest tokens after a position with this KV, log-probabilities of `token_id` and of these, its rank."""
    best = xxhash.xxh32_intdigest(kv) % VOCAB
    rank = (token_id - best) % VOCAB
    places = range(num_alternatives)
    return [(best + place) % VOCAB for place in places], [-0.5 - place for place in (rank, *places)], rank + 1


def expected_tokens(request: GenerateRequest, windows: Sequence[int]) -> list[int]:
    """All output tokens of a fresh request, without any worker."""
    num_layers = len(windows)
    kv = [bytearray() for _ in range(num_layers)]
    last = [b""] * num_layers

    def extend(token_id: int) -> None:
        for layer, window in enumerate(windows):
            position = len(kv[layer]) // 8
            before = last[layer] if first_seen(window, position) < position else b""
            last[layer] = position_kv(before, token_id, layer)
            kv[layer] += last[layer]

    for token_id in request.token_ids:
        extend(token_id)
    outputs: list[int] = []
    while True:
        token = draw(
            [bytes(one[8 * first_seen(window, len(one) // 8 - 1) :]) for one, window in zip(kv, windows, strict=True)],
            request.sampling,
            forbidden_tokens(request, len(outputs)),
            len(kv[0]) // 8,
        )
        outputs.append(token)
        if finish_reason(request, len(outputs), token) is not None:
            return outputs
        extend(token)


class FakeEngine(Engine):
    """Takes virtual time by tokens and layers, and writes each layer's KV at the end of that layer's time.

    A step may be asked for while another is under way, and waits for it. From then on its blocks must stay its own.
    """

    num_broken_rows = 0

    def __init__(
        self,
        store: FakeStore,
        swap_space: FakeSwapSpace | None = None,
        *,
        step_s: float = 0.001,
        token_s: float = 0.0001,
    ):
        self._store = store
        self._swap_space = swap_space
        self._num_layers = store.layout.num_layers
        self._step_s = step_s
        self._token_s = token_s
        self._turn = asyncio.Lock()  # whose waiters get it in the order in which they came
        self._num_under_way = 0
        self._drawn: list[SampledToken | None] = []  # by the last step
        self._is_dead = False
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_poisoned = False
        self.slowness = 1.0  # steps take so many times what they take else
        self.fail_at_step: int | None = None
        self.released = asyncio.Event()  # a step under way waits for it; cleared, the engine is wedged
        self.released.set()
        self.num_steps = 0
        self.num_steps_ahead = 0  # of them, asked for while another was under way
        self.num_copied = 0  # ends of prompts

    @classmethod
    def of_role(cls, role: Role, store: FakeStore, swap_space: FakeSwapSpace | None) -> Self:
        """Return the engine of a worker: the same for either role."""
        return cls(store, swap_space)

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        if not batch and not copies:
            raise RuntimeError("an empty step")
        if self._num_under_way == 2:
            raise RuntimeError("three steps at once")
        self.num_steps_ahead += self._num_under_way
        self._num_under_way += 1
        for one in batch:
            if one.draw is not None and is_penalised(one.draw.sampling) and one.draw.counts is None:
                raise RuntimeError("a draw with penalties that nobody can settle")
            is_free = one.draw is None or (one.draw.num_drafted and not is_penalised(one.draw.sampling))
            if not is_free and len(one.draw.history) != _end(one) - (one.follows is not None):
                raise RuntimeError("a draw whose history is not what is computed")
        tables = [self._store.in_use(one.block_ids, one.start, _end(one)) for one in batch]
        grips = [self._store.grip(table) for table in tables]
        copied = [self._store.grip(copy.cache_blocks) for copy in copies]
        shared = [one for one in batch if one.copied_from is not None]
        lent = [self._store.grip([one.copied_from]) for one in shared]
        try:
            async with self._turn:
                if self._is_dead:
                    raise RuntimeError("the fake engine is dead")
                for copy, grip in zip(copies, copied, strict=True):
                    await self._copy(copy, grip)
                if not batch:
                    return []
                self.num_copied += len(shared)
                for one, grip in zip(shared, lent, strict=True):
                    self._store.touch([one.copied_from], "a copy reads", grip)
                    self._store.copy_block(one.copied_from, one.block_ids[one.start // self._store.layout.block_size])
                return await self._run(batch, tables, grips, on_layer)
        finally:
            self._num_under_way -= 1

    async def _copy(self, copy: BlockCopy, grip: Grip) -> None:
        if self._swap_space is None:
            raise RuntimeError("there is no swap space")
        await self.released.wait()
        await asyncio.sleep(self._swap_space.time_for(copy))
        self._store.touch(copy.cache_blocks, "a copy uses", grip)
        self._swap_space.copy(copy)

    async def _run(
        self,
        batch: Sequence[SequenceStep],
        tables: Sequence[Sequence[int]],
        grips: Sequence[Grip],
        on_layer: OnLayer | None,
    ) -> list[SampledToken | None]:
        self.num_steps += 1
        await self.released.wait()
        batch = with_drawn_tokens(batch, self._drawn)
        layer_s = (self._step_s + self._token_s * sum(len(one.token_ids) for one in batch)) / self._num_layers
        is_poisoned = any(POISON in one.token_ids for one in batch)
        for layer in range(self._num_layers):
            await asyncio.sleep(layer_s * self.slowness)
            if is_poisoned or self.num_steps == self.fail_at_step:
                self._die(is_poisoned)
            for one, table, grip in zip(batch, tables, grips, strict=True):
                self._store.touch(table, "a step uses", grip)
                self._compute(one, layer)
            if on_layer is not None:
                on_layer(layer)
        for one in batch:
            self._read(one)
        self._drawn = [self._draw(one) for one in batch]
        return self._drawn

    def _die(self, is_poisoned: bool) -> None:
        self._is_dead, self.was_poisoned = True, is_poisoned
        if not self.died.done():
            self.died.set_result(None)
        raise RuntimeError("a poisonous token" if is_poisoned else "the fake engine was told to fail")

    def _compute(self, one: SequenceStep, layer: int) -> None:
        store = self._store
        window, before = store.layout.windows[layer] if store.layout.windows else 0, b""
        if first_seen(window, one.start) < one.start:
            before = store.position(layer, one.block_ids, one.start - 1)
        computed: list[bytes] = []
        for position, token_id in enumerate(one.token_ids, start=one.start):
            before = position_kv(before if first_seen(window, position) < position else b"", token_id, layer)
            computed.append(before)
        store.write(layer, one.block_ids, one.start, b"".join(computed))

    def _read(self, one: SequenceStep) -> None:
        scorer, store = one.scorer, self._store
        if scorer is None:
            return
        scorer.begin(one.start)
        kv = [store.position(0, one.block_ids, position) for position in range(one.start, _end(one))]
        for position in range(len(kv))[scorer.pooled_rows(one.start, len(kv))]:
            scorer.add_hidden(hidden_state(kv[position]))
        targets = scorer.targets(one.start, len(kv)).tolist()
        if targets:
            rows = [scored(*row, scorer.params.logprobs or 0) for row in zip(kv, targets, strict=False)]
            ids, logprobs, ranks = (np.array(column) for column in zip(*rows, strict=True))
            scorer.add_scores(ScoredRows(ids.astype("<i4"), logprobs.astype("<f4"), ranks.astype("<i4")))

    def _draw(self, one: SequenceStep) -> SampledToken | None:
        if one.draw is None:
            return None
        num_positions = _end(one)
        kv = [self._store.read(layer, one.block_ids, num_positions) for layer in range(self._num_layers)]
        return SampledToken(draw(kv, one.draw.sampling, one.draw.forbidden, num_positions))


def _end(one: SequenceStep) -> int:
    return one.start + len(one.token_ids)
