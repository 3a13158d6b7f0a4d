"""The responses of OpenAI's generation endpoints: errors, usage, completions and chats, whole or as server-sent events.

Answers are TypedDicts: FastAPI documents them, msgspec writes them. `ChoicesWriter` builds the answers of both
endpoints, which say themselves how a choice has its text, and how its log-probabilities.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired, cast

import msgspec
from typing_extensions import TypedDict

from twostroke.protocol.errors import RequestError, TwostrokeError, public_error
from twostroke.protocol.requests import FinishReason
from twostroke.router.openai.schemas import GenerationFields
from twostroke.router.openai.scoring import PromptLogprobs, ShownToken
from twostroke.router.request_state import ChoiceJob, PathKind, RequestState
from twostroke.router.text.tokenizer import TextTokenizer, TokenPiece

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
OBFUSCATED_BYTES = 256
"""An obfuscated stream's chunks are padded to multiples of this: the text of a step's tokens mostly fits one."""


class ErrorBody(TypedDict):
    """An error, for people and for programs."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorObject(TypedDict):
    """OpenAI's error object."""

    error: ErrorBody


def internal_error() -> RequestError:
    """Return the error that hides a bug from the client."""
    return RequestError("an internal error", code="internal_error", status=500)


def error_object(error: TwostrokeError) -> ErrorObject:
    """Return the error object that shows `error` to the client."""
    shown = public_error(error)
    kind: Literal["invalid_request_error", "rate_limit_error", "server_error"] = "invalid_request_error"
    if shown.status == 429:
        kind = "rate_limit_error"
    elif shown.status >= 500:
        kind = "server_error"
    return {"error": {"message": str(shown), "type": kind, "param": shown.param, "code": shown.code}}


class CachedTokensDetails(TypedDict):
    """Cached tokens by the place of their KV, our extension."""

    memory: int  # a worker's KV cache
    tiers: int


class PromptTokensDetails(TypedDict):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int
    cached_tokens_details: NotRequired[CachedTokensDetails]  # where KV came from a KV tier


class CompletionTokensDetails(TypedDict):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: NotRequired[int]  # of models that may think
    accepted_prediction_tokens: NotRequired[int]  # of requests with a prediction, as the next
    rejected_prediction_tokens: NotRequired[int]


class StageTimes(TypedDict, total=False):
    """`usage.stages`, our extension: a choice's time in seconds; stages that did not happen are left out."""

    admit_s: float
    ttft_s: float
    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float
    decode_s: float
    e2e_s: float
    resumes: int
    preemptions: int
    moves: int
    path: PathKind


class Usage(TypedDict):
    """`usage`, over all choices of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    stages: NotRequired[list[StageTimes]]


def stage_times(state: RequestState) -> StageTimes:
    """A choice's stages as the response shows them."""
    times = {name: getattr(state, name) for name in StageTimes.__annotations__ if name.endswith("_s")}
    counts = {"resumes": state.resumes, "preemptions": state.num_preemptions, "moves": len(state.moves)}
    path = {} if state.path_kind is None else {"path": state.path_kind}
    written = {name: seconds for name, seconds in times.items() if seconds is not None}
    return cast(StageTimes, written | {name: count for name, count in counts.items() if count} | path)


class _ChoiceHead(TypedDict):
    """The fields of all choices and of chunks."""

    index: int
    finish_reason: FinishReason | Literal["tool_calls", "function_call"] | None
    token_ids: NotRequired[list[int]]


class _ResponseHead(TypedDict):
    """The fields of all responses and of the events of a stream."""

    id: str
    created: int
    model: str
    service_tier: NotRequired[str]


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_ChoiceHead):
    """A choice of a completion, or what a chunk adds to it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class Completion(_ResponseHead):
    """The answer of /v1/completions, and each event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TopLogprob(TypedDict):
    """A likely token in a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that was drawn in a position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict, total=False):
    """The function that a tool call names, and its arguments as JSON text; in a chunk, the added part."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call of an answer that is not streamed."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallChunk(TypedDict):
    """The part of a tool call in a chunk; the first of a call has its id and its name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class Reasoning(TypedDict, total=False):
    """The reasoning of the model, if any, under both names that clients know."""

    reasoning_content: str
    reasoning: str


class AnswerMessage(Reasoning):
    """The answer of a chat that is not streamed."""

    role: Literal["assistant"]
    content: str | None  # None: tool calls alone, or a part of one
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[CalledFunction]  # instead, of a request with `functions`


class DeltaMessage(Reasoning, total=False):
    """The part of an answer in a chunk; the first has the role."""

    role: Literal["assistant"]
    content: str | None  # None: it may be that there is none
    tool_calls: list[ToolCallChunk]
    function_call: CalledFunction


class ChatChoice(_ChoiceHead):
    """A choice of a chat that is not streamed."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChunkChoice(_ChoiceHead):
    """The part of a choice of a chat in a chunk."""

    delta: DeltaMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_ResponseHead):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class ChatChunk(_ResponseHead):
    """One event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The part of a tool call that one event adds."""

    index: int  # of the call in its choice
    call_id: str = ""  # with the name, in the first delta of a call
    name: str = ""
    arguments: str = ""  # JSON text; the deltas of a call put together are its arguments


class ChoiceDelta(msgspec.Struct, frozen=True):
    """The part of a choice that one event adds."""

    index: int  # of the choice
    text: str
    token_ids: tuple[int, ...]
    shown: tuple[ShownToken, ...]  # empty unless log-probabilities are wanted
    finish_reason: FinishReason | Literal["tool_calls"] | None
    reasoning: str = ""  # what the model thinks before it answers
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes = b""  # as in PrefillReply
    stop_string: str = ""  # that ended the choice


class ResponseWriter(ABC):
    """Writes choices in the format of one endpoint. One object per response, which draws the response's id."""

    @abstractmethod
    def whole(self, choices: Sequence[Sequence[ChoiceDelta]], usage: Usage) -> bytes:
        """The body of a response that is not streamed; `choices` are the deltas of each choice."""


class StreamWriter(ResponseWriter):
    """The writer of an endpoint that can stream, too."""

    @abstractmethod
    def events(self, delta: ChoiceDelta, usage: Usage | None = None) -> bytes:
        """The server-sent events of one delta, with `usage` so far where it is given; empty where it tells nothing yet.

        Half a character, or what may begin a stop string, is no news.
        """

    @abstractmethod
    def ending(self, usage: Usage) -> bytes:
        """The events that end a stream which has brought all choices."""

    @abstractmethod
    def failure(self, error: TwostrokeError) -> bytes:
        """The events that end a stream which has begun, and then failed."""


class ChoicesWriter(StreamWriter):
    """Writes choices side by side, and a stream as chunks of them: what completions and chats have in common."""

    id_prefix: ClassVar[str]
    name: ClassVar[str]  # of the answer's kind of object
    chunk_name: ClassVar[str]  # of a stream's events

    def __init__(
        self,
        body: GenerationFields,
        jobs: Sequence[ChoiceJob],
        tokenizer: TextTokenizer,
        *,
        model: str,
        created: int,
        service_tier: str | None,
    ):
        """`created`: seconds since 1970. `service_tier`: the request's SLO class, where there is something to tell."""
        self._jobs = jobs
        self._piece = tokenizer.piece
        self._return_token_ids = bool(body.return_token_ids)
        self._shows_logprobs = body.shows_logprobs
        self._tells_function_call = body.tells_function_call
        self._num_told = body.n or 1  # of the choices of each prompt
        self._includes_usage = body.includes_usage  # in chunks null but for the last one, as in OpenAI's
        self._is_obfuscated = body.is_obfuscated
        self._head = {"id": f"{self.id_prefix}-{secrets.token_hex(12)}", "created": created, "model": model}
        if service_tier is not None:
            self._head["service_tier"] = service_tier
        self._opened: set[int] = set()  # the choices that have had an event

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]], usage: Usage) -> bytes:
        written = [self._choice(delta, is_chunk=False) for delta in self._best([_joined(deltas) for deltas in choices])]
        for index, choice in enumerate(written):
            choice["index"] = index
        return encode_json(self._head | {"object": self.name, "choices": written, "usage": usage})

    def events(self, delta: ChoiceDelta, usage: Usage | None = None) -> bytes:
        is_news = delta.text or delta.reasoning or delta.tool_calls or delta.shown or delta.finish_reason
        if not (is_news or self._return_token_ids):
            return b""
        return self._event([self._choice(delta, is_chunk=True)], usage)

    def ending(self, usage: Usage) -> bytes:
        return (self._event([], usage) if self._includes_usage else b"") + DONE

    def failure(self, error: TwostrokeError) -> bytes:
        return error_event(error)

    @abstractmethod
    def _content(self, delta: ChoiceDelta, *, is_chunk: bool) -> dict[str, Any]:
        """The members of a choice that tell its text."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs | ChatLogprobs:
        """The log-probabilities of these tokens."""

    def _choice(self, delta: ChoiceDelta, *, is_chunk: bool) -> dict[str, Any]:
        """Return the part of a choice in a chunk, or, where `delta` is all of it, the choice."""
        choice = self._content(delta, is_chunk=is_chunk)
        choice |= {"index": delta.index, "logprobs": None, "finish_reason": delta.finish_reason}
        if self._shows_logprobs:
            choice["logprobs"] = self._logprobs(delta.shown)
        if self._return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _best(self, choices: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
        """Return the choices to show: where a prompt has more, those whose tokens are the likeliest in the mean."""
        ranked: dict[int, list[ChoiceDelta]] = {}  # by prompt
        for choice in choices:
            ranked.setdefault(self._jobs[choice.index].group, []).append(choice)
        for of_prompt in ranked.values():
            if len(of_prompt) > self._num_told:
                of_prompt.sort(key=self._mean_logprob, reverse=True)
        return [choice for of_prompt in ranked.values() for choice in of_prompt[: self._num_told]]

    def _mean_logprob(self, choice: ChoiceDelta) -> float:
        job = self._jobs[choice.index]
        drawn = choice.shown[job.request.num_prompt_tokens if job.echoes_logprobs else 0 :]
        return sum(token.sampled.logprob or 0.0 for token in drawn) / max(1, len(drawn))

    def _event(self, choices: Sequence[Mapping[str, Any]], usage: Usage | None, **more: Any) -> bytes:
        chunk = {**self._head, "object": self.chunk_name, "choices": choices, **more}
        if usage is not None or self._includes_usage:
            chunk["usage"] = usage
        return event(obfuscated(chunk) if self._is_obfuscated else chunk)

    def _prompt(self, index: int) -> dict[str, Any]:
        """The prompt of a choice, where the client wants to see tokens."""
        return {"prompt_token_ids": self._jobs[index].request.token_ids} if self._return_token_ids else {}


class CompletionWriter(ChoicesWriter):
    """Writes a completion. The scores of the prompt go before the first tokens of a choice."""

    id_prefix = "cmpl"
    name = chunk_name = "text_completion"

    def _content(self, delta: ChoiceDelta, *, is_chunk: bool) -> dict[str, Any]:
        if delta.index in self._opened:
            return {"text": delta.text}
        self._opened.add(delta.index)
        scores = {} if delta.prompt_logprobs is None else {"prompt_logprobs": delta.prompt_logprobs}
        return {"text": self._jobs[delta.index].echo + delta.text, **scores, **self._prompt(delta.index)}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs:
        logprobs: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text, logprob = self._piece(token.sampled.token_id).text, token.sampled.logprob
            top: dict[str, float] = {}
            for token_id, other in token.sampled.top:
                top.setdefault(self._piece(token_id).text, other)  # two tokens may read alike: the likelier counts
            if logprob is not None:
                top.setdefault(text, logprob)
            logprobs["tokens"].append(text)
            logprobs["token_logprobs"].append(logprob)
            logprobs["top_logprobs"].append(top or None)
            logprobs["text_offset"].append(token.offset)
        return logprobs


class ChatWriter(ChoicesWriter):
    """Writes a chat."""

    id_prefix = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]], usage: Usage) -> bytes:
        self._head |= self._prompt(0)
        if (scores := _joined(choices[0]).prompt_logprobs) is not None:
            self._head["prompt_logprobs"] = scores
        return super().whole(choices, usage)

    def events(self, delta: ChoiceDelta, usage: Usage | None = None) -> bytes:
        """Write events (see `ChoicesWriter.events`); one with the role goes before all others of a choice."""
        written = super().events(delta, usage)
        if delta.index in self._opened:
            return written
        self._opened.add(delta.index)
        opening: ChunkChoice = {
            "index": delta.index,
            "delta": {"role": "assistant", "content": None if self._jobs[delta.index].has_tools else ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event([opening], usage, **self._prompt(delta.index)) + written

    def _choice(self, delta: ChoiceDelta, *, is_chunk: bool) -> dict[str, Any]:
        choice = super()._choice(delta, is_chunk=is_chunk)
        if self._tells_function_call and delta.finish_reason == "tool_calls":
            choice["finish_reason"] = "function_call"
        return choice

    def _content(self, delta: ChoiceDelta, *, is_chunk: bool) -> dict[str, Any]:
        has_tools = self._jobs[delta.index].has_tools
        if is_chunk:
            written: DeltaMessage = {}
            if self._tells_function_call:
                pieces = [_call_chunk(call)["function"] for call in delta.tool_calls if call.index == 0]  # it has one
                if pieces:
                    written["function_call"] = {**pieces[0], "arguments": "".join(one["arguments"] for one in pieces)}
            elif delta.tool_calls:
                written["tool_calls"] = [_call_chunk(call) for call in delta.tool_calls]
            if delta.text or not (delta.reasoning or delta.tool_calls or has_tools or delta.finish_reason):
                written["content"] = delta.text
            return {"delta": {**written, **_reasoning(delta)}}
        is_call = delta.tool_calls or (has_tools and delta.finish_reason == "length")
        content = None if is_call and not delta.text else delta.text
        message: AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
        if delta.tool_calls and self._tells_function_call:
            message["function_call"] = _whole_calls(delta.tool_calls)[0]["function"]
        elif delta.tool_calls:
            message["tool_calls"] = _whole_calls(delta.tool_calls)
        return {"message": {**message, **_reasoning(delta)}}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> ChatLogprobs:
        return {"content": token_logprobs(tokens, self._piece), "refusal": None}


def token_logprobs(tokens: Sequence[ShownToken], piece_of: Callable[[int], TokenPiece]) -> list[TokenLogprob]:
    """The log-probabilities of these tokens, as chats and responses show them."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        piece = piece_of(token_id)
        return {"token": piece.text, "logprob": logprob, "bytes": list(piece.raw)}

    return [
        {
            **top(token.sampled.token_id, token.sampled.logprob or 0.0),
            "top_logprobs": [top(token_id, logprob) for token_id, logprob in token.sampled.top],
        }
        for token in tokens
    ]


def _reasoning(delta: ChoiceDelta) -> Reasoning:
    return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning} if delta.reasoning else {}


def _call_chunk(call: ToolCallDelta) -> ToolCallChunk:
    if not call.call_id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function: CalledFunction = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _whole_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCall]:
    """Return the calls of a choice, joined from all deltas."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        if delta.call_id:
            function: CalledFunction = {"name": delta.name, "arguments": ""}
            calls[delta.index] = {"id": delta.call_id, "type": "function", "function": function}
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return [*calls.values()]


def _joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """All that a choice got, as if it had come at once."""
    text = "".join(delta.text for delta in deltas)
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    shown = tuple(token for delta in deltas for token in delta.shown)
    reasoning = "".join(delta.reasoning for delta in deltas)
    tool_calls = tuple(call for delta in deltas for call in delta.tool_calls)
    first = deltas[0]  # has the scores of the prompt
    return ChoiceDelta(
        first.index,
        text,
        token_ids,
        shown,
        deltas[-1].finish_reason,
        reasoning,
        tool_calls,
        first.prompt_logprobs,
        first.embedding,
    )


def obfuscated(chunk: dict[str, Any]) -> dict[str, Any]:
    """Pad a chunk with random characters to a multiple of `OBFUSCATED_BYTES`."""
    missing = -len(encode_json({**chunk, "obfuscation": ""})) % OBFUSCATED_BYTES
    return {**chunk, "obfuscation": secrets.token_hex(missing // 2 + 1)[:missing]}


def event(chunk: Any) -> bytes:
    """A server-sent event around the JSON of `chunk`."""
    return b"data: " + encode_json(chunk) + b"\n\n"


def error_event(error: TwostrokeError) -> bytes:
    """The event that ends a stream of chunks which has begun, and then failed."""
    return event(error_object(error))


def named_event(name: str, written: Any) -> bytes:
    """A server-sent event with a name of its own, around the JSON of `written`."""
    return b"event: " + name.encode() + b"\n" + event(written)
