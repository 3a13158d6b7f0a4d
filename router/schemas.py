"""The requests as clients send them, with a bound on everything. Unknown fields are refused, never ignored.

The models check shapes and ranges; what depends on the model (context, vocabulary) is checked in `router/jobs.py`.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from protocol.errors import RequestError

MAX_CHOICES = 64  # prompts times n, of one request
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_MESSAGES = 2048
MAX_NESTING = 64

_INT64 = 2**63


def _clean(text: str) -> str:
    """Text that can be UTF-8 and has no NUL, which no tokenizer expects and C strings end at."""
    if "\0" in text:
        raise ValueError("must not have NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode: it has a lone surrogate") from None
    return text


Text = Annotated[str, AfterValidator(_clean)]
ShortText = Annotated[str, Field(max_length=512), AfterValidator(_clean)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), AfterValidator(_clean)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _bounded_mapping(value: Any) -> Any:
    """Before its entries are looked at, so that a huge mapping costs nothing."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries, has {len(value)}")
    return value


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(_Request):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # a newer client's; there is nothing to obfuscate here


class ResponseFormat(_Request):
    """`response_format`: plain text is the only one."""

    type: Literal["text"] = "text"


class GenerationFields(_Request):
    """What completions and chat have in common."""

    model: ShortText
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_bounded_mapping),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_stages: bool | None = None
    # Accepted, and without effect here: what OpenAI's own clients send for OpenAI's own books.
    user: ShortText | None = None
    store: bool | None = None
    metadata: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = None
    service_tier: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None

    @model_validator(mode="after")
    def _agree(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise _field_error("stream_options", "is allowed only with stream: true")
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Any  # checked by `prompts_of`, whose messages say which of many prompts is wrong
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: ShortText | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _field_error("best_of", "must equal n: choices are not ranked here")
        if self.suffix:
            raise _field_error("suffix", "is not supported: this server does not fill in the middle")
        if self.echo and self.logprobs is not None:
            raise _field_error("echo", "can't be combined with logprobs: prompt tokens have no log-probabilities here")
        return self


class TextPart(_Request):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Request):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=256)] | None = None
    name: ShortText | None = None
    refusal: None = None
    tool_call_id: ShortText | None = None

    def as_template_sees(self) -> dict[str, Any]:
        """The message with its text parts joined: templates differ in whether they take parts."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # Their defaults are accepted; anything else is said to be impossible.
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise _field_error("top_logprobs", "needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise _field_error("max_tokens", "differs from max_completion_tokens: give one of them")
        return self


class TokenizeRequest(_Request):
    """POST /tokenize: a text, or a chat."""

    model: ShortText | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise _field_error("prompt", "either prompt or messages must be given")
        return self


class DetokenizeRequest(_Request):
    """POST /detokenize."""

    model: ShortText | None = None
    tokens: Any  # checked by `token_ids_of`


RequestModel = TypeVar("RequestModel", bound=_Request)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object. Raises RequestError.

    NaN and lone surrogates, which are no JSON, pass here where they can: the field that has them is named later.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(body)
        except RecursionError:
            raise RequestError("the JSON is nested too deeply", param="body", code="invalid_json") from None
        except (ValueError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not valid JSON: {error}", param="body", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", param="body", code="invalid_json")
    for name, one in value.items():
        if _deeper_than(one, MAX_NESTING):
            raise RequestError(f"{_shown(name)} is nested too deeply", param=_shown(name))
    return value


def parse(model: type[RequestModel], body: bytes) -> RequestModel:
    """The request in `body`. Raises RequestError naming the first field at fault."""
    try:
        return model.model_validate(parse_json(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        # Of a field that may be of several types, the attempt that got furthest has the message that helps.
        first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=lambda one: len(one["loc"]))
        param, message = _explain(first["type"], first["loc"], first["msg"], first.get("ctx", {}))
        raise RequestError(f"{param}: {message}", param=param) from None


def prompts_of(value: Any) -> list[str] | list[list[int]]:
    """The `prompt` field, always as a list of prompts. Raises RequestError naming `prompt`."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise RequestError("prompt: must be a string, a list of strings, or token ids", param="prompt")
    if not value:
        raise RequestError("prompt: must not be empty", param="prompt")
    if not isinstance(value[0], str | list):
        return [token_ids_of(value, "prompt")]
    if len(value) > MAX_CHOICES:
        raise RequestError(f"prompt: must be at most {MAX_CHOICES} prompts, is {len(value)}", param="prompt")
    if isinstance(value[0], list):
        return [token_ids_of(one, "prompt") for one in value]
    for one in value:
        if not isinstance(one, str):
            raise RequestError("prompt: a list must be all strings or all token ids", param="prompt")
        if not one:
            raise RequestError("prompt: must not be empty", param="prompt")
        try:
            _clean(one)
        except ValueError as error:
            raise RequestError(f"prompt: {error}", param="prompt") from None
    return value


def token_ids_of(value: Any, param: str) -> list[int]:
    """A non-empty list of token ids; whether the vocabulary has them is checked elsewhere."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"{param}: must be a non-empty list of token ids", param=param)
    for one in value:
        if type(one) is not int or not 0 <= one < 2**31:
            raise RequestError(f"{param}: token ids must be non-negative integers", param=param)
    return value


class _FieldError(ValueError):
    """A fault that shows only with the whole request in sight."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def _field_error(param: str, message: str) -> _FieldError:
    return _FieldError(param, message)


def _explain(kind: str, loc: tuple[int | str, ...], message: str, context: dict[str, Any]) -> tuple[str, str]:
    """The field's name as the client wrote it, and what is wrong with it."""
    cause = context.get("error")
    if isinstance(cause, _FieldError):
        return cause.param, str(cause)
    # Unions add the tried type's name to the path: not a part of what the client sent.
    path = [str(part) for part in loc if isinstance(part, int) or part.replace("_", "").isalnum()]
    param = _shown(".".join(path[:4])) or "body"
    if kind == "extra_forbidden":
        return param, "is not a known field"
    if kind == "missing":
        return param, "is required"
    if isinstance(cause, ValueError):
        return param, str(cause)
    return param, message[:1].lower() + message[1:]


def _shown(name: str) -> str:
    """A name from outside, safe to put into an answer and a log."""
    return "".join(char if char.isprintable() else "?" for char in name[:80])


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether containers are nested more than `levels` deep; without recursion."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for one in layer
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return False
    return True
