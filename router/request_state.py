"""One choice of a response, from its job to its end: `RequestState`, and the events of attempts that change it.

`JobMaker` makes the job. The pipeline writes attempts, moments and tokens, and `ChoiceWriter` counts what it makes of
the tokens; nobody else writes. Log lines, metrics, spans, `usage.stages`, the page's feed and reports are views.

The stages, in their order: `arrive, admit, prefill_queue, prefill, transfer, decode_queue, decode, finish`. Moments are
the router's clock, durations are the workers' own; all in seconds. KV is sent while it is computed, so `transfer`
begins with the attempt and includes what it waited for.

Rules of events:
- An event states a fact. Observers never raise and never answer; a question to one of them is a plain call.
- `AttemptLog.emit` is the only place that calls observers, in the order of the list that the pipeline gives it.
- Events come in this order, each at most once: AttemptStarted, then those of prefill and decode, AttemptEnded last.
- A token is no event: observers hear of the first one, and of the first that the decode worker computes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.requests import (
    NO_REQUEST,
    DecodeReply,
    FinishReason,
    GenerateRequest,
    LogContext,
    Peer,
    PrefillReply,
    PromptScores,
    TokenEvent,
)
from twostroke.protocol.stats import WorkerInfo

if TYPE_CHECKING:
    from twostroke.router.text.response_parser import ResponseParser

# --- the path ---


class PathEstimate(msgspec.Struct, frozen=True):
    """A request's times on a path, in seconds, by the cost models that its workers have fitted."""

    queue_s: float  # until its prompt is begun: work that goes first
    pull_s: float  # fetching the prompt's beginning from another worker
    prefill_s: float  # computing what is cached nowhere
    transfer_s: float  # of KV, as far as prefill doesn't hide it
    decode_slot_s: float  # until the decode worker's next step has room for it
    step_s: float  # of the decode worker with the request in it, drafts aside
    speedup: float = 1.0  # by drafts: a token takes so much less than a step
    tier_read_s: float = 0.0  # reading the prompt's beginning from KV tiers of the worker that computes the rest

    @property
    def token_s(self) -> float:
        """Predicted time between tokens."""
        return self.step_s / self.speedup

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.queue_s + self.pull_s + self.tier_read_s + self.prefill_s


PathKind = Literal["decode", "prefill_decode", "prefill", "score"]
"""A decode worker alone; a pair; a prefill worker alone, which also writes the answer; any worker that only scores."""

PATH_KINDS: tuple[PathKind, ...] = get_args(PathKind)


class Path(msgspec.Struct, frozen=True):
    """The workers of one attempt. Without a prefill worker, the decode worker computes the prompt itself.

    A prompt that is only scored has one worker, of either role, in the field `decode`.
    """

    prefill: WorkerInfo | None
    decode: WorkerInfo
    source: WorkerInfo | None = None  # the worker from which the prompt's beginning is pulled
    estimate: PathEstimate | None = (
        None  # None: the workers have not reported their costs yet, or the policy needs none
    )
    new_tokens: int | None = None  # of the prompt, to be computed; known with the estimate
    is_cost_probe: bool = False  # taken to check its costs, not for them
    is_scoring: bool = False  # the prompt is only scored or embedded
    is_at_prefill: bool = False  # a prefill worker writes the answer

    @property
    def kind(self) -> PathKind:
        """The path by which workers it takes."""
        if self.is_scoring:
            return "score"
        if self.prefill is not None:
            return "prefill_decode"
        return "prefill" if self.is_at_prefill else "decode"

    @property
    def prompt_worker(self) -> WorkerInfo:
        """The worker that computes the prompt."""
        return self.prefill or self.decode

    @property
    def worker_ids(self) -> tuple[str, str]:
        """The ids of the prefill and of the decode worker, as lines and spans name them; empty for one that is not
        there."""
        decode = self.decode.peer.worker_id
        if self.prefill is not None:
            return self.prefill.peer.worker_id, decode
        return (decode, "") if self.is_scoring and self.decode.role == "prefill" else ("", decode)

    @property
    def workers(self) -> tuple[Peer, ...]:
        """The workers that serve the attempt, first the one that computes the prompt."""
        return (self.decode.peer,) if self.prefill is None else (self.prefill.peer, self.decode.peer)


# --- the job ---


class PromptScored(TokenEvent, frozen=True, array_like=True):
    """The result of scoring a prompt, with the one token after it where that is wanted."""

    scores: PromptScores | None = None
    embedding: bytes = b""  # as in PrefillReply


@dataclass
class PromptToScore:
    """A prompt to score once for all of its choices."""

    request: GenerateRequest  # with `scoring`
    scored: PromptScored | None = None  # None: not scored yet


@dataclass(frozen=True)
class ChatParsing:
    """The parser that tells a chat's calls and reasoning from its content."""

    opened: "ResponseParser"  # it has read what the prompt has of the answer: once, however many choices there are
    includes_reasoning: bool = True
    has_tools: bool = False  # the answer may be calls alone

    def parser(self) -> "ResponseParser":
        """A parser of one choice."""
        return self.opened.copy()


@dataclass(frozen=True)
class ChoiceJob:
    """One choice of a response as its client wants it."""

    request: GenerateRequest  # a template: each attempt gets an id of its own
    index: int = 0  # of the choice in the response
    group: int = 0  # of its prompt: choices of one prompt share its prefix
    stop: tuple[str, ...] = ()
    echo: str = ""  # shown before the first token
    shows_stop: bool = False  # the stop string or token that ends it has its text in it
    shows_special: bool = False  # special tokens have their names in it
    prompt: PromptToScore | None = None  # before the first token, where something is to be read off it
    echoes_logprobs: bool = False  # those of prompt tokens are shown like those of the answer
    prompt_logprobs: int | None = None  # how many alternatives vLLM's field has; None: there is none
    left_out: tuple[str, ...] = ()  # keywords of lenient schemas that the answer is not held to
    chat: ChatParsing | None = None  # how the answer is taken apart; None: it is text

    @property
    def has_tools(self) -> bool:
        """Return whether the answer may be calls alone."""
        return self.chat is not None and self.chat.has_tools


# --- events of attempts ---


@dataclass(frozen=True, slots=True, eq=False)
class SuspectRequest:
    """A request under way, which becomes a suspect when a worker dies of it (router/worker_health.py)."""

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


# --- the record ---


@dataclass(slots=True)
class AttemptState:
    """One attempt, with its workers' own timings; None: has not happened, or not yet."""

    begin: float
    path: Path
    end: float | None = None
    error: str | None = None  # the kind of failure that ended it; never an error's own words, which may quote a request
    prompt_done: float | None = None  # the prefill worker has replied
    decoding: float | None = None  # the decode worker has drawn a token of its own
    num_cached_tokens: int = 0  # prompt tokens found in a prefix cache
    num_tier_tokens: int = 0  # of these, whose KV came from a KV tier
    num_skipped_tokens: int = 0  # prompt tokens whose KV the decode worker had, and the transfer left out
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    chunk_ends_s: tuple[float, ...] = ()  # within it
    transfer_s: float | None = None
    decode_queue_s: float | None = None

    def keep_prefill(self, reply: PrefillReply, num_prompt_tokens: int) -> None:
        """Keep the numbers of the worker that has computed the prompt."""
        self.prefill_queue_s, self.prefill_s = reply.queue_s, reply.prefill_s
        self.chunk_ends_s = reply.chunk_ends_s
        self.keep_cached(reply, num_prompt_tokens)

    def keep_cached(self, reply: PrefillReply | DecodeReply, num_prompt_tokens: int) -> None:
        """Keep what of the prompt was not computed."""
        self.num_cached_tokens = min(reply.num_cached_tokens, num_prompt_tokens)
        self.num_tier_tokens = min(reply.tier_tokens, self.num_cached_tokens)


class MoveStage(NamedTuple):
    """A move of the stream, from one worker to another."""

    at: float
    source: str
    target: str
    reason: MoveReason


@dataclass(slots=True, eq=False)
class RequestState:
    """The record of one choice."""

    job: ChoiceJob
    arrive: float
    log_context: LogContext = NO_REQUEST  # of the last attempt
    follows: bool = False  # admitted together with another choice of the same response
    suspect: SuspectRequest | None = None
    tokens: list[int] = field(default_factory=list)  # of the answer so far
    num_output_steps: int = 0  # that brought them: fewer where drafts were right
    attempts: list[AttemptState] = field(default_factory=list)
    moves: list[MoveStage] = field(default_factory=list)
    admit: float | None = None  # tokenised, its path chosen, and let through
    path_kind: PathKind | None = None  # that it was admitted on
    expected: PathEstimate | None = None  # of the path that it was admitted on
    first_token: float | None = None
    finish: float | None = None
    finish_reason: FinishReason | None = None
    decisions_s: list[float] = field(default_factory=list)  # how long each choice of workers took
    prefill_failures: int = 0  # how often the decode worker was told to compute the prompt after all
    num_preemptions: int = 0
    scoring: "RequestState | None" = None  # of the prompt, where that was scored for this choice
    num_reasoning_tokens: int = 0  # of the answer's
    num_unparsed: int = 0  # what looks like calls, and could not be read as such
    num_predicted: int = 0  # output tokens that the client's prediction has, where it has sent one
    num_mispredicted: int = 0  # tokens of the prediction that the answer lacks

    # --- what happens to it ---

    def admitted(self, path: Path, at: float) -> None:
        """Note the path that admission has let it through on."""
        self.path_kind, self.expected, self.admit = path.kind, path.estimate, at

    def add_tokens(self, event: TokenEvent, at: float) -> None:
        """Add an event's tokens; the last event has the finish reason."""
        self.tokens.extend(token.token_id for token in event.tokens)
        self.num_output_steps += bool(event.tokens)
        if event.finish_reason is not None:
            self.finish, self.finish_reason = at, event.finish_reason

    def stop(self, num_tokens: int, at: float) -> None:
        """End the answer with its first `num_tokens` tokens, whatever the workers have sent beyond a stop string."""
        del self.tokens[num_tokens:]
        self.finish, self.finish_reason = at, "stop"

    def on_event(self, attempt: AttemptContext, event: AttemptEvent) -> None:
        """Stamp the event, and keep the workers' numbers that come with it."""
        path, num_prompt_tokens = attempt.path, self.request.num_prompt_tokens
        if isinstance(event, AttemptStarted):
            self._begin_attempt(event.at, path)
        last = self.attempts[-1]
        match event:
            case PrefillDone():
                last.prompt_done = event.at
                last.keep_prefill(event.reply, num_prompt_tokens)
            case PrefillTakenOver():
                self.prefill_failures += 1
            case FirstToken() if self.first_token is None:
                self.first_token = event.at
            case PrefixCached():
                last.num_cached_tokens = min(event.num_tokens, num_prompt_tokens)
            case DecodeStarted():
                last.decoding = event.at
            case DecodeDone():
                reply = event.reply
                self.num_preemptions += reply.num_preemptions
                last.transfer_s = reply.transfer_s if event.has_transfer else None
                last.decode_queue_s = reply.queue_s
                last.num_skipped_tokens = reply.num_cached_tokens if event.has_transfer else 0
                if last.prefill_s is None:  # the prompt was computed there
                    last.keep_cached(reply, num_prompt_tokens)
            case ScoreDone():
                last.keep_prefill(event.reply, num_prompt_tokens)
                self.first_token = event.at
            case AttemptEnded():
                last.end, last.error = event.at, None if event.error is None else type(event.error).__name__
                if event.move is not None:
                    ends = path.decode.peer.worker_id, event.move.target.peer.worker_id
                    self.moves.append(MoveStage(event.at, *ends, event.move.reason))

    def _begin_attempt(self, now: float, path: Path) -> None:
        self.attempts.append(AttemptState(now, path))
        prefill, decode = path.worker_ids
        self.log_context = msgspec.structs.replace(
            self.log_context, attempt=len(self.attempts), prefill_worker=prefill, decode_worker=decode
        )

    # --- views ---

    @property
    def request(self) -> GenerateRequest:
        """The template of its attempts' requests."""
        return self.job.request

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens)

    @property
    def last(self) -> AttemptState | None:
        """The last attempt; a resumed sequence shows that one's durations."""
        return self.attempts[-1] if self.attempts else None

    @property
    def path(self) -> Path | None:
        """The path of the last attempt."""
        return self.attempts[-1].path if self.attempts else None

    @property
    def all_attempts(self) -> list[AttemptState]:
        """Its attempts, behind those at scoring its prompt."""
        return self.attempts if self.scoring is None else [*self.scoring.attempts, *self.attempts]

    @property
    def cached(self) -> AttemptState | None:
        """The attempt that found the prompt's cached tokens: scoring's, since later ones find what that computed."""
        return self.last if self.scoring is None else self.scoring.last or self.last

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache."""
        return 0 if self.cached is None else self.cached.num_cached_tokens

    @property
    def num_tier_tokens(self) -> int:
        """Cached prompt tokens whose KV came from a KV tier."""
        return 0 if self.cached is None else self.cached.num_tier_tokens

    @property
    def prefill_queue_s(self) -> float | None:
        """Time that the last attempt waited for prefill."""
        return None if self.last is None else self.last.prefill_queue_s

    @property
    def prefill_s(self) -> float | None:
        """Time that the last attempt's prompt was computed."""
        return None if self.last is None else self.last.prefill_s

    @property
    def transfer_s(self) -> float | None:
        """Time until the last attempt's KV had come from another worker."""
        return None if self.last is None else self.last.transfer_s

    @property
    def decode_queue_s(self) -> float | None:
        """Time that the last attempt waited for its first decode step."""
        return None if self.last is None else self.last.decode_queue_s

    def workers(self) -> Iterator[tuple[str, str]]:
        """Yield the ids of each attempt's prefill and decode worker; empty for one that was not there."""
        yield from (attempt.path.worker_ids for attempt in self.all_attempts)

    @property
    def tier_read_s(self) -> float | None:
        """The predicted read from KV tiers on the path that it was admitted on; None where nothing was to be read."""
        return (self.expected.tier_read_s or None) if self.expected is not None else None

    @property
    def predicted(self) -> tuple[PathEstimate, float] | None:
        """The prediction at its admission, and its time to first token since; None where they don't compare."""
        if self.expected is None or self.admit is None or self.first_token is None or len(self.attempts) > 1:
            return None
        return self.expected, self.first_token - self.admit

    @property
    def resumes(self) -> int:
        """Attempts after the first that follow a failed one."""
        return max(0, len(self.attempts) - 1 - len(self.moves))

    @property
    def admit_s(self) -> float | None:
        """Time from arrival to admission: parsing, tokenising, choosing the path."""
        return None if self.admit is None else self.admit - self.arrive

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrive

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the last token."""
        return None if self.finish is None else self.finish - self.arrive

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the last."""
        return None if self.finish is None or self.first_token is None else self.finish - self.first_token

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.decode_s is None or self.num_output_tokens < 2:
            return None
        return self.decode_s / (self.num_output_tokens - 1)
