"""One request on a worker: its call, its sequence, its phase, its transfers, its parts of steps. Pure."""

import asyncio
import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from twostroke.model.step import SequenceStep
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.requests import GenerateRequest, Ticket
from twostroke.worker.scheduling.sequence import SequenceState

if TYPE_CHECKING:
    from twostroke.kvtransfer.ranks import Incoming, Outgoing
    from twostroke.worker.speculation.speculator import RequestPredictor


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
"""A position in the queue: the smallest goes first (worker/scheduling/queue_order.py)."""


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
