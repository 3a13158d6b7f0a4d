"""The requests as clients send them, with a bound on every field that is known, and the fields that are refused.

The models check shapes and ranges; what depends on the model (context, vocabulary) is checked in
`router/openai/jobs.py`. Fields that no model has stay in `model_extra`, for `UnknownFields` in
`router/openai/parsing.py`. Every list is fail_fast: an error object per wrong item would cost seconds.
"""

from collections.abc import Mapping, Sequence
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


def valid(text: str) -> str:
    """Text that can be UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode: it has a lone surrogate") from None
    return text


Text = Annotated[str, AfterValidator(valid)]
ShortText = Annotated[str, Field(max_length=512), AfterValidator(valid)]
_Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]  # by itself; an empty one is none
Nothing = Annotated[list[Any], Field(max_length=0)]  # what OpenAI's clients send where there is none
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), AfterValidator(valid)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


# What is checked elsewhere, for the OpenAPI document.
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


WITHOUT_EFFECT = frozenset(
    # What OpenAI's own clients send for OpenAI's own books, or to get the same answer sooner.
    ("user", "store", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "prediction")
)
"""Accepted whatever they say, even where the router is strict."""

_NO_TOOLS = "this server does not call tools"
_NO_GRAMMAR = "this server can't hold an answer to a schema or a grammar"
_NO_SOUND = "this server reads and writes text alone"
_NO_BEAMS = "this server samples, and does not search with beams"
_FIXED_TEMPLATE = "a chat is rendered by the model's own template, and answered"

LACKING: Mapping[str, tuple[str, Sequence[Any]]] = {
    "suffix": ("this server does not fill in the middle", ("",)),
    "tools": (_NO_TOOLS, ([],)),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),  # without tools they are one
    "functions": (_NO_TOOLS, ([],)),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "web_search_options": (_NO_TOOLS, ()),
    "guided_json": (_NO_GRAMMAR, ()),
    "guided_regex": (_NO_GRAMMAR, ()),
    "guided_choice": (_NO_GRAMMAR, ()),
    "guided_grammar": (_NO_GRAMMAR, ()),
    "structured_outputs": (_NO_GRAMMAR, ({},)),
    "json_schema": (_NO_GRAMMAR, ()),
    "regex": (_NO_GRAMMAR, ()),
    "ebnf": (_NO_GRAMMAR, ()),
    "grammar": (_NO_GRAMMAR, ("",)),
    "modalities": (_NO_SOUND, ([], ["text"])),
    "audio": (_NO_SOUND, ()),
    "reasoning_effort": ("the model does not reason apart from its answer", ("none",)),
    "verbosity": ("the model is not trained for it", ()),
    "use_beam_search": (_NO_BEAMS, (False,)),
    "logits_processors": ("this server runs no code of its clients", ([],)),
    "logit_processors": ("this server runs no code of its clients", ([],)),
    "bad_words": ("use logit_bias for single tokens", ([],)),
    "allowed_token_ids": ("use logit_bias", ()),
    "prompt_logprobs": ("prompt tokens have no log-probabilities here", ()),
    "prompt_embeds": ("a prompt is text or token ids", ()),
    "truncate_prompt_tokens": ("prompts are taken whole", ()),
    "skip_special_tokens": ("special tokens have no text in answers; return_token_ids shows them", (True,)),
    "include_stop_str_in_output": ("an answer ends before its stop string", (False,)),
    "chat_template": (_FIXED_TEMPLATE, ()),
    "documents": (_FIXED_TEMPLATE, ([],)),
    "add_generation_prompt": (_FIXED_TEMPLATE, (True,)),
    "continue_final_message": (_FIXED_TEMPLATE, (False,)),
    "cache_salt": ("prefix caches are kept apart by API key", ("",)),
}
"""Fields that would change what an answer says, or who may see of it, and that this server can't serve: why, and with
which values beside null they ask for nothing.
"""


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class ModelRequest(_Request):
    """What every request for the model has."""

    model: ShortText | None = None  # None: the only one there is


class StreamOptions(_Request):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, every chunk has the usage so far
    include_obfuscation: bool | None = None  # a newer client's; there is nothing to obfuscate here


class ResponseFormat(_Request):
    """`response_format`: plain text is the only one."""

    type: Literal["text"] = "text"


class GenerationFields(ModelRequest):
    """What completions and chat have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
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
    service_tier: ShortText | None = None  # an SLO class, or one of OpenAI's tiers: see `router/slo/classes.py`
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None  # vLLM's: the lower goes first
    return_token_ids: bool | None = None
    return_stages: bool | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_usage_in_every_chunk(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_lacking(cls, fields: Any) -> Any:
        for name, value in fields.items() if isinstance(fields, dict) else ():
            why, harmless = LACKING.get(name, ("", (value,)))
            if value is not None and value not in harmless:
                raise FieldError(name, f"is not supported: {why}")
        return fields

    @model_validator(mode="after")
    def _agree(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is allowed only with stream: true")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", "must equal n: choices are not ranked here")
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    # Checked by `prompts_of`, whose messages say which of many prompts is wrong.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> "CompletionRequest":
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

    @model_validator(mode="after")
    def _possible(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise FieldError("max_tokens", "differs from max_completion_tokens: give one of them")
        return self


class TokenizeRequest(ModelRequest):
    """POST /tokenize: a text, or a chat."""

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


class DetokenizeRequest(ModelRequest):
    """POST /detokenize."""

    tokens: Annotated[Any, WithJsonSchema(_TOKEN_IDS)]  # checked by `token_ids_of`
