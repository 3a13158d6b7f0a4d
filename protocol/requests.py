"""A request as the workers know it: token ids in, token ids out. Text, HTTP and JSON end at the router.

A `Ticket` permits one transfer. The router mints it for one request, two workers and their epochs. The worker that
receives KV accepts it only with a ticket that it can verify, that names it, and that it has not seen before.

`BlockedRequests` are those that have taken workers down, of which processes tell each other. Each is known by its
fingerprint, a hash that its router makes, so neither messages nor what a worker remembers for later routers reveal a
prompt.
"""

import hashlib
import hmac
import math
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from itertools import chain
from typing import Annotated, Any, Literal, get_args

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import EpochMismatch, RequestError, TicketRefused
from twostroke.protocol.kv_layout import ONE_RANK, RankCut

FinishReason = Literal["stop", "length"]
Pooling = Literal["last", "mean"]

MAX_TOKEN_ID = 2**32 - 1
"""Token ids beyond the vocabulary have no effect in biases and lists of stop tokens; beyond this they are refused."""


class LogContext(msgspec.Struct, frozen=True, array_like=True):
    """Names of a request, and of its attempt where the line is about one. Empty ones are left out of a line."""

    request_id: str = ""  # the `X-Request-Id` of its answer
    trace_id: str = ""  # of W3C trace context, 32 hexadecimal digits; empty: it has no trace
    choice: int = 0
    attempt: int = 0  # from 1 on; 0: the line is about no attempt
    prefill_worker: str = ""
    decode_worker: str = ""

    def fields(self) -> dict[str, str | int]:
        """Return the fields of a log line."""
        found: dict[str, str | int] = {"request_id": self.request_id, "trace_id": self.trace_id}
        if self.attempt:
            found |= {"choice": self.choice, "attempt": self.attempt}
            found |= {"prefill_worker": self.prefill_worker, "decode_worker": self.decode_worker}
        return {name: value for name, value in found.items() if value != ""}


NO_REQUEST = LogContext()

LOG_CONTEXT: ContextVar[LogContext] = ContextVar("LOG_CONTEXT", default=NO_REQUEST)
"""The HTTP request that a router's task serves, inherited by the tasks that it starts. Workers have none: a step
serves many requests."""

CONTEXT = "log_context"
"""The attribute of a log record with its LogContext; a record without one is about LOG_CONTEXT's request."""
FIELDS = "fields"
"""The attribute of a log record with names and values beside the message."""


def about(context: LogContext, **fields: Any) -> dict[str, Any]:
    """Return the `extra` of a log record about this request."""
    return {CONTEXT: context, FIELDS: fields}


class SamplingParams(msgspec.Struct, frozen=True):
    """Parameters of one draw. Routers check what clients may ask for, and `check_request` what engines can do."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # no others are drawn; empty: all may be
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that the output never has one after the other
    seed: int = 0  # always set: the router draws one where the client gives none
    logprobs: int | None = None  # how many alternatives to report; None: no log-probabilities at all


class ScoringParams(msgspec.Struct, frozen=True):
    """Scores or embeddings to take from a prompt while its KV is computed."""

    logprobs: int | None = None  # of each token but the first, with so many alternatives; None: none
    pooling: Pooling | None = None  # of the hidden states behind the last norm, to an embedding

    @property
    def needs_all(self) -> bool:
        """Return whether every position must be computed despite the prefix cache: scores need more than KV."""
        return self.logprobs is not None or self.pooling == "mean"


class Promise(msgspec.Struct, frozen=True):
    """The promises of a request's SLO class to the workers. Durations only, since processes share no clock."""

    class_name: str = "standard"
    priority: int = 0  # higher ones go first, and give way last
    share: float = 0.0  # of a worker's tokens that the class gets while it waits, whatever the priority of others
    ttft_left_s: float | None = None  # until the first token is due, below 0 where it is late; None: nothing promised
    tpot_s: float | None = None  # mean time between tokens after the first; None: nothing promised


def left_of(promise: Promise, elapsed_s: float) -> Promise:
    """The promise as it stands after so many seconds."""
    if promise.ttft_left_s is None:
        return promise
    return msgspec.structs.replace(promise, ttft_left_s=promise.ttft_left_s - elapsed_s)


class GenerateRequest(msgspec.Struct, frozen=True):
    """One sequence to continue. `n` choices are `n` of these, with different seeds."""

    request_id: str  # minted by the router, unique to one attempt; never the client's
    router_id: str  # whose token channel the answer takes
    token_ids: tuple[int, ...]  # the prompt, then output tokens already sent to the client (a resumed request)
    num_prompt_tokens: int  # how many of `token_ids` are the prompt
    sampling: SamplingParams
    max_tokens: int  # output tokens at most, counted from the prompt's end
    min_tokens: int = 0  # no stop token before this many output tokens
    stop_token_ids: tuple[int, ...] = ()  # the model's EOS unless ignored, and the client's own
    cache_salt: bytes = b""  # keys the prefix cache, so tenants can't time each other's
    grammar: str = ""  # what the output must follow, in llguidance's words; empty: anything
    promise: Promise = Promise()
    # Where something is read off the prompt one worker of either role serves the request alone, without a transfer, and
    # `max_tokens` is 1, or 0: then no token is reported.
    scoring: ScoringParams | None = None
    prediction: tuple[int, ...] = ()  # tokens that the client expects in the answer, from its beginning on
    client: bytes = b""  # who asks: where clients take turns, each has its own, whatever its `cache_salt`
    keep_s: float = 0.0  # seconds for which the client wants the prompt's KV kept; 0: no wish
    log_context: LogContext = NO_REQUEST  # what the workers' log lines about it tell

    @property
    def num_output_tokens_given(self) -> int:
        """Output tokens that an earlier attempt already produced."""
        return len(self.token_ids) - self.num_prompt_tokens


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One drawn token, with its log-probability where the request asks for it."""

    token_id: int
    logprob: float | None = None  # natural logarithm, of the distribution before temperature and penalties
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the likeliest first


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one engine step adds to one request."""

    request_id: str
    index: int  # output index of the first of `tokens`; the prompt's end is 0
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None  # set once, on the last event
    error: str | None = None  # set once, instead of a finish: the worker gave the request up
    num_cached_tokens: int | None = None  # on the first event: prompt tokens found in the worker's prefix cache


class PromptScores(msgspec.Struct, frozen=True):
    """Log-probabilities of a prompt's tokens, from the second on: a row each. Little-endian numbers, row by row."""

    num_alternatives: int
    token_ids: bytes  # int32 [rows, alternatives]: the likeliest first
    logprobs: bytes  # float32 [rows, 1 + alternatives]: the token's own, then theirs
    ranks: bytes  # int32 [rows]: the token's own among all, 1 is the likeliest


class PrefillReply(msgspec.Struct, frozen=True):
    """The result of the prefill worker's call, returned as soon as the first token is drawn.

    A decode worker's, too, where a prompt is read alone.
    """

    event: TokenEvent
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    queue_s: float
    prefill_s: float
    chunk_ends_s: tuple[float, ...] = ()  # since the first step of `prefill_s`, when each but the last has ended
    scores: PromptScores | None = None
    embedding: bytes = b""  # float32 [hidden], little-endian, of length 1; empty where none is asked for
    tier_tokens: int = 0  # of the cached tokens, those whose KV came from a KV tier


class DecodeReply(msgspec.Struct, frozen=True):
    """The result of the decode worker's call, returned when the request has ended there."""

    num_output_tokens: int
    finish_reason: FinishReason | None  # None: cancelled
    num_cached_tokens: int
    transfer_s: float  # from reservation to verified KV; 0 without a transfer
    queue_s: float  # from then to the first decode step
    num_preemptions: int
    tier_tokens: int = 0  # of the cached tokens, those whose KV came from a KV tier


def finish_reason(request: GenerateRequest, num_output_tokens: int, last_token: int) -> FinishReason | None:
    """Return how a request ends with `last_token`, its `num_output_tokens`-th output token (from 1); None: it goes on.

    Prefill and decode workers both ask this, so they can't disagree.
    """
    # Where a grammar allows the end alone, it comes before `min_tokens`.
    if last_token in request.stop_token_ids and (num_output_tokens > request.min_tokens or request.grammar):
        return "stop"
    if num_output_tokens >= request.max_tokens:
        return "length"
    return None


def forbidden_tokens(request: GenerateRequest, num_output_tokens: int) -> tuple[int, ...]:
    """Tokens that may not be drawn next, after `num_output_tokens` outputs: stop tokens, until `min_tokens` are out."""
    return request.stop_token_ids if num_output_tokens < request.min_tokens else ()


def check_request(request: GenerateRequest, vocab_size: int | None) -> None:
    """Raises RequestError for values that an engine step could not compute with; `vocab_size` None: any token will do.

    Routers refuse most of them in clients' words. A worker asks once more, for it must not rely on any router: an error
    within a step ends all of the requests in it.
    """
    for param, is_right in _bounds(request, MAX_TOKEN_ID if vocab_size is None else vocab_size - 1):
        if not is_right:
            raise RequestError(f"{param}: this model can't compute with the value given", param=param)


def _bounds(request: GenerateRequest, last_token: int) -> Iterator[tuple[str, bool]]:
    """Each field, and whether it is within its bounds."""
    drawn = request.sampling
    yield "prompt", _are_tokens(request.token_ids, last_token)
    yield "prompt", 0 <= request.num_prompt_tokens <= len(request.token_ids)
    yield "prediction", _are_tokens(request.prediction, last_token)
    yield "max_tokens", 0 <= request.num_output_tokens_given < max(1, request.max_tokens)
    yield "stop_token_ids", _are_tokens(request.stop_token_ids, MAX_TOKEN_ID)
    yield "allowed_token_ids", _are_tokens(drawn.allowed_token_ids, last_token)
    yield "logit_bias", _are_tokens(tuple(token_id for token_id, _ in drawn.logit_bias), MAX_TOKEN_ID)
    yield "logit_bias", all(_is_number(bias) for _, bias in drawn.logit_bias)
    yield "bad_words", all(drawn.bad_words) and _are_tokens(tuple(chain(*drawn.bad_words)), MAX_TOKEN_ID)
    yield "temperature", _is_number(drawn.temperature, least=0.0)
    yield "top_p", _is_number(drawn.top_p, above=0.0)
    yield "min_p", _is_number(drawn.min_p, least=0.0)
    yield "presence_penalty", _is_number(drawn.presence_penalty)
    yield "frequency_penalty", _is_number(drawn.frequency_penalty)
    yield "repetition_penalty", _is_number(drawn.repetition_penalty, above=0.0)
    yield "top_k", _are_tokens((drawn.top_k,), MAX_TOKEN_ID)
    yield "seed", isinstance(drawn.seed, int)
    yield "logprobs", drawn.logprobs is None or _are_tokens((drawn.logprobs,), MAX_TOKEN_ID)
    if request.scoring is not None:
        asked = request.scoring.logprobs
        yield "prompt_logprobs", asked is None or _are_tokens((asked,), MAX_TOKEN_ID)
        yield "pooling", request.scoring.pooling in (None, *get_args(Pooling))


def _are_tokens(values: tuple[int, ...], last: int) -> bool:
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= last)


_MAX_NUMBER = 3e38
"""Largest number of fp32, which logits are."""


def _is_number(value: float, *, least: float = -math.inf, above: float = -math.inf) -> bool:
    is_real = isinstance(value, int | float)
    return is_real and abs(value) <= _MAX_NUMBER and value >= least and value > above


MAC_BYTES = 16


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The host and port on which a process listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """One incarnation of a worker."""

    worker_id: str
    epoch: int


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A transfer of one request's KV from `source` to `target`."""

    transfer_id: bytes  # 16 random bytes
    request_id: str
    source: Peer
    target: Peer
    target_addresses: tuple[Address, ...]  # the target's transfer control listeners, one for each of its ranks
    source_cut: RankCut = ONE_RANK
    target_cut: RankCut = ONE_RANK  # of as many ranks as there are addresses
    mac: bytes = b""


def mint_ticket(
    secret: bytes,
    request_id: str,
    source: Peer,
    target: Peer,
    target_addresses: tuple[Address, ...],
    *,
    source_cut: RankCut = ONE_RANK,
    target_cut: RankCut = ONE_RANK,
) -> Ticket:
    """A fresh ticket, signed with the cluster's secret."""
    transfer_id = secrets.token_bytes(16)
    unsigned = Ticket(transfer_id, request_id, source, target, target_addresses, source_cut, target_cut)
    return msgspec.structs.replace(unsigned, mac=_mac(secret, unsigned))


def verify_ticket(secret: bytes, ticket: Ticket, *, source: Peer, target: Peer) -> None:
    """Check that `ticket` is genuine and made out to these two incarnations.

    Raises TicketRefused (forged, or other workers) or EpochMismatch (a worker has restarted since).
    """
    unsigned = msgspec.structs.replace(ticket, mac=b"")
    if not hmac.compare_digest(_mac(secret, unsigned), ticket.mac):
        raise TicketRefused("the ticket's signature is wrong")
    for role, named, actual in (("source", ticket.source, source), ("target", ticket.target, target)):
        if named.worker_id != actual.worker_id:
            raise TicketRefused(f"the ticket's {role} is {named.worker_id}, not {actual.worker_id}")
        if named.epoch != actual.epoch:
            raise EpochMismatch(f"the ticket's {role} is {named.worker_id} in its epoch {named.epoch:x}")


def _mac(secret: bytes, unsigned: Ticket) -> bytes:
    return hmac.digest(secret, b"ticket" + msgspec.msgpack.encode(unsigned), hashlib.sha256)[:MAC_BYTES]


FINGERPRINT_BYTES = 16
MAX_IN_MESSAGE = 1024
"""Blocked requests in one message, which is 30 KB then."""
LONGEST_S = 86_400.0
"""Longest time for which a message may block a request: a day."""

_SAME_S = 1.0
"""Smallest extension, in seconds, that counts as news: a repeated message was under way for less."""


class BlockedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to refuse for `left_s` from now on. The rest travels and not the end, since clocks differ."""

    fingerprint: Annotated[bytes, msgspec.Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
    left_s: Annotated[float, msgspec.Meta(gt=0.0, le=LONGEST_S)]


class BlockedRequests:
    """The requests that one process knows to be blocked: at most `most`, each for at most `longest_s`.

    The oldest are dropped first.
    """

    def __init__(self, clock: Clock, *, most: int = MAX_IN_MESSAGE, longest_s: float = LONGEST_S):
        self._clock = clock
        self._most = most
        self._longest_s = longest_s
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def learn(self, requests: Iterable[BlockedRequest]) -> tuple[BlockedRequest, ...]:
        """Add these and return those that are news. Known ones, to the second, are not: no message goes in circles."""
        return tuple(request for request in requests if self._add(request))

    def blocks(self, fingerprint: bytes) -> bool:
        """Return whether the request is to be refused now."""
        until = self._until.get(fingerprint)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._until[fingerprint]
        return False

    def latest(self) -> tuple[BlockedRequest, ...]:
        """Return the latest blocked requests, as many as one message takes, with the time that each has left."""
        now = self._clock()
        latest = list(self._until.items())[-MAX_IN_MESSAGE:]
        return tuple(BlockedRequest(one, min(until - now, LONGEST_S)) for one, until in latest if until > now)

    def _add(self, request: BlockedRequest) -> bool:
        now = self._clock()
        until = now + min(request.left_s, self._longest_s)
        known = self._until.get(request.fingerprint, now)
        if until <= now or (known > now and until < known + _SAME_S):
            return False
        self._until[request.fingerprint] = until
        self._until.move_to_end(request.fingerprint)
        while len(self._until) > self._most:
            self._until.popitem(last=False)
        return True


def fingerprint_of(request: GenerateRequest) -> bytes:
    """Hash what makes a request the same as another: all that workers compute by, but neither seed nor length.

    A prompt that is scored or embedded is another request than the same prompt with an answer.
    """
    same = (
        request.token_ids,
        msgspec.structs.replace(request.sampling, seed=0),
        request.stop_token_ids,
        request.cache_salt,
        request.grammar,
        request.scoring,
    )
    return hashlib.sha256(msgspec.msgpack.encode(same)).digest()[:FINGERPRINT_BYTES]
