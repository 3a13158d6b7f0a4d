"""A request as the workers know it: token ids in, token ids out. Text, HTTP and JSON end at the router."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True):
    """How a token is drawn. Bounds are checked by the router; workers rely on them."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # always set: the router draws one where the client gives none
    logprobs: int | None = None  # how many alternatives to report; None: no log-probabilities at all


class Promise(msgspec.Struct, frozen=True):
    """What a request's SLO class promises, in the workers' words. Durations only, since processes share no clock."""

    class_name: str = "standard"
    priority: int = 0  # whoever has a higher one goes first, and gives way last
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
    promise: Promise = Promise()

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
    """What one engine step adds to one request."""

    request_id: str
    index: int  # output index of the first of `tokens`; the prompt's end is 0
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None  # set once, on the last event
    error: str | None = None  # set once, instead of a finish: the worker gave the request up


class PrefillReply(msgspec.Struct, frozen=True):
    """What the prefill worker's call returns, as soon as the first token is drawn."""

    event: TokenEvent
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    queue_s: float
    prefill_s: float


class DecodeReply(msgspec.Struct, frozen=True):
    """What the decode worker's call returns when the request has ended there."""

    num_output_tokens: int
    finish_reason: FinishReason | None  # None: cancelled
    num_cached_tokens: int
    transfer_s: float  # from reservation to verified KV; 0 without a transfer
    queue_s: float  # from then to the first decode step
    num_preemptions: int


def finish_reason(request: GenerateRequest, num_output_tokens: int, last_token: int) -> FinishReason | None:
    """Whether a request ends with `last_token`, its `num_output_tokens`-th output token (from 1).

    Prefill and decode workers both ask this, so they can't disagree.
    """
    if last_token in request.stop_token_ids and num_output_tokens > request.min_tokens:
        return "stop"
    if num_output_tokens >= request.max_tokens:
        return "length"
    return None


def forbidden_tokens(request: GenerateRequest, num_output_tokens: int) -> tuple[int, ...]:
    """Tokens that may not be drawn next, after `num_output_tokens` outputs: stop tokens, until `min_tokens` are out."""
    return request.stop_token_ids if num_output_tokens < request.min_tokens else ()
