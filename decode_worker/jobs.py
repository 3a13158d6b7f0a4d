"""What the decode scheduler keeps of a request, and what it decides."""

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from twostroke.model.step import BlockCopy, SequenceStep
from twostroke.protocol.requests import FinishReason, GenerateRequest, SampledToken, TokenEvent
from twostroke.worker.queue_order import Turn
from twostroke.worker.sequence import SequenceState


class Phase(Enum):
    """Where a request stands on a decode worker."""

    WAITING = auto()  # holds no blocks
    TRANSFERRING = auto()  # holds the prompt's blocks; their KV, or that of the first of them, is on its way
    RUNNING = auto()  # in every step that has a place for it, with a chunk of tokens not computed yet or its last token
    ENDED = auto()  # finished, failed or aborted


@dataclass(frozen=True, slots=True)
class SwappedKV:
    """KV of a job in host memory."""

    block_ids: tuple[int, ...]  # of host memory, in the order of their tokens
    num_computed: int  # tokens


@dataclass(eq=False, slots=True)
class DecodeJob:
    """One request between its arrival and the release of its blocks. Only the scheduler changes it."""

    sequence: SequenceState
    arrival: int  # 0, 1, 2, ...: the order in which requests came
    arrived_at: float  # in seconds of the worker's clock
    num_uncached: int  # tokens that were not in the prefix cache when it came
    wants_transfer: bool  # its KV comes from a prefill worker
    turn: Turn = ()  # while it waits, or its prompt is computed here
    is_offered: bool = False  # that worker has begun, and holds all the blocks that it needs itself
    awaits_offer: bool = False  # another worker may offer its beginning: not to be admitted yet
    offered_tokens: int = 0  # how much of its beginning another worker offers; 0: nothing, or no longer wanted
    phase: Phase = Phase.WAITING
    # Its parts of steps that have not ended, at most two, in order: the engine may be writing into its blocks.
    under_way: list[SequenceStep] = field(default_factory=list)
    num_drawing: int = 0  # of those, the ones that draw a token
    is_receiving: bool = False  # a transfer may be writing into its blocks
    is_copying: bool = False  # the engine may be copying between its blocks and those of `swapped`
    swapped: SwappedKV | None = None
    has_place: bool = False  # it was in the batch of the last step
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
    def has_kv_coming(self) -> bool:
        """Whether a transfer brings KV of it, which takes blocks but no place in a step."""
        return self.wants_transfer or self.offered_tokens > 0

    @property
    def num_indivisible(self) -> int:
        """Tokens whose KV comes at once; 0 where it is computed here, in chunks."""
        return len(self.sequence.token_ids) if self.wants_transfer else 0

    @property
    def is_in_use(self) -> bool:
        """Whether its blocks may be read or written now, so that they must stay its own."""
        return bool(self.under_way) or self.is_receiving or self.is_copying

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is neither in its blocks nor in host memory."""
        num_swapped = 0 if self.swapped is None else self.swapped.num_computed
        return len(self.sequence.token_ids) - max(self.sequence.num_computed, num_swapped)

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

    def begin(self, step: SequenceStep) -> None:
        """It has a part in the next step."""
        self.under_way.append(step)
        self.num_drawing += step.draw is not None

    def end_first(self) -> None:
        """The first of the steps under way has ended."""
        self.num_drawing -= self.under_way.pop(0).draw is not None


class Entry(msgspec.Struct, frozen=True):
    """A job's part of a step."""

    job: DecodeJob
    step: SequenceStep


@dataclass(frozen=True, slots=True)
class Swap:
    """A job's KV on its way between the cache and host memory."""

    job: DecodeJob
    copy: BlockCopy


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What to run next, after the `swaps`, and which jobs now hold the blocks that their transfer may fill.

    `reserved` jobs: the first `sequence.num_computed` tokens are cached here already, and need not be sent.
    """

    entries: tuple[Entry, ...]
    reserved: tuple[DecodeJob, ...]
    swaps: tuple[Swap, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the engine to do."""
        return not self.entries and not self.swaps


class Progress(msgspec.Struct, frozen=True):
    """A token that was drawn or received, and whether it ended its request."""

    job: DecodeJob
    index: int  # of the token among the request's output tokens
    token: SampledToken
    finish_reason: FinishReason | None

    @property
    def event(self) -> TokenEvent:
        """What the request's router is told."""
        return TokenEvent(self.job.request.request_id, self.index, (self.token,), self.finish_reason)
