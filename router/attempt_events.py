"""The events of an attempt, and who hears them.

Rules:
- An event states a fact. Observers never raise and never answer; a question to one of them is a plain call.
- `AttemptLog.emit` is the only place that calls observers, in the order of the list that the pipeline gives it.
- Events come in this order, each at most once: AttemptStarted, then those of prefill and decode, AttemptEnded last.
- A token is no event: observers hear of the first one, and of the first that the decode worker computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.requests import DecodeReply, GenerateRequest, PrefillReply
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.fleet import Path


@dataclass(frozen=True, slots=True, eq=False)
class SuspectRequest:
    """A request under way, which becomes a suspect when a worker dies of it (router/health/poison.py)."""

    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """Facts that hold for a whole attempt."""

    path: Path
    request: GenerateRequest  # the sequence's template
    sent: Sequence[int]  # all output tokens of the sequence so far; grows
    suspect: SuspectRequest


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """The attempt is about to call its workers, or waits until it may."""

    at: float


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prefill worker has computed the prompt of `num_tokens` tokens, earlier outputs included."""

    at: float
    reply: PrefillReply
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """No KV comes from the prefill worker."""

    error: TwostrokeError


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill worker's call is over, with or without a result."""


@dataclass(frozen=True, slots=True)
class PrefillTakenOver:
    """The decode worker is to compute the prompt in place of the prefill worker."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The attempt's first token has come, from either worker."""

    at: float


@dataclass(frozen=True, slots=True)
class PrefixCached:
    """The decode worker, which computes the prompt, found `num_tokens` of it in its prefix cache."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """The decode worker has computed a token of its own."""

    at: float


@dataclass(frozen=True, slots=True)
class DecodeDone:
    """The decode worker's call has returned. `has_transfer`: KV was to come from another worker."""

    reply: DecodeReply
    num_tokens: int  # of the prompt, earlier outputs included
    has_transfer: bool


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The decode worker failed the request, or refused it."""

    error: TwostrokeError


@dataclass(frozen=True, slots=True)
class ScoreDone:
    """A worker has scored or embedded the prompt; nothing more follows."""

    at: float
    reply: PrefillReply


MoveReason = Literal["drain", "crowded", "prompts"]

MOVE_REASONS: tuple[MoveReason, ...] = get_args(MoveReason)


@dataclass(frozen=True, slots=True)
class StreamMove:
    """A running stream goes on at `target`, which has its KV."""

    target: WorkerInfo
    reason: MoveReason


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The attempt has nothing open any more. `has_decoded`: there was a DecodeStarted. With a `move` its stream goes on
    at another worker."""

    at: float
    error: TwostrokeError | None
    has_decoded: bool
    move: StreamMove | None = None


AttemptEvent = (
    AttemptStarted
    | PrefillDone
    | PrefillLost
    | PrefillEnded
    | PrefillTakenOver
    | FirstToken
    | PrefixCached
    | DecodeStarted
    | DecodeDone
    | DecodeFailed
    | ScoreDone
    | AttemptEnded
)


class AttemptObserver(Protocol):
    """Takes note of some events of an attempt."""

    def on_event(self, attempt: AttemptContext, event: AttemptEvent) -> None:
        """Take note of `event` where it matters here."""


class AttemptLog:
    """Passes one attempt's events to its observers. `has_decoded`: its decode worker has computed something."""

    def __init__(self, attempt: AttemptContext, observers: Sequence[AttemptObserver], clock: Clock):
        self.attempt = attempt
        self.clock = clock
        self.has_decoded = False
        self._observers = observers

    def emit(self, event: AttemptEvent) -> None:
        """Tell every observer, in their order."""
        if isinstance(event, DecodeStarted | ScoreDone):
            self.has_decoded = True
        for observer in self._observers:
            observer.on_event(self.attempt, event)
