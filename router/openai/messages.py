"""Anthropic's Messages API, as a translation: a request becomes a chat, and what the chat brings content blocks.

Blocks and events are those of https://docs.anthropic.com/en/api/messages and its page about streaming. Errors have that
API's shape, too.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag
from typing_extensions import TypedDict

from twostroke.protocol.errors import ContextExceeded, TwostrokeError, public_error
from twostroke.router.openai.answers import ChoiceDelta, StreamWriter, Usage, encode_json, named_event
from twostroke.router.openai.fields import (
    CacheMark,
    FunctionName,
    ShortText,
    StrictModel,
    Text,
    longest_ttl,
    only,
    type_tag,
)
from twostroke.router.openai.schemas import (
    MAX_MESSAGES,
    TEXT_ALONE,
    ChatDraft,
    ChatRequest,
    GenerationFields,
    SamplingFields,
    StopList,
)
from twostroke.router.request_state import ChoiceJob
from twostroke.router.text.tokenizer import TextTokenizer

MAX_BLOCKS = 256
"""Most blocks of one message."""
MAX_TOOLS = 128

UNREAD = "unread_arguments"
"""The only member of a call's `input` whose arguments are no JSON object: their text."""

_OWN_TOOLS = "this server runs no tools of its own; give one with input_schema, and run it yourself"


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: Any = None
    cache_control: CacheMark = None


class TextSource(StrictModel):
    """The text of a document."""

    type: Literal["text"]
    media_type: ShortText | None = None
    data: Text


class ContentSource(StrictModel):
    """The blocks of a document."""

    type: Literal["content"]
    content: "Text | TextBlocks"


class DocumentBlock(StrictModel):
    """A document that is text."""

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("type text")] | Annotated[ContentSource, Tag("type content")],
        Discriminator(type_tag),
        BeforeValidator(only(("text", "content"), TEXT_ALONE)),
    ]
    title: Text | None = None
    context: Text | None = None
    citations: Any = None
    cache_control: CacheMark = None

    @property
    def text(self) -> str:
        """The document's title, what is said about it, and its text."""
        content = self.source.data if isinstance(self.source, TextSource) else self.source.content
        said = content if isinstance(content, str) else "\n".join(block.text for block in content)
        return "\n\n".join(part for part in (self.title, self.context, said) if part)


class ThinkingBlock(StrictModel):
    """Reasoning of a model in a request."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(StrictModel):
    """A call of a model's."""

    type: Literal["tool_use"]
    id: ShortText
    name: FunctionName
    input: dict[str, Any]
    caller: Any = None
    cache_control: CacheMark = None


class ToolResultBlock(StrictModel):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: "Text | ResultBlocks | None" = None
    is_error: bool | None = None  # chat templates have no word for it
    cache_control: CacheMark = None


def _side_of(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return "the model's" if role == "assistant" else "the client's"


OnlyText = Annotated[TextBlock, BeforeValidator(only(("text",), TEXT_ALONE))]
TextBlocks = Annotated[list[OnlyText], Field(fail_fast=True, max_length=MAX_BLOCKS)]
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("type text")] | Annotated[DocumentBlock, Tag("type document")],
    Discriminator(type_tag),
    BeforeValidator(only(("text", "document"), TEXT_ALONE)),
]
ResultBlocks = Annotated[list[ResultBlock], Field(fail_fast=True, max_length=MAX_BLOCKS)]
ClientBlock = Annotated[
    Annotated[TextBlock, Tag("type text")]
    | Annotated[DocumentBlock, Tag("type document")]
    | Annotated[ToolResultBlock, Tag("type tool_result")],
    Discriminator(type_tag),
    BeforeValidator(
        only(("text", "document", "tool_result"), f"a user sends text, documents and tool results, and {TEXT_ALONE}")
    ),
]
ModelBlock = Annotated[
    Annotated[TextBlock, Tag("type text")]
    | Annotated[ThinkingBlock, Tag("type thinking")]
    | Annotated[ToolUseBlock, Tag("type tool_use")],
    Discriminator(type_tag),
    BeforeValidator(
        only(("text", "thinking", "tool_use"), f"an assistant sends text, thinking and tool_use, and {TEXT_ALONE}")
    ),
]


class ClientMessage(StrictModel):
    """A message to the model."""

    # The model's are `ModelMessage`; a refusal names all roles.
    role: Annotated[Literal["user", "assistant", "system"], Field(json_schema_extra={"enum": ["user", "system"]})]
    content: Text | Annotated[list[ClientBlock], Field(fail_fast=True, max_length=MAX_BLOCKS)]


class ModelMessage(StrictModel):
    """A message of the model's."""

    role: Literal["assistant"]
    content: Text | Annotated[list[ModelBlock], Field(fail_fast=True, max_length=MAX_BLOCKS)]


Message = Annotated[
    Annotated[ClientMessage, Tag("the client's")] | Annotated[ModelMessage, Tag("the model's")],
    Discriminator(_side_of),
]


class CustomTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheMark = None


Tool = Annotated[CustomTool, BeforeValidator(only(("custom",), _OWN_TOOLS, default="custom"))]


class ToolChoice(StrictModel):
    """`tool_choice`; `name` is that of the tool of type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """`thinking`: whether to think before the answer, where the model's chat template lets one say so."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: ShortText | None = None


class JsonOutputFormat(StrictModel):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """`output_config`."""

    effort: ShortText | None = None
    format: JsonOutputFormat | None = None


_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function": "tool_choice",
}
"""Names of the chat's fields in this API."""

_NOT_CUT = "prompts are taken whole; leave out old messages"
_KEPT_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
_UNCUT: Sequence[Any] = ({}, *({"edits": edits} for edits in (None, [], [_KEPT_THINKING])))
_BILLING = "x-anthropic-billing-header"
"""Beginning of a block of Claude Code's that differs in each request and would end the cached prefix."""


class CountTokensRequest(SamplingFields):
    """POST /v1/messages/count_tokens: what the prompt of a message is made of."""

    lacking: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {
        "container": (_OWN_TOOLS, ()),
        "mcp_servers": (_OWN_TOOLS, ([],)),
        "context_management": (_NOT_CUT, _UNCUT),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "inference_geo", "speed", "user_profile_id", "workspace_id", "diagnostics")
    )

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Text | TextBlocks | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None  # as `output_config.format` was called; that counts
    cache_control: CacheMark = None

    @property
    def keep_s(self) -> float:
        """Seconds for which the client wants the prompt's KV kept: the longest that any part asks for; 0: no wish."""
        return longest_ttl(self._cache_marks())

    def _cache_marks(self) -> Iterator[CacheMark]:
        yield self.cache_control
        yield from (tool.cache_control for tool in self.tools or ())
        for content in (self.system, *(message.content for message in self.messages)):
            for block in content if isinstance(content, list) else ():
                if not isinstance(block, ThinkingBlock):
                    yield block.cache_control
                if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                    yield from (inner.cache_control for inner in block.content)

    @property
    def _kept_system(self) -> str | list[TextBlock] | None:
        """The system prompt without the block that is about the client's bills."""
        if isinstance(self.system, list) and self.system and self.system[0].text.startswith(_BILLING):
            return self.system[1:]
        return self.system

    def draft(self) -> ChatDraft:
        """The chat that this is."""
        draft = ChatDraft(self, _NAMES, MessageChat)
        if system := self._kept_system:
            draft.add({"role": "system", "content": _chat_content(system)}, "system")
        for i, message in enumerate(self.messages):
            if isinstance(message.content, str):
                draft.add({"role": message.role, "content": message.content}, f"messages.{i}")
            elif isinstance(message, ModelMessage):
                _add_turn(draft, message.content, f"messages.{i}")
            else:
                _add_blocks(draft, message.role, message.content, f"messages.{i}")
        for i in range(len(self.tools or ())):
            draft.name(f"tools.{i}.function.parameters", f"tools.{i}.input_schema")
            draft.name(f"tools.{i}.function", f"tools.{i}")
        form = None if self.output_config is None else self.output_config.format
        if form is None and self.output_format is not None:
            form = self.output_format
            draft.name("response_format", "output_format")
            draft.name("response_format.json_schema", "output_format")
        draft.set(
            service_tier="default" if self.service_tier == "standard_only" else None,
            tools=None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
            response_format=form and {"type": form.type, "json_schema": {"schema": form.schema_, "strict": True}},
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
        )
        if self.tool_choice is not None:
            draft.set(
                tool_choice=_chat_tool_choice(self.tool_choice),
                parallel_tool_calls=False if self.tool_choice.disable_parallel_tool_use else None,
            )
        if self.thinking is not None:
            draft.set(
                chat_template_kwargs={"enable_thinking": self.thinking.type != "disabled"},
                thinking_token_budget=self.thinking.budget_tokens,
            )
        if self.messages[-1].role == "assistant":  # the answer's beginning
            draft.set(continue_final_message=True, add_generation_prompt=False)
        return draft


class MessageChat(ChatRequest):
    """The chat of a message. Clients have to give a budget of thinking, whatever the model does."""

    is_budget_required: ClassVar[bool] = False


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: StopList | None = None

    def draft(self) -> ChatDraft:
        draft = super().draft()
        draft.set(max_tokens=self.max_tokens, stop=self.stop_sequences)
        if self.stream:  # the first event has the usage so far
            draft.set(stream_options={"include_usage": True, "continuous_usage_stats": True})
        return draft


def _add_turn(draft: ChatDraft, blocks: Sequence[TextBlock | ThinkingBlock | ToolUseBlock], origin: str) -> None:
    """Add what the model said, called and thought in one message."""
    turn = draft.add({"role": "assistant"}, origin)
    path = f"messages.{len(draft.messages) - 1}"
    for i, block in enumerate(blocks):
        place = f"{origin}.content.{i}"
        match block:
            case TextBlock():
                parts = turn.setdefault("content", [])
                draft.name(f"{path}.content.{len(parts)}", place)
                parts.append({"type": "text", "text": block.text})
            case ThinkingBlock():
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                calls = turn.setdefault("tool_calls", [])
                draft.name(f"{path}.tool_calls.{len(calls)}", place)
                draft.name(f"{path}.tool_calls.{len(calls)}.function", place)
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})


def _add_blocks(
    draft: ChatDraft, role: str, blocks: Sequence[TextBlock | DocumentBlock | ToolResultBlock], origin: str
) -> None:
    """Add the messages of one of the client's: what a tool returned is one by itself."""
    parts: list[dict[str, str]] | None = None  # of the message that texts go on with
    if not blocks:
        draft.add({"role": role, "content": ""}, origin)
    for i, block in enumerate(blocks):
        place = f"{origin}.content.{i}"
        if isinstance(block, ToolResultBlock):
            parts = None
            content = _chat_content(block.content or "")
            draft.add({"role": "tool", "tool_call_id": block.tool_use_id, "content": content}, place)
        else:
            if parts is None:
                parts = []
                draft.add({"role": role, "content": parts}, origin)
            draft.name(f"messages.{len(draft.messages) - 1}.content.{len(parts)}", place)
            parts.append({"type": "text", "text": block.text})


def _chat_content(content: str | Sequence[TextBlock | DocumentBlock]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]


def _chat_tool(tool: CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    function |= tool.model_dump(include={"description", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


class AnswerText(TypedDict):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class AnswerThinking(TypedDict):
    """Reasoning before the rest of the answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str  # empty: what is sent back is not checked


class AnswerToolUse(TypedDict):
    """A call that the model asks for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict):
    """`usage`. The prompt's tokens are the first three together."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int  # of a prompt with cache_control: what was computed, and is to be kept
    output_tokens: int


class MessageObject(TypedDict):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageErrorBody(TypedDict):
    """The error of an error object."""

    type: str
    message: str


class MessageError(TypedDict):
    """Anthropic's error object."""

    type: Literal["error"]
    error: MessageErrorBody
    request_id: NotRequired[str]


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(error: TwostrokeError) -> MessageError:
    """Return the error object that shows `error` to the client of this API."""
    shown = public_error(error)
    kind = _ERROR_TYPES.get(shown.status, "api_error" if shown.status >= 500 else "invalid_request_error")
    words = shown.in_anthropics_words if isinstance(shown, ContextExceeded) else str(shown)
    return {"type": "error", "error": {"type": kind, "message": words}}


Event = dict[str, Any]

_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
_MEMBERS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
"""Types of deltas, by the type of the block that they add to."""


class MessagesWriter(StreamWriter):
    """Writes a message: blocks one after the other, of which the last may be open."""

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
        """Make a writer (see `ChoicesWriter`)."""
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the last block, while it is open
        self._is_open = False
        self._has_begun = False
        self._has_tools = jobs[0].has_tools
        self._is_kept = any(job.request.keep_s > 0 for job in jobs)
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]], usage: Usage) -> bytes:
        for delta in choices[0]:
            for _ in self._told(delta):
                pass
        return encode_json(self._message(usage))

    def events(self, delta: ChoiceDelta, usage: Usage | None = None) -> bytes:
        begin = b""
        if not self._has_begun:
            self._has_begun = True
            assert usage is not None, "MessagesRequest asks for it in every chunk"
            begin = _written([{"type": "message_start", "message": self._message(usage)}])
        return begin + _written(self._told(delta))

    def ending(self, usage: Usage) -> bytes:
        return _written(
            [{"type": "message_delta", "delta": self._stop, "usage": self._usage(usage)}, {"type": "message_stop"}]
        )

    def failure(self, error: TwostrokeError) -> bytes:
        return _written([{**message_error(error)}])

    def _told(self, delta: ChoiceDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._add("thinking", delta.reasoning)
        if delta.text:
            yield from self._add("text", delta.text)
        for call in delta.tool_calls:
            if call.call_id:
                yield from self._open({"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}})
            if call.arguments:
                yield from self._add("tool_use", call.arguments)
        if delta.finish_reason is not None:
            is_cut_call = delta.finish_reason == "length" and self._has_tools
            if not self._blocks and not is_cut_call:  # an answer without a word has a text all the same
                yield from self._open({"type": "text", "text": ""})
            yield from self._close()
            reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(delta.finish_reason, "end_turn")
            if delta.stop_string:
                reason = "stop_sequence"
            self._stop = {"stop_reason": reason, "stop_sequence": delta.stop_string or None}

    def _add(self, kind: Literal["text", "thinking", "tool_use"], text: str) -> Iterator[Event]:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, kind: "", **more})
        self._pieces.append(text)
        delta = {"type": _DELTAS[kind], _MEMBERS[kind]: text}
        yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        block, text = self._blocks[-1], "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        self._is_open, self._pieces = False, []
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _message(self, usage: Usage) -> dict[str, Any]:
        """The message as far as it has come."""
        return {**self._head, "content": self._blocks, **self._stop, "usage": self._usage(usage)}

    def _usage(self, usage: Usage) -> MessageUsage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        computed = usage["prompt_tokens"] - cached
        return {
            "input_tokens": 0 if self._is_kept else computed,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": computed if self._is_kept else 0,
            "output_tokens": usage["completion_tokens"],
        }


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments. What is no object, because it was cut off say, comes as it was written."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {UNREAD: arguments}


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(named_event(one["type"], one) for one in events)
