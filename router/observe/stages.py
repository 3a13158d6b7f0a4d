"""Stamps of a sequence on its way: for metrics, for `usage`, for traces, and to find where time went.

The stages, in their order: `arrive, admit, prefill_queue, prefill, transfer, decode_queue, decode, finish`. Moments are
the router's clock, durations are the workers' own; all in seconds. KV is sent while it is computed, so `transfer`
begins with the attempt and includes what it waited for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import msgspec

from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.requests import NO_REQUEST, DecodeReply, FinishReason, LogContext, PrefillReply
from twostroke.router.attempt_events import (
    AttemptContext,
    AttemptEnded,
    AttemptEvent,
    AttemptStarted,
    DecodeDone,
    DecodeStarted,
    FirstToken,
    MoveReason,
    PrefillDone,
    PrefillTakenOver,
    PrefixCached,
    ScoreDone,
)
from twostroke.router.fleet import Path, PathEstimate, PathKind


@dataclass(slots=True, kw_only=True)
class WorkerTimings:
    """The workers' own timings of an attempt; None: has not happened, or not yet."""

    num_cached_tokens: int = 0  # prompt tokens found in a prefix cache
    num_tier_tokens: int = 0  # of these, whose KV came from a KV tier
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    chunk_ends_s: tuple[float, ...] = ()  # within it
    transfer_s: float | None = None
    decode_queue_s: float | None = None


_TIMINGS = fields(WorkerTimings)


@dataclass(slots=True)
class AttemptStages(WorkerTimings):
    """One attempt that is over: its time, its workers, and their timings."""

    begin: float
    end: float
    prefill: str  # worker id; empty where the decode worker was to compute the prompt
    decode: str  # worker id; empty where a prefill worker only read the prompt
    error: str | None  # the kind of failure that ended it; never an error's own words, which may quote a request


class MoveStage(NamedTuple):
    """A move of the stream, from one worker to another."""

    at: float
    source: str
    target: str
    reason: MoveReason


@dataclass(slots=True)
class SequenceStages(WorkerTimings):
    """The stamps of one sequence. A resumed sequence keeps the durations of its last attempt."""

    arrive: float
    first_token: float | None = None
    finish: float | None = None
    admit: float | None = None  # tokenised, its path chosen, and let through
    path_kind: PathKind | None = None  # that it was admitted on
    expected: PathEstimate | None = None  # of the path that it was admitted on
    follows: bool = False  # admitted together with another choice of the same response
    decisions_s: list[float] = field(default_factory=list)  # how long each choice of workers took
    attempts: int = 0
    path: Path | None = None  # of the last attempt, as the three moments below
    begun: float | None = None
    prompt_done: float | None = None  # the prefill worker has replied
    decoding: float | None = None  # the decode worker has drawn a token of its own
    num_skipped_tokens: int = 0  # prompt tokens whose KV the decode worker had, and the transfer left out
    tries: list[AttemptStages] = field(default_factory=list)  # those that are over
    moves: list[MoveStage] = field(default_factory=list)
    prefill_failures: int = 0  # how often the decode worker was told to compute the prompt after all
    num_output_tokens: int = 0
    num_output_steps: int = 0  # that brought them: fewer where drafts were right
    num_reasoning_tokens: int = 0  # of these
    num_unparsed: int = 0  # what looks like calls, and could not be read as such
    num_preemptions: int = 0
    num_predicted: int = 0  # output tokens that the client's prediction has, where it has sent one
    num_mispredicted: int = 0  # tokens of the prediction that the answer lacks
    finish_reason: FinishReason | None = None
    log_context: LogContext = NO_REQUEST  # of the last attempt

    def on_event(self, attempt: AttemptContext, event: AttemptEvent) -> None:
        """Stamp the event, and keep the workers' numbers that come with it."""
        path, num_prompt_tokens = attempt.path, attempt.request.num_prompt_tokens
        match event:
            case AttemptStarted():
                self.begin_attempt(event.at, path)
            case PrefillDone():
                self.prompt_done = event.at
                self.chunk_ends_s = event.reply.chunk_ends_s
                self._keep_prefill(event.reply, num_prompt_tokens)
            case PrefillTakenOver():
                self.prefill_failures += 1
            case FirstToken() if self.first_token is None:
                self.first_token = event.at
            case PrefixCached():
                self.num_cached_tokens = min(event.num_tokens, num_prompt_tokens)
            case DecodeStarted():
                self.decoding = event.at
            case DecodeDone():
                reply = event.reply
                self.num_preemptions += reply.num_preemptions
                self.transfer_s = reply.transfer_s if event.has_transfer else None
                self.decode_queue_s = reply.queue_s
                self.num_skipped_tokens = reply.num_cached_tokens if event.has_transfer else 0
                if self.prefill_s is None:  # the prompt was computed there
                    self._keep_cached(reply, num_prompt_tokens)
            case ScoreDone():
                self._keep_prefill(event.reply, num_prompt_tokens)
                self.first_token = self.finish = event.at
            case AttemptEnded():
                assert self.begun is not None
                self.end_attempt(self.begun, event.at, path, event.error)
                if event.move is not None:
                    ends = path.decode.peer.worker_id, event.move.target.peer.worker_id
                    self.moves.append(MoveStage(event.at, *ends, event.move.reason))

    def _keep_prefill(self, reply: PrefillReply, num_prompt_tokens: int) -> None:
        self.prefill_queue_s, self.prefill_s = reply.queue_s, reply.prefill_s
        self._keep_cached(reply, num_prompt_tokens)

    def _keep_cached(self, reply: PrefillReply | DecodeReply, num_prompt_tokens: int) -> None:
        self.num_cached_tokens = min(reply.num_cached_tokens, num_prompt_tokens)
        self.num_tier_tokens = min(reply.tier_tokens, self.num_cached_tokens)

    def begin_attempt(self, now: float, path: Path) -> None:
        """Count an attempt, and forget the workers' numbers of the one before."""
        self.attempts += 1
        self.path, self.begun = path, now
        prefill, decode = path.worker_ids
        self.log_context = msgspec.structs.replace(
            self.log_context, attempt=self.attempts, prefill_worker=prefill, decode_worker=decode
        )
        self.prompt_done = self.decoding = None
        self.num_skipped_tokens = 0
        for one in _TIMINGS:
            setattr(self, one.name, one.default)

    def end_attempt(self, begin: float, end: float, path: Path, error: TwostrokeError | None) -> None:
        """Keep what is known of the attempt that was from `begin` to `end`, and failed with `error` if there is one."""
        prefill, decode = path.worker_ids
        self.tries.append(
            AttemptStages(
                begin=begin,
                end=end,
                prefill=prefill,
                decode=decode,
                error=None if error is None else type(error).__name__,
                **{one.name: getattr(self, one.name) for one in _TIMINGS},
            )
        )

    def workers(self) -> Iterator[tuple[str, str]]:
        """Yield the ids of each attempt's prefill and decode worker; empty for one that was not there."""
        yield from ((tried.prefill, tried.decode) for tried in self.tries)
        yield self.log_context.prefill_worker, self.log_context.decode_worker

    @property
    def tier_read_s(self) -> float | None:
        """The predicted read from KV tiers on the path that it was admitted on; None where nothing was to be read."""
        return (self.expected.tier_read_s or None) if self.expected is not None else None

    @property
    def predicted(self) -> tuple[PathEstimate, float] | None:
        """The prediction at its admission, and its time to first token since; None where they don't compare."""
        if self.expected is None or self.admit is None or self.first_token is None or self.attempts > 1:
            return None
        return self.expected, self.first_token - self.admit

    @property
    def resumes(self) -> int:
        """Attempts after the first that follow a failed one."""
        return max(0, self.attempts - 1 - len(self.moves))

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
