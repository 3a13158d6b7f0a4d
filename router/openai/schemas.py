"""The requests as clients send them: every field with its bound, the fields that are refused, and their errors.

The models check shapes and ranges; what depends on the model (context, vocabulary) is checked in
`router/openai/jobs.py`. Fields that no model has stay in `model_extra`, for `UnknownFields`. Every list is fail_fast:
an error object per wrong item would cost seconds.
"""

import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from twostroke.protocol.errors import RequestError
from twostroke.router.openai.fields import (
    CalledBefore,
    Calls,
    FieldError,
    PromptCacheFields,
    ShortText,
    StrictModel,
    StructuredFields,
    Text,
    ToolFields,
    explain,
    old_call_id,
    only,
    refusal,
    shown,
    type_tag,
)
from twostroke.router.text.generation_config import MinP, RepetitionPenalty, Temperature, TopK, TopP

_log = logging.getLogger(__name__)

MAX_NAMED = 256
"""Unknown fields that are named in the log, each once: clients could think of any number."""

MAX_CHOICES = 64
"""Most choices of one request: prompts times n."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_ALLOWED = 1024
MAX_BAD_WORDS = 64
MAX_MESSAGES = 2048
MAX_TOKEN_IDS = 2**20
"""Most token ids of one prompt: more than any model's context."""

_INT64 = 2**63


_Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]  # by itself; an empty one is none
_BadWord = Annotated[str, Field(min_length=1, max_length=64)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopList = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKEN_IDS)]
PromptText = Annotated[str, Field(min_length=1)]
_PromptTexts = Annotated[list[PromptText], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
_PromptIds = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
Prompt = str | list[int]


def _as_list(value: Any) -> Any:
    """An empty string is no stop string, as in OpenAI's API."""
    if isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list | None):
        raise ValueError("must be a string or a list")
    return value


Stop = Annotated[StopList, BeforeValidator(_as_list, json_schema_input_type=_Stop | StopList)]

WITHOUT_EFFECT = frozenset(
    # What OpenAI's own clients send for OpenAI's own books, or to get the same answer sooner.
    ("user", "store", "metadata", "safety_identifier", "parallel_tool_calls")
)
"""Accepted whatever they say, even where the router is strict."""

_OF_CHATS = "only chats have it: use /v1/chat/completions"
_NO_SEARCH = "this server looks nothing up"
_NO_SOUND = "this server reads and writes text alone"
_NO_BEAMS = "this server samples, and does not search with beams"

LACKING: Mapping[str, tuple[str, Sequence[Any]]] = {
    "suffix": ("filling in the middle needs a model with tokens for it; write them into the prompt", ("",)),
    "tools": (_OF_CHATS, ([],)),
    "tool_choice": (_OF_CHATS, ("none", "auto")),  # without tools they are one
    "functions": (_OF_CHATS, ([],)),
    "function_call": (_OF_CHATS, ("none", "auto")),
    "web_search_options": (_NO_SEARCH, ()),
    "modalities": (_NO_SOUND, ([], ["text"])),
    "audio": (_NO_SOUND, ()),
    "reasoning_effort": (_OF_CHATS, ("none",)),
    "reasoning": (_OF_CHATS, ()),
    "thinking_token_budget": (_OF_CHATS, ()),
    "verbosity": ("the model is not trained for it", ("medium",)),  # OpenAI's default
    "use_beam_search": (_NO_BEAMS, (False,)),
    "length_penalty": (_NO_BEAMS, (1,)),
    "early_stopping": (_NO_BEAMS, (False,)),
    "return_tokens_as_token_ids": ("return_token_ids tells them", (False,)),
    "spaces_between_special_tokens": ("special tokens that are shown stand as they are", (True,)),
    "logits_processors": ("this server runs no code of its clients", ([],)),
    "logit_processors": ("this server runs no code of its clients", ([],)),
    "prompt_embeds": ("a prompt is text or token ids", ()),
    "skip_special_tokens": ("special tokens have no text in answers; return_token_ids shows them", (True,)),
    "chat_template": ("templates are programs: those who run the server choose it by model.chat_template", ()),
    "documents": (_OF_CHATS, ([],)),
    "add_generation_prompt": (_OF_CHATS, (True,)),
    "continue_final_message": (_OF_CHATS, (False,)),
}
"""Fields that would change what an answer says, or who may see of it, and that this server can't serve: why, and with
which values beside null they ask for nothing.
"""


class ModelRequest(StrictModel):
    """Fields of every request for the model."""

    lacking: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = LACKING
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT

    model: ShortText | None = None  # None: the only one there is

    @property
    def left_out_tools(self) -> list[str]:
        """The types of the tools that the model is not told of."""
        return []


class TextFields(BaseModel):
    """Fields that decide how prompts become token ids."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # vLLM's


class StreamOptions(StrictModel):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, every chunk has the usage so far
    include_obfuscation: bool | None = None  # every chunk gets random characters, so that its size tells little


class SamplingFields(ModelRequest):
    """Fields that all requests for text share, of every API."""

    stream: bool | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None
    service_tier: ShortText | None = None  # an SLO class, or one of OpenAI's tiers: see `router/slo/classes.py`
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None  # vLLM's: the lower goes first

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_lacking(cls, fields: Any) -> Any:
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if name in cls.model_fields:
                continue
            why, harmless = cls.lacking.get(name, ("", (value,)))
            if value is not None and value not in harmless:
                raise FieldError(name, f"is not supported: {why}")
        return fields


class PredictionPart(StrictModel):
    """A part of a prediction's content."""

    type: Literal["text"]
    text: Text


class Prediction(StrictModel):
    """OpenAI's `prediction`: text that the answer is expected to have, such as a file that is edited."""

    type: Literal["content"]
    content: Text | Annotated[list[PredictionPart], Field(fail_fast=True, max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationFields(SamplingFields, StructuredFields, PromptCacheFields):
    """Fields that completions and chats share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    prediction: Prediction | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # vLLM's
    include_stop_str_in_output: bool | None = None  # vLLM's, as those down to `cache_salt`
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED)] | None = (
        None
    )
    bad_words: Annotated[list[_BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    return_token_ids: bool | None = None
    return_stages: bool | None = None

    @property
    def num_candidates(self) -> int:
        """Choices that are generated of a prompt."""
        return self.best_of or self.n or 1

    @property
    def num_choices(self) -> int:
        """Choices that are generated for the whole response."""
        return self.num_candidates

    @property
    def shows_logprobs(self) -> bool:
        """Return whether log-probabilities of drawn tokens are in the answer."""
        raise NotImplementedError

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits a choice's tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Return whether the prompt is to be scored."""
        return self.prompt_logprobs is not None

    @property
    def shows_special(self) -> bool:
        """Return whether special tokens have their names in the text."""
        return False

    @property
    def tells_function_call(self) -> bool:
        """Return whether a call is written in the form from before there were tools."""
        return False

    @property
    def includes_usage(self) -> bool:
        """Return whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def is_obfuscated(self) -> bool:
        """Return whether a stream's events are padded to few sizes."""
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

    @property
    def has_usage_in_every_chunk(self) -> bool:
        """Return whether every event of a stream has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _agree(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is allowed only with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "is not allowed with stream: true")
        limited_by, limit = self.token_limit
        if limit == 0 and not self.scores_prompt:
            raise FieldError(limited_by, "0 is allowed only where the prompt is told of: with echo or prompt_logprobs")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise FieldError("best_of", "must not be below n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise FieldError("best_of", "must equal n with stream: true: only whole choices can be ranked")
        return self


class CompletionRequest(GenerationFields, TextFields):
    """POST /v1/completions."""

    lacking: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {
        name: fields for name, fields in LACKING.items() if name != "skip_special_tokens"
    }

    prompt: PromptText | TokenIds | _PromptTexts | _PromptIds
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None

    @property
    def shows_special(self) -> bool:
        return self.skip_special_tokens is False

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The `prompt` field as a list of prompts."""
        prompt: Any = self.prompt
        prompts: Sequence[Prompt] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        return prompts

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_candidates

    @property
    def shows_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def scores_prompt(self) -> bool:
        return super().scores_prompt or bool(self.echo and (self.logprobs is not None or self.max_tokens == 0))

    @model_validator(mode="after")
    def _possible(self) -> "CompletionRequest":
        if self.num_choices > MAX_CHOICES:
            raise FieldError("n", f"at most {MAX_CHOICES} choices, over all prompts")
        return self


TEXT_ALONE = "this server reads and writes text alone: leave the part out, or say in words what it shows"


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class RefusalPart(StrictModel):
    """A part of an assistant's message that refused something."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The words of the refusal."""
        return self.refusal


_Part = Annotated[
    Annotated[TextPart, Tag("type text")] | Annotated[RefusalPart, Tag("type refusal")],
    Discriminator(type_tag),
    BeforeValidator(only(("text", "refusal"), TEXT_ALONE)),
]


class ChatMessage(StrictModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[_Part], Field(fail_fast=True, max_length=256)] | None = None
    name: ShortText | None = None
    tool_call_id: ShortText | None = None
    # What the official client's messages have when they are sent back as history.
    refusal: Text | None = None  # in place of content
    annotations: Any = None
    audio: None = None
    function_call: CalledBefore | None = None  # as it was before there were tools; a `function` answers it
    tool_calls: Calls | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    prefix: bool | None = None  # of the last message: the answer goes on from it (DeepSeek's, Mistral's)

    def as_template_sees(self) -> dict[str, Any]:
        """The message with its text parts joined: templates differ in whether they take parts."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        content = content or self.refusal
        fields = self.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            fields["reasoning_content"] = reasoning
        calls = self.tool_calls or ([self.function_call.as_call()] if self.function_call else [])
        if calls:
            fields["tool_calls"] = [call.as_template_sees() for call in calls]
        if self.role == "function":
            fields |= {"role": "tool", "tool_call_id": old_call_id(self.name or "")}
        return {**fields, "content": content or ""}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(ToolFields, GenerationFields):
    """POST /v1/chat/completions."""

    is_budget_required: ClassVar[bool] = True  # a thinking_token_budget that can't be kept is refused

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def tells_function_call(self) -> bool:
        return bool(self.functions)

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().token_limit
        return "max_completion_tokens", self.max_completion_tokens

    @model_validator(mode="after")
    def _possible(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise FieldError("max_tokens", "differs from max_completion_tokens: give one of them")
        return self


class TokenizeRequest(ToolFields, ModelRequest):
    """POST /tokenize: a text, or a chat."""

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "either prompt or messages must be given")
        return self


class DetokenizeRequest(ModelRequest):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]


class UnknownFields:
    """Names each unknown field once in the log, or, where `strict`, refuses it."""

    def __init__(self, *, strict: bool):
        self._strict = strict
        self._named: set[str] = set()

    def check(self, body: BaseModel) -> None:
        """Raises RequestError where there are any, and none are taken."""
        for path, known in _unknown(body, ()):
            if self._strict:
                near = difflib.get_close_matches(str(path[-1]), known, n=1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise refusal(shown(".".join(map(str, path))), f"is not a known field{hint}")
            # A name that is no word may be part of a prompt by mistake, and is not shown.
            field = ".".join(part for part in path if isinstance(part, str))
            field = field if re.fullmatch(r"[\w.-]{1,128}", field, re.ASCII) else "(not a word)"
            self._name(field, "requests have the field %s, which is not known here: it is ignored")
        for kind in body.left_out_tools if isinstance(body, ModelRequest) else ():
            self._name(kind, "requests have tools of the type %s, which this server can't run: they are left out")

    def _name(self, name: str, message: str) -> None:
        """Log a name once."""
        if name not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(name)
            _log.warning(message, name)


def _unknown(body: BaseModel, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Sequence[str]]]:
    """The paths of unknown fields, each with the names that its object may have."""
    if isinstance(body, StrictModel) and body.takes_any:
        return
    judged = body.lacking.keys() | body.without_effect if isinstance(body, ModelRequest) else frozenset[str]()
    for name in body.model_extra or ():
        if name not in judged:
            yield (*path, name), [*type(body).model_fields]
    for name, value in vars(body).items():
        if isinstance(value, BaseModel):
            yield from _unknown(value, (*path, name))
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if not isinstance(one, BaseModel):  # lists of ids are long
                    break
                yield from _unknown(one, (*path, name, i))


class ChatDraft:
    """A chat in the making, from `body`. `names` has the client's paths of the chat's fields, where they differ."""

    def __init__(self, body: SamplingFields, names: Mapping[str, str], kind: type[ChatRequest] = ChatRequest):
        common = body.model_dump(include={"model", *SamplingFields.model_fields}, exclude_none=True)
        self.messages: list[dict[str, Any]] = []
        self._fields = {**common, "messages": self.messages}
        self._names = dict(names)
        self._kind = kind

    def add(self, message: dict[str, Any], origin: str) -> dict[str, Any]:
        """Append a message, which the client sent at the path `origin`."""
        self.name(f"messages.{len(self.messages)}", origin)
        self.messages.append(message)
        return message

    def name(self, path: str, origin: str) -> None:
        """The chat's field at `path` is what the client sent at `origin`."""
        self._names[path] = origin

    def set(self, **fields: Any) -> None:
        """Set these fields, but for those that are None."""
        self._fields |= {name: value for name, value in fields.items() if value is not None}

    def chat(self) -> ChatRequest:
        """Return the chat. Raises RequestError, which `naming` has to translate."""
        try:
            return self._kind.model_validate(self._fields)
        except ValidationError as error:
            raise explain(error.errors(), self._fields) from None

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A RequestError that is raised within names the client's field."""
        try:
            yield
        except RequestError as error:
            path = error.param or ""
            inside = [one for one in self._names if path == one or path.startswith(f"{one}.")]
            if inside:
                longest = max(inside, key=len)
                error.param = self._names[longest] + path[len(longest) :]
                if str(error).startswith(f"{path}:"):
                    error.args = (error.param + str(error).removeprefix(path),)
            raise
