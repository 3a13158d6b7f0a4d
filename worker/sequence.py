"""What a worker keeps of one request: its tokens, its blocks, how far its KV is computed, and where it stands.

Both roles build on this. No torch, no I/O; the owner of a sequence ends it with `reset`, on every path.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from twostroke.model.step import Draw, SequenceStep, TokenCounts, is_penalised
from twostroke.protocol.blocks import BlockHash, next_hash, root_hash
from twostroke.protocol.requests import GenerateRequest, forbidden_tokens
from twostroke.worker.block_pool import BlockPool


class SequenceState:
    """One request between its arrival at a worker and its end there.

    `token_ids` grows by `append`, also beyond what is computed. `block_ids` holds one pool reference on each block.
    The KV of the first `num_computed` tokens is in those blocks; whoever ran a step advances it, then publishes.
    """

    def __init__(self, request: GenerateRequest, block_size: int):
        self.request = request
        self.block_size = block_size
        self.token_ids: list[int] = list(request.token_ids)
        self.block_ids: list[int] = []
        self.num_computed = 0
        self._block_hashes: list[BlockHash] = []
        self._token_counts: TokenCounts | None = None  # made for the first draw with penalties
        self._num_published = 0  # the first blocks of the table: matched, published, or found to be named elsewhere

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, those of earlier attempts included."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is still to be computed: 1 for a running decode."""
        return len(self.token_ids) - self.num_computed

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Names of all full blocks of `token_ids`, computed or not. Each is hashed once; not to be modified."""
        for index in range(len(self._block_hashes), len(self.token_ids) // self.block_size):
            parent = self._block_hashes[-1] if self._block_hashes else root_hash(self.request.cache_salt)
            start = index * self.block_size
            self._block_hashes.append(next_hash(parent, self.token_ids[start : start + self.block_size]))
        return self._block_hashes

    @property
    def matchable_hashes(self) -> list[BlockHash]:
        """The names worth looking up: at least one token must be computed, or there is nothing to draw from."""
        return self.block_hashes[: (len(self.token_ids) - 1) // self.block_size]

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks to allocate before the next `num_tokens` uncomputed tokens fit; 0 where they fit already."""
        covered = -(-(self.num_computed + num_tokens) // self.block_size)
        return max(0, covered - len(self.block_ids))

    def match_prefix(self, pool: BlockPool) -> int:
        """Take over the blocks of the longest cached prefix; returns how many tokens they hold.

        Raises ValueError for a sequence that has blocks already.
        """
        if self.block_ids:
            raise ValueError(f"request {self.request.request_id} already has blocks")
        self.block_ids = pool.match(self.matchable_hashes)
        self._num_published = len(self.block_ids)
        self.num_computed = self._num_published * self.block_size
        return self.num_computed

    def reserve(self, pool: BlockPool, num_tokens: int) -> None:
        """Allocate what `blocks_needed(num_tokens)` says. Raises OutOfBlocks with nothing changed."""
        if missing := self.blocks_needed(num_tokens):  # a decode needs one every `block_size` steps
            self.block_ids.extend(pool.allocate(missing))

    def publish_full_blocks(self, pool: BlockPool) -> None:
        """Name each block that has become full since the last call, as far as KV is computed."""
        full = self.num_computed // self.block_size
        hashes = self.block_hashes if full > self._num_published else self._block_hashes
        for index in range(self._num_published, full):
            pool.publish(self.block_ids[index], hashes[index])
            self._num_published = index + 1

    def append(self, token_id: int) -> None:
        """Add a drawn (or received) token; its KV is not computed yet."""
        self.token_ids.append(token_id)
        if self._token_counts is not None:
            self._token_counts.append(token_id)

    def reset(self, pool: BlockPool) -> None:
        """Give all blocks back: for preemption (to be computed again, prompt and outputs) and for every ending.

        Harmless when repeated. Only once no step or transfer that writes into the blocks is under way.
        """
        # A new list, since a step's record may still hold the old one.
        released, self.block_ids = self.block_ids, []
        self.num_computed = 0
        self._num_published = 0
        pool.release(released)

    def step(self, num_tokens: int, *, start: int | None = None, follows: int | None = None) -> SequenceStep:
        """The next `num_tokens` uncomputed tokens as part of an engine step, with a draw if they are the last.

        While earlier steps of this sequence are under way, `start` is where the last of them ends; and if it draws,
        `follows` is its index in its batch: what it draws is then the one token of this step.
        The step refers to this sequence's own lists: until the engine is done with it, they may only grow, and nothing
        may be appended to `token_ids` where `counts` are given.
        Raises ValueError where there are fewer tokens, or blocks for fewer.
        """
        start = self.num_computed if start is None else start
        num_drawn = 0 if follows is None else 1  # by the step before
        end, last = start + num_tokens, len(self.token_ids) + num_drawn
        if not 1 <= num_tokens <= last - start or num_drawn * num_tokens > 1:
            raise ValueError(f"{num_tokens} tokens asked for, {last - start} left to compute")
        if end > len(self.block_ids) * self.block_size:
            raise ValueError(f"{len(self.block_ids)} blocks don't hold {end} tokens")
        draw = None
        if end == last:
            draw = Draw(
                sampling=self.request.sampling,
                history=self.token_ids,
                num_prompt_tokens=self.request.num_prompt_tokens,
                forbidden=forbidden_tokens(self.request, self.num_output_tokens + num_drawn),
                counts=self._counts_for_draw(),
            )
        token_ids = self.token_ids[start:end] if follows is None else (0,)
        return SequenceStep(token_ids=token_ids, start=start, block_ids=self.block_ids, draw=draw, follows=follows)

    def _counts_for_draw(self) -> TokenCounts | None:
        if self._token_counts is None and is_penalised(self.request.sampling):
            self._token_counts = TokenCounts(self.token_ids, self.request.num_prompt_tokens)
        return self._token_counts


class Phase(Enum):
    """Where a request stands on a worker."""

    WAITING = auto()  # holds no blocks
    TRANSFERRING = auto()  # holds the prompt's blocks; their KV, or that of the first of them, is on its way
    RUNNING = auto()  # in every step that has a place for it, with a chunk of tokens not computed yet or its last token
    ENDED = auto()  # finished, failed or aborted


Turn = tuple[float, ...]
"""A place in the queue: the smallest goes first (worker/queue_order.py)."""


@dataclass(eq=False, slots=True)
class WorkerJob:
    """One request between its arrival and the release of its blocks. Only the scheduler changes it."""

    sequence: SequenceState
    arrived_at: float  # in seconds of the worker's clock
    awaits_offer: bool = False  # another worker may offer its beginning: not to be admitted yet
    arrival: int = 0  # 0, 1, 2, ...: the order in which requests came
    num_uncached: int = 0  # tokens that were not in the prefix cache when it came
    turn: Turn = ()  # while it waits, or its prompt is computed
    offered_tokens: int = 0  # how much of its beginning another worker offers; 0: nothing, or no longer wanted
    phase: Phase = Phase.WAITING
    # Its parts of steps that have not ended, at most two, in order: the engine may be writing into its blocks.
    under_way: list[SequenceStep] = field(default_factory=list)
    num_drawing: int = 0  # of those, the ones that draw a token
    is_receiving: bool = False  # a transfer may be writing into its blocks
    keeps_blocks: bool = False  # its class's share has brought it on: no higher class takes its blocks back
    num_cached_tokens: int = 0  # found in the prefix cache on first admission, or pulled then
    num_preemptions: int = 0

    @property
    def request(self) -> GenerateRequest:
        return self.sequence.request

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def has_begun(self) -> bool:
        """Whether it has output tokens already: it was resumed, or gave way."""
        return self.sequence.num_output_tokens > 0

    @property
    def is_ready(self) -> bool:
        """Whether it may be admitted in its turn."""
        return not self.awaits_offer

    @property
    def has_kv_coming(self) -> bool:
        """Whether a transfer brings KV of it, which takes blocks but no place in a step."""
        return self.offered_tokens > 0

    @property
    def num_indivisible(self) -> int:
        """Tokens that it must be given at once, since their KV comes at once; 0 where chunks will do."""
        return 0

    @property
    def is_in_use(self) -> bool:
        """Whether its blocks may be read or written now, so that they must stay its own."""
        return bool(self.under_way) or self.is_receiving

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is neither here nor on its way."""
        if self.phase is Phase.TRANSFERRING:
            return len(self.sequence.token_ids) - self.offered_tokens
        return self.sequence.num_uncomputed

    @property
    def num_scheduled(self) -> int:
        """Tokens whose KV is computed, or will be by the steps under way."""
        if not self.under_way:
            return self.sequence.num_computed
        last = self.under_way[-1]
        return last.start + len(last.token_ids)

    @property
    def num_under_way(self) -> int:
        """Tokens whose KV is being computed."""
        return self.num_scheduled - self.sequence.num_computed

    @property
    def num_unscheduled(self) -> int:
        """Tokens for steps to come, one that is being drawn included: 1 for a running decode."""
        return len(self.sequence.token_ids) + self.num_drawing - self.num_scheduled

    @property
    def is_drawing_its_last(self) -> bool:
        """Whether a step under way draws a token that ends the request whatever it is."""
        num_drawing = self.num_drawing
        return num_drawing > 0 and self.sequence.num_output_tokens + num_drawing >= self.request.max_tokens

    def begin_step(self, step: SequenceStep) -> None:
        """It has a part in the next step."""
        self.under_way.append(step)
        self.num_drawing += step.draw is not None

    def end_step(self) -> None:
        """The first of the steps under way has ended."""
        self.num_drawing -= self.under_way.pop(0).draw is not None
