"""The requests as clients send them, with a bound on everything. Unknown fields are refused, never ignored.

The models check shapes and ranges; what depends on the model (context, vocabulary) is checked in
`router/openai/jobs.py`. `router/openai/parsing.py` reads bodies into them.
Every list is fail_fast: an error object per wrong item would cost seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

MAX_CHOICES = 64  # prompts times n, of one request
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_MESSAGES = 2048

_INT64 = 2**63


def clean_text(text: str) -> str:
    """Text that can be UTF-8 and has no NUL, which no tokenizer expects and C strings end at."""
    if "\0" in text:
        raise ValueError("must not have NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode: it has a lone surrogate") from None
    return text


Text = Annotated[str, AfterValidator(clean_text)]
ShortText = Annotated[str, Field(max_length=512), AfterValidator(clean_text)]
_Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]  # by itself; an empty one is none
Nothing = Annotated[list[Any], Field(max_length=0)]  # what OpenAI's clients send where there is none
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), AfterValidator(clean_text)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


# What `router/openai/parsing.py` checks by itself, for the OpenAPI document.
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}}
_PROMPT_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {
    "anyOf": [
        _PROMPT_TEXT,
        {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": _PROMPT_TEXT},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": _TOKEN_IDS},
    ]
}


class FieldError(ValueError):
    """A fault that shows only with the whole request in sight."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def _as_list(value: Any) -> Any:
    """An empty string is no stop string, as in OpenAI's API."""
    if isinstance(value, str):
        return [value] if value else []
    return value


def _bounded_mapping(value: Any) -> Any:
    """Before its entries are looked at, so that a huge mapping costs nothing."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries, has {len(value)}")
    return value


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(_Request):
    """`stream_options`."""

    include_usage: bool | None = None
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
    stop: Annotated[StopStrings, BeforeValidator(_as_list, json_schema_input_type=_Stop | StopStrings)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_bounded_mapping),
            Field(json_schema_extra={"maxProperties": MAX_LOGIT_BIAS, "additionalProperties": False}),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    service_tier: ShortText | None = None  # an SLO class, or one of OpenAI's tiers: see `router/slo/promises.py`
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None  # vLLM's: the lower goes first
    return_token_ids: bool | None = None
    return_stages: bool | None = None
    # Accepted, and without effect here: what OpenAI's own clients send for OpenAI's own books.
    user: ShortText | None = None
    store: bool | None = None
    metadata: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None

    @model_validator(mode="after")
    def _agree(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is allowed only with stream: true")
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    # Checked by `prompts_of`, whose messages say which of many prompts is wrong.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: ShortText | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", "must equal n: choices are not ranked here")
        if self.suffix:
            raise FieldError("suffix", "is not supported: this server does not fill in the middle")
        if self.echo and self.logprobs is not None:
            raise FieldError("echo", "can't be combined with logprobs: prompt tokens have no log-probabilities here")
        return self


class TextPart(_Request):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Request):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=256)] | None = None
    name: ShortText | None = None
    tool_call_id: ShortText | None = None
    # What the official client's messages have when they are sent back as history.
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None

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


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # Their defaults are accepted; anything else is said to be impossible.
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=8)] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None  # without tools they are one
    parallel_tool_calls: bool | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    prediction: None = None
    audio: None = None
    web_search_options: None = None
    reasoning_effort: None = None
    verbosity: None = None

    @model_validator(mode="after")
    def _possible(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise FieldError("max_tokens", "differs from max_completion_tokens: give one of them")
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
            raise FieldError("prompt", "either prompt or messages must be given")
        return self


class DetokenizeRequest(_Request):
    """POST /detokenize."""

    model: ShortText | None = None
    tokens: Annotated[Any, WithJsonSchema(_TOKEN_IDS)]  # checked by `token_ids_of`
