"""One request on a worker: its call, its sequence of tokens and blocks, its phase, its transfers, its parts of steps.

Both roles use it. No torch, no I/O. The owner of a sequence ends it with `reset`, on every path.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from twostroke.model.step import (
    Constraint,
    Draw,
    MtpDrafts,
    PromptScorer,
    RowFault,
    SequenceStep,
    TokenCounts,
    is_penalised,
)
from twostroke.protocol.block_hash import BlockHash, next_hash, root_hash
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.kv_layout import NO_BLOCK, ONE_GROUP, KVGroups
from twostroke.protocol.requests import GenerateRequest, Ticket, forbidden_tokens
from twostroke.worker.scheduling.block_pool import BlockPool, OutOfBlocks

if TYPE_CHECKING:
    from twostroke.kvtransfer.ranks import Incoming, Outgoing
    from twostroke.worker.forced_text import ForcedText
    from twostroke.worker.speculator import RequestPredictor


class SequenceState:
    """One request between its arrival at a worker and its end there.

    `token_ids` grows by `append`, also beyond what is computed. `block_ids` is a table of rows with a block for each
    group of layers (protocol/kv_layout.py), and holds one pool reference on each. The KV of the first `num_computed`
    tokens is in those blocks; a window's group keeps only what the next token attends to. `computed` follows each step.

    A window's group has blocks for no more rows than its window and a step of `step_tokens` can touch. It gives the
    first ones back as it takes further ones, so a prompt that has begun never waits for blocks.
    """

    def __init__(self, request: GenerateRequest, block_size: int, groups: KVGroups = ONE_GROUP, step_tokens: int = 1):
        self.request = request
        self.block_size = block_size
        self.groups = groups
        self._most_rows = {group: groups.most_rows(group, block_size, step_tokens) for group in groups.windowed}
        # Bounds of the rows with blocks of windows' groups. Between, there may be a gap before KV that will arrive.
        self._held: dict[int, tuple[int, int]] = dict.fromkeys(groups.windowed, (0, 0))
        self.token_ids: list[int] = list(request.token_ids)
        self.block_ids: list[int] = []
        self.constraint: Constraint | None = None  # of a request with a grammar, before its first step
        self.forced_text: ForcedText | None = None  # of the same, once it is known, where there may be drafts
        self.mtp: MtpDrafts | None = None  # where a model's MTP head drafts, before the first step
        self.num_computed = 0
        self.scorer = None if request.scoring is None else PromptScorer(request.scoring, request.token_ids)
        self.fault = RowFault() if self.scorer is None else self.scorer.fault
        self._block_hashes: list[BlockHash] = []
        self._token_counts: TokenCounts | None = None  # made for the first draw with penalties
        self._num_published = 0  # the first rows of the table: matched, published, or found to be named elsewhere
        self._has_tail = False  # it is published, or was taken from another
        self._is_retained = request.keep_s <= 0  # the prompt's blocks are told to be kept, or need not be
        self._copied_from: int | None = None  # a block with a reference of this sequence's, until it is copied

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, including those of earlier attempts."""
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
        """The names worth looking up.

        At least one token must be computed, or there is nothing to draw from; for some scores all must be.
        """
        if self.request.scoring is not None and self.request.scoring.needs_all:
            return []
        return self.block_hashes[: (len(self.token_ids) - 1) // self.block_size]

    @property
    def num_rows(self) -> int:
        """Rows of the block table."""
        return len(self.block_ids) // self.groups.count

    @property
    def num_held(self) -> int:
        """Number of tokens, from the first on, that have blocks in every group."""
        return min([self.num_rows, *[end for _, end in self._held.values()]]) * self.block_size

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the blocks to allocate for the next `num_tokens` uncomputed tokens; 0 where they fit already."""
        rows = -(-(self.num_computed + num_tokens) // self.block_size)
        missing = max(0, rows - self.num_rows) * (self.groups.count - len(self._held))
        for group, (_, end) in self._held.items():
            missing += max(0, self._window_end(group, rows) - end)
        return missing

    def match_prefix(self, pool: BlockPool) -> int:
        """Take the blocks of the longest cached prefix; return their number of tokens.

        Raises ValueError for a sequence that has blocks already.
        """
        if self.block_ids:
            raise ValueError(f"request {self.request.request_id} already has blocks")
        self.block_ids = pool.match(self.matchable_hashes)
        self._num_published = self.num_rows
        self.num_computed = self._num_published * self.block_size
        for group in self._held:
            self._held[group] = self._first_row(group), self._num_published
        return self.num_computed

    def match_tail(self, pool: BlockPool) -> int:
        """Have the end of the prompt, except its last token, copied from another sequence's block by the next step.

        Called once blocks are reserved, where the cached prefix is whole. Returns the number of tokens that it spares.
        """
        num_tokens = self.request.num_prompt_tokens - 1 - self.num_computed
        if not 0 < num_tokens < self.block_size or (name := self._tail_name()) is None:
            return 0
        self._copied_from = pool.take_tail(name)
        if self._copied_from is None:
            return 0
        self._has_tail = True
        self.num_computed += num_tokens
        return num_tokens

    @property
    def awaits_copy(self) -> bool:
        """True while the last of the tokens that count as computed are still to be copied from another's block."""
        return self._copied_from is not None

    def reserve(self, pool: BlockPool, num_tokens: int) -> None:
        """Allocate `blocks_needed(num_tokens)` blocks. Raises OutOfBlocks with nothing changed."""
        missing = self.blocks_needed(num_tokens)
        if not missing:  # a decode needs one every `block_size` steps
            return
        blocks = pool.allocate(missing)
        if not self._held:  # then there is one group
            self.block_ids.extend(blocks)
            return
        first, rows = self.num_rows, -(-(self.num_computed + num_tokens) // self.block_size)
        self.block_ids.extend([NO_BLOCK] * (max(0, rows - first) * self.groups.count))
        for group in range(self.groups.count):
            begin, end = first, rows
            if group in self._held:
                kept, begin = self._held[group]
                end = max(begin, self._window_end(group, rows))
                self._held[group] = kept, end
            self._fill(group, range(begin, end), blocks)

    def computed(self, pool: BlockPool, num_tokens: int) -> None:
        """Account for steps that computed the KV of the first `num_tokens` tokens: name blocks, move windows on."""
        self._end_copy(pool)
        self.num_computed = num_tokens
        self._publish_full_blocks(pool)
        if self._held:
            self._move_windows(pool)

    def received(self, pool: BlockPool, num_tokens: int) -> None:
        """Account for expected KV that has arrived, of which windows have only what the next token attends to."""
        self.receives(pool, num_tokens)
        self._publish_full_blocks(pool)

    def receives(self, pool: BlockPool, num_tokens: int) -> None:
        """Account for expected KV that will arrive before anything reads it: no block gets its name yet."""
        self.num_computed = num_tokens
        if self._held:
            self._move_windows(pool)

    def expect(self, pool: BlockPool, num_tokens: int, *, keeps_prefix: bool) -> None:
        """Prepare the windows' blocks for KV of the first `num_tokens` tokens that arrives from elsewhere.

        With `keeps_prefix` the computed part stays, so that `expect_nothing` can go on from there if no KV arrives.
        That may take more blocks than a step does: raises OutOfBlocks with nothing changed. Without it, the sequence
        must be reset if no KV arrives.
        """
        computed, end = self.num_computed // self.block_size, -(-num_tokens // self.block_size)
        moving: dict[int, tuple[int, int]] = {}  # groups with blocks elsewhere: the first row to keep, and rows to come
        missing = 0
        for group, (first, held_end) in self._held.items():
            if held_end >= end:
                continue
            wanted, spare = max(first, self._first_row(group, num_tokens)), held_end - computed
            kept = first if keeps_prefix else min(wanted, computed)
            count = max(spare, end - max(computed, wanted)) if keeps_prefix else spare + kept - first
            missing += count - spare - (kept - first)
            moving[group] = kept, count
        if missing > pool.free_blocks:
            raise OutOfBlocks(f"{missing} blocks wanted, {pool.free_blocks} of {pool.num_blocks} free")
        for group, (kept, count) in moving.items():
            pool.release(self._take(group, range(self._held[group][0], kept)))
            self._lay(pool, group, range(max(computed, end - count), end))

    def expect_nothing(self, pool: BlockPool) -> None:
        """Prepare the windows' blocks for computing the rest here: no KV arrives after all."""
        computed = self.num_computed // self.block_size
        for group in self._held:
            self._lay(pool, group, range(computed, self._window_end(group, self.num_rows)))

    def append(self, token_id: int) -> None:
        """Add a drawn (or received) token; its KV is not computed yet."""
        self.token_ids.append(token_id)

    def reset(self, pool: BlockPool) -> None:
        """Release all blocks: for preemption (prompt and outputs are computed again) and for every ending.

        Harmless when repeated. Only while no step or transfer that writes into the blocks is under way.
        """
        # A new list, since a step's record may still hold the old one.
        self._end_copy(pool)
        self._has_tail = False
        self._is_retained = self.request.keep_s <= 0
        released, self.block_ids = self.block_ids, []
        self.num_computed = 0
        self._num_published = 0
        self._held = dict.fromkeys(self._held, (0, 0))
        pool.release(released)

    def step(self, num_tokens: int, *, start: int | None = None, follows: int | None = None) -> SequenceStep:
        """Return the next `num_tokens` uncomputed tokens as part of an engine step, with a draw if they are the last.

        While earlier steps of this sequence are under way, `start` is where the last of them ends; and if it draws,
        `follows` is its index in its batch: the token that it draws is then the one token of this step.
        The step refers to this sequence's own lists: until the engine is done with the step, they may only grow.
        Raises ValueError where there are fewer tokens, or blocks for fewer.
        """
        start = self.num_computed if start is None else start
        num_drawn = 0 if follows is None else 1  # by the step before
        end, last = start + num_tokens, len(self.token_ids) + num_drawn
        if not 1 <= num_tokens <= last - start or num_drawn * num_tokens > 1:
            raise ValueError(f"{num_tokens} tokens wanted, {last - start} left to compute")
        if end > self.num_held:
            raise ValueError(f"{len(self.block_ids)} blocks don't hold {end} tokens")
        draw = None
        if end == last:
            draw = Draw(
                sampling=self.request.sampling,
                history=self.token_ids,
                num_prompt_tokens=self.request.num_prompt_tokens,
                forbidden=forbidden_tokens(self.request, self.num_output_tokens + num_drawn),
                counts=self._counts_for_draw(),
                constraint=self.constraint,
                fault=self.fault,
                mtp=self.mtp,
            )
        token_ids = self.token_ids[start:end] if follows is None else (0,)
        copied_from = self._copied_from if start == self.num_computed else None  # by the first of its steps
        return SequenceStep(token_ids, start, self.block_ids, draw, follows, self.scorer, copied_from)

    def draft_steps(
        self, draft: Sequence[int], start: int, constraint: Constraint | None = None
    ) -> tuple[SequenceStep, ...]:
        """Return the rows of drafted tokens, the first of which is at position `start`: each draws the token after it.

        The row before them is the step of the last token, with a draw. `constraint` is that of Constraint.for_drafts
        where the request has a grammar. Raises ValueError where there are blocks for fewer tokens.
        """
        if start + len(draft) > self.num_held:
            raise ValueError(f"{len(self.block_ids)} blocks don't hold {start + len(draft)} tokens")
        counts, steps = self._counts_for_draw(), []
        for place, token_id in enumerate(draft):
            num_drafted = place + 1
            draw = Draw(
                sampling=self.request.sampling,
                history=self.token_ids if counts is None else [*self.token_ids, *draft[:num_drafted]],
                num_prompt_tokens=self.request.num_prompt_tokens,
                forbidden=forbidden_tokens(self.request, self.num_output_tokens + num_drafted),
                counts=None if counts is None else counts.copy(),
                constraint=constraint,
                fault=RowFault(),
                num_drafted=num_drafted,
                mtp=self.mtp,
            )
            steps.append(SequenceStep((token_id,), start + place, self.block_ids, draw))
        return tuple(steps)

    def _tail_name(self) -> BlockHash | None:
        """Return the name of the prompt's tokens behind its last full block, the last token aside; None without any.

        Where windows move on, blocks are released before another sequence could copy them.
        """
        last = self.request.num_prompt_tokens - 1
        row = last // self.block_size
        if self.groups.windowed or self.request.scoring is not None or row * self.block_size == last:
            return None
        parent = self.block_hashes[row - 1] if row else root_hash(self.request.cache_salt)
        return next_hash(parent, self.token_ids[row * self.block_size : last])

    def _publish_tail(self, pool: BlockPool) -> None:
        """Name the prompt's end, once its KV is there."""
        self._has_tail = True
        if (name := self._tail_name()) is not None:
            pool.publish_tail(self.block_ids[(self.request.num_prompt_tokens - 1) // self.block_size], name)

    def _end_copy(self, pool: BlockPool) -> None:
        """Release the block that was copied from."""
        if self._copied_from is not None:
            pool.release([self._copied_from])
            self._copied_from = None

    def _publish_full_blocks(self, pool: BlockPool) -> None:
        """Name each block that has become full since the last call, as far as KV is there."""
        if not self._has_tail and self.num_computed >= self.request.num_prompt_tokens:
            self._publish_tail(pool)
        full, count = self.num_computed // self.block_size, self.groups.count
        hashes = self.block_hashes if full > self._num_published else self._block_hashes
        for row in range(self._num_published, full):
            for group, block_id in enumerate(self.block_ids[row * count : (row + 1) * count]):
                if block_id != NO_BLOCK:
                    pool.publish(block_id, hashes[row], group)
            self._num_published = row + 1
        if not self._is_retained and self.num_computed >= self.request.num_prompt_tokens:
            self._retain_prompt(pool)

    def _retain_prompt(self, pool: BlockPool) -> None:
        """Have the prompt's full blocks kept, as its client wishes; of windows what a prompt behind it attends to."""
        self._is_retained = True
        size, count = self.block_size, self.groups.count
        rows = self.request.num_prompt_tokens // size
        matchable = (self.request.num_prompt_tokens - 1) // size * size  # the same prompt goes on from here
        blocks: list[int] = []
        for group in range(count):
            first = self.groups.first_kept(group, matchable) // size
            blocks += self.block_ids[first * count + group : rows * count : count]
        pool.retain(blocks, self.request.client, self.request.keep_s)

    def _first_row(self, group: int, num_tokens: int | None = None) -> int:
        """Return the first row that the token after `num_tokens` attends to; None: after those that are computed."""
        num_tokens = self.num_computed if num_tokens is None else num_tokens
        return self.groups.first_kept(group, num_tokens) // self.block_size

    def _window_end(self, group: int, rows: int) -> int:
        """Return how many rows of a table a window's group may have reached."""
        return min(rows, self._first_row(group) + self._most_rows[group])

    def _move_windows(self, pool: BlockPool) -> None:
        """Release blocks that no further token attends to, and allocate as many for later rows."""
        for group, (first, end) in self._held.items():
            kept, last = self._first_row(group), self._window_end(group, self.num_rows)
            if kept > first:
                pool.release(self._take(group, range(first, min(kept, end))))
            if last > end:
                self._fill(group, range(end, last), pool.allocate(last - end))
            self._held[group] = kept, max(end, last)

    def _lay(self, pool: BlockPool, group: int, rows: range) -> None:
        """Give a window's group blocks for exactly these of the rows without KV."""
        computed, (first, end) = self.num_computed // self.block_size, self._held[group]
        blocks = [block_id for block_id in self._take(group, range(computed, end)) if block_id != NO_BLOCK]
        pool.release(blocks[len(rows) :])
        blocks = blocks[: len(rows)]
        self._fill(group, rows, [*blocks, *pool.allocate(len(rows) - len(blocks))])
        self._held[group] = first, rows.stop

    def _take(self, group: int, rows: range) -> list[int]:
        """Remove and return the group's blocks of these rows."""
        places = slice(rows.start * self.groups.count + group, rows.stop * self.groups.count, self.groups.count)
        blocks = self.block_ids[places]
        self.block_ids[places] = [NO_BLOCK] * len(blocks)
        return blocks

    def _fill(self, group: int, rows: range, blocks: list[int]) -> None:
        """Take the group's blocks of these rows off the list's end."""
        for row in rows:
            self.block_ids[row * self.groups.count + group] = blocks.pop()

    def _counts_for_draw(self) -> TokenCounts | None:
        if self._token_counts is None and is_penalised(self.request.sampling):
            self._token_counts = TokenCounts(self.token_ids, self.request.num_prompt_tokens)
        return self._token_counts


class Phase(Enum):
    """The phases of a request on a worker."""

    WAITING = auto()  # holds no blocks
    TRANSFERRING = auto()  # holds the prompt's blocks; their KV, or that of the first of them, is on its way
    RUNNING = auto()  # in every step that has a place for it, with a chunk of its prompt or its last token
    ENDED = auto()  # finished, failed or aborted


NEWEST_STEP = 0.1
"""Weight of the newest decode step in what a request's steps have drawn of late."""

NEWEST_ANSWER = 0.2
"""The same of the newest answer in what newcomers are expected to draw."""

Turn = tuple[float, ...]
"""A position in the queue: the smallest goes first (worker/scheduling/step_policy.py)."""


@dataclass(frozen=True, slots=True)
class SwappedKV:
    """KV of a job in host memory."""

    block_ids: tuple[int, ...]  # of host memory: a table like the sequence's, of the rows with KV
    num_computed: int  # tokens


@dataclass(eq=False, slots=True)
class WorkerJob:
    """One request between its arrival and the release of its blocks.

    The scheduler alone writes the first part, the worker and its transfers the second.
    """

    sequence: SequenceState
    arrived_at: float  # in seconds of the worker's clock
    awaits_offer: bool = False  # another worker may offer its prefix: not to be admitted yet
    awaits_grammar: bool = False  # its grammar is being compiled: not to be admitted yet
    wants_transfer: bool = False  # a prefill worker computes its prompt and sends the KV here
    is_offered: bool = False  # that worker has begun, and has reserved all the blocks that it needs itself
    is_prefill_only: bool = False  # it ends with its first token
    arrival: int = 0  # 0, 1, 2, ...: the order in which requests arrived
    num_uncached: int = 0  # tokens that were not in the prefix cache when it arrived
    turn: Turn = ()  # while it waits, or its prompt is computed
    offered_tokens: int = 0  # length of the prefix that another worker offers; 0: none, or no longer wanted
    phase: Phase = Phase.WAITING
    # Its parts of steps that have not ended, at most two, in order: the engine may be writing into its blocks.
    under_way: list[SequenceStep] = field(default_factory=list)
    num_drawing: int = 0  # of those, the ones that draw a token
    is_receiving: bool = False  # a transfer may be writing into its blocks
    is_sending: bool = False  # a transfer may be reading its blocks
    is_copying: bool = False  # the engine may be copying between its blocks and those of `swapped`
    has_been_sent: bool = False  # a transfer has begun to read its blocks: they must stay, whatever became of it
    has_place: bool = False  # it was in the batch of the last step
    keeps_blocks: bool = False  # its class's share admitted it: no higher class takes its blocks back
    swapped: SwappedKV | None = None
    num_cached_tokens: int = 0  # found in the prefix cache on first admission, or pulled then
    reads_tiers: bool = False  # the prefix that it may be offered is its own worker's tiers'
    tier_tokens: int = 0  # of the cached tokens, those whose KV came from there
    num_preemptions: int = 0
    predictor: "RequestPredictor | None" = None  # of its next tokens, once drafts were wanted
    tokens_per_step: float = 1.0  # that its decode steps have drawn of late: more than 1 where drafts were right
    drafts_per_step: float = 0.0  # rows of drafts in these steps

    # The worker's part: the call, and the transfers.
    reply: "asyncio.Future[Any] | None" = None  # None: nobody awaits one
    compiling: "asyncio.Task[None] | None" = None  # of its grammar
    ready_at: float = 0.0  # when it could first have been stepped: its arrival, or the arrival of its KV
    stepped_at: float | None = None
    chunk_ends_s: list[float] = field(default_factory=list)  # of its prompt, since then
    ticket: Ticket | None = None  # for the prompt's KV, which goes out where the prompt is computed, or comes in
    outgoing: "Outgoing | None" = None
    incoming: "Incoming | None" = None
    transfer_s: float = 0.0  # until its KV had come
    is_aborted: bool = False  # its transfer has been given up here, on purpose
    computes_prompt: bool = False  # its prompt may be computed here, though another worker was to send the KV
    router_wait: asyncio.TimerHandle | None = None  # its transfer has failed; runs until its router must have answered
    pull_ticket: Ticket | None = None  # for its prefix, whose offer is neither taken nor refused
    pull: "Incoming | None" = None  # of its prefix

    @property
    def request(self) -> GenerateRequest:
        return self.sequence.request

    @property
    def promised_s(self) -> float:
        """Promised time per token; infinite where none is, or where the answer is written elsewhere."""
        promised_s = None if self.is_prefill_only else self.request.promise.tpot_s
        return math.inf if promised_s is None else promised_s

    def drew(self, num_tokens: int, num_drafted: int) -> None:
        """Account for a decode step's tokens and rows of drafts."""
        self.tokens_per_step += NEWEST_STEP * (num_tokens - self.tokens_per_step)
        self.drafts_per_step += NEWEST_STEP * (num_drafted - self.drafts_per_step)

    def usual_steps(self, before: tuple[float, float]) -> tuple[float, float]:
        """Return the tokens and rows of drafts that a newcomer's steps may have, with this request counted in."""
        tokens, drafts = before
        tokens += NEWEST_ANSWER * (self.tokens_per_step - tokens)
        return tokens, drafts + NEWEST_ANSWER * (self.drafts_per_step - drafts)

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def has_output(self) -> bool:
        """True once it has output tokens: it was resumed, or preempted."""
        return self.sequence.num_output_tokens > 0

    @property
    def is_ready(self) -> bool:
        """True where it may be admitted in its turn.

        A transfer must be offered first. Otherwise two workers could reserve blocks here and wait for blocks there, in
        a circle.
        """
        return not (self.awaits_offer or self.awaits_grammar) and (self.is_offered or not self.wants_transfer)

    @property
    def has_kv_coming(self) -> bool:
        """True where a transfer brings some of its KV, which takes blocks but no place in a step."""
        return self.wants_transfer or self.offered_tokens > 0

    @property
    def num_indivisible(self) -> int:
        """Tokens that must be admitted together, since their KV arrives together; 0 where chunks will do."""
        return len(self.sequence.token_ids) if self.wants_transfer else 0

    @property
    def is_in_use(self) -> bool:
        """True where a step, a transfer or a copy may touch its blocks, which must stay its own."""
        return bool(self.under_way) or self.is_receiving or self.is_sending or self.is_copying

    @property
    def num_to_compute(self) -> int:
        """Prompt tokens to compute here: neither cached, nor on their way, nor in host memory."""
        if self.phase is Phase.RUNNING:
            num_tokens = self.sequence.num_uncomputed
            return num_tokens if num_tokens > 1 or self.is_prefill_only else 0
        if self.wants_transfer:
            return 0
        num_here = self.offered_tokens if self.phase is Phase.TRANSFERRING else self.sequence.num_computed
        num_swapped = 0 if self.swapped is None else self.swapped.num_computed
        return len(self.sequence.token_ids) - max(num_here, num_swapped)

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
        """Tokens for later steps, including one that is being drawn: 1 for a running decode."""
        return len(self.sequence.token_ids) + self.num_drawing - self.num_scheduled

    @property
    def is_decoding(self) -> bool:
        """True where its next step computes the KV of one token and draws the next."""
        return self.num_unscheduled == 1 and not self.is_prefill_only

    @property
    def is_drawing_its_last(self) -> bool:
        """True where a step under way draws a token that ends the request whatever it is."""
        if self.num_drawing == 0:
            return False
        return self.is_prefill_only or self.sequence.num_output_tokens + self.num_drawing >= self.request.max_tokens

    @property
    def has_begun(self) -> bool:
        """True once anything is computed or received for it, or is about to be."""
        return self.stepped_at is not None or self.is_offered or self.phase is not Phase.WAITING

    @property
    def is_over(self) -> bool:
        """True once it has ended, and nothing sends its KV: the worker may forget it."""
        return self.has_ended and not self.is_sending

    def note_step(self, now: float) -> None:
        """Note the first step that it is in, or the transfer that begins before that."""
        if self.stepped_at is None:
            self.stepped_at = now

    def answer(self, reply: Any) -> None:
        """Return from the call, unless its awaiter is gone."""
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: TwostrokeError) -> None:
        """Raise `error` to the call's awaiter, unless it is gone."""
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(error)

    def begin_step(self, step: SequenceStep) -> None:
        """Add a part of the next step."""
        self.under_way.append(step)
        self.num_drawing += step.draw is not None

    def end_step(self) -> None:
        """Remove the part of the first step under way, which has ended."""
        self.num_drawing -= self.under_way.pop(0).draw is not None
