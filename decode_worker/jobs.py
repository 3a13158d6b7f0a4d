"""What the decode scheduler keeps of a request, and what it decides."""

from dataclasses import dataclass
from enum import Enum, auto

from model.sequence import SequenceState
from model.step import SequenceStep
from protocol.requests import FinishReason, GenerateRequest, SampledToken, TokenEvent


class Phase(Enum):
    """Where a request stands on a decode worker."""

    WAITING = auto()  # holds no blocks
    TRANSFERRING = auto()  # holds the prompt's blocks; their KV is on its way
    RUNNING = auto()  # in every step that has room for it, with a chunk of tokens not computed yet or its last token
    ENDED = auto()  # finished, failed or aborted


@dataclass(eq=False, slots=True)
class DecodeJob:
    """One request between its arrival and the release of its blocks. Only the scheduler changes it."""

    sequence: SequenceState
    arrival: int  # 0, 1, 2, ...: the order in which requests came
    wants_transfer: bool  # its KV comes from a prefill worker
    is_offered: bool = False  # that worker has begun, and holds all the blocks that it needs itself
    phase: Phase = Phase.WAITING
    in_step: bool = False  # the engine may be writing into its blocks
    is_receiving: bool = False  # a transfer may be writing into its blocks
    num_cached_tokens: int = 0  # found in the prefix cache on first admission
    num_preemptions: int = 0

    @property
    def request(self) -> GenerateRequest:
        return self.sequence.request

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED


@dataclass(frozen=True, slots=True)
class Entry:
    """A job's part of a step."""

    job: DecodeJob
    step: SequenceStep


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What to run next, and which jobs now hold the blocks that their transfer may fill.

    `reserved` jobs: the first `sequence.num_computed` tokens are cached here already, and need not be sent.
    """

    entries: tuple[Entry, ...]
    reserved: tuple[DecodeJob, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """A token that was drawn or received, and whether it ended its request."""

    job: DecodeJob
    index: int  # of the token among the request's output tokens
    token: SampledToken
    finish_reason: FinishReason | None

    @property
    def event(self) -> TokenEvent:
        """What the request's router is told."""
        return TokenEvent(self.job.request.request_id, self.index, (self.token,), self.finish_reason)
