"""OpenAI's Responses API: requests become chats, and a chat's deltas become output items and events.

The server keeps no conversation: clients send its items again, those of answers unchanged. Tools that no server but
OpenAI's runs are left out, and their items are text for the model; functions within a namespace are functions here.

Items and events: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

import itertools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Discriminator, Field, Tag
from typing_extensions import TypedDict

from twostroke.protocol.errors import TwostrokeError
from twostroke.router.openai.answers import (
    ChoiceDelta,
    StreamWriter,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    encode_json,
    error_object,
    named_event,
    obfuscated,
    token_logprobs,
)
from twostroke.router.openai.fields import (
    MAX_NAME,
    FunctionName,
    PromptCacheFields,
    ShortText,
    StrictModel,
    Text,
    only,
    refusal,
    type_tag,
)
from twostroke.router.openai.schemas import (
    MAX_LOGPROBS,
    TEXT_ALONE,
    ChatDraft,
    GenerationFields,
    SamplingFields,
    Stop,
    StreamOptions,
)
from twostroke.router.request_state import ChoiceJob
from twostroke.router.text.tokenizer import TextTokenizer

MAX_ITEMS = 4096
MAX_PARTS = 256
"""Most parts of one item."""
MAX_TOOLS = 128
_NOT_KEPT = "responses are not kept here; send the items of the conversation as input"

JsonSchema = dict[str, Any]
Included = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
]
"""Parts of an answer that clients may want. But for log-probabilities there are none here."""

_OTHER_TOOLS = re.compile(
    "(web_search|web_search_preview|file_search|code_interpreter|computer|computer_use|computer_use_preview|mcp|shell"
    "|local_shell|apply_patch|custom|tool_search|image_generation)(_[0-9]{4}_[0-9]{2}_[0-9]{2})?"
)
"""Types of tools that the model is not told of, also with a date. Codex offers some whatever the server is."""
_OTHER_ITEMS = re.compile(
    "(web_search|file_search|code_interpreter|mcp|tool_search|image_generation)_call|tool_search_output"
    "|(shell|local_shell|apply_patch|custom_tool)_call(_output)?|mcp_(list_tools|approval_request|approval_response)"
)
"""Types of the items of such tools. A computer's are left to errors: they have images."""
MAX_TOLD = 32
"""Most types of tools that an answer's header names."""
_OTHER = "another type"


def _tag(value: Any) -> str:
    """Return the tag of an item or a tool by its `type` (see `type_tag`): one for all that are left out."""
    tag = type_tag(value)
    kind = tag.removeprefix("type ")
    return _OTHER if _OTHER_TOOLS.fullmatch(kind) or _OTHER_ITEMS.fullmatch(kind) else tag


class ResponseTextPart(StrictModel):
    """A part of a message, or of what a function returned."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Any = None  # as answers have them
    logprobs: Any = None


class ResponseRefusalPart(StrictModel):
    """A refusal, in place of an answer."""

    type: Literal["refusal"]
    refusal: Text


class ReasoningPart(StrictModel):
    """Reasoning text of a model, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


ReasoningParts = Annotated[list[ReasoningPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class MessageItem(StrictModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: "Text | Parts"
    id: ShortText | None = None
    status: ShortText | None = None
    phase: ShortText | None = None


class FunctionCallItem(StrictModel):
    """A function call of the model's."""

    type: Literal["function_call"]
    call_id: ShortText
    name: FunctionName
    arguments: Text | None  # JSON
    id: ShortText | None = None
    status: ShortText | None = None
    caller: Any = None  # the model, always
    namespace: FunctionName | None = None

    @property
    def chat_name(self) -> str:
        """The function's name in the chat."""
        return name_within(self.namespace, self.name)


class FunctionOutputItem(StrictModel):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: ShortText
    output: "Text | Parts"
    id: ShortText | None = None
    status: ShortText | None = None


class ReasoningItem(StrictModel):
    """Reasoning of a model. Encrypted reasoning is another server's: it is skipped, as summaries are."""

    type: Literal["reasoning"]
    id: ShortText | None = None
    summary: ReasoningParts | None = None
    content: ReasoningParts | None = None
    encrypted_content: Text | None = None
    status: ShortText | None = None


class OtherItem(StrictModel):
    """An item of a tool that is left out: what another model did with it."""

    takes_any: ClassVar[bool] = True

    type: ShortText

    @property
    def text(self) -> str:
        """The item in words, which are its JSON."""
        said = self.model_dump(exclude={"id", "status", "result", "encrypted_content"}, exclude_none=True)
        return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


Part = Annotated[
    Annotated[ResponseTextPart, Tag("type input_text")]
    | Annotated[ResponseTextPart, Tag("type output_text")]
    | Annotated[ResponseRefusalPart, Tag("type refusal")],
    Discriminator(type_tag),
    BeforeValidator(only(("input_text", "output_text", "refusal"), TEXT_ALONE)),
]
Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]
Item = Annotated[
    Annotated[MessageItem, Tag("type message")]
    | Annotated[FunctionCallItem, Tag("type function_call")]
    | Annotated[FunctionOutputItem, Tag("type function_call_output")]
    | Annotated[ReasoningItem, Tag("type reasoning")]
    | Annotated[OtherItem, Tag(_OTHER)],
    Discriminator(_tag),
    BeforeValidator(
        only(
            ("message", "function_call", "function_call_output", "reasoning"),
            "nothing is kept here, and functions are the only tools; send messages, reasoning, calls and outputs",
            default="message",
            beside=_OTHER_ITEMS,
        )
    ),
]


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class OtherTool(StrictModel):
    """A tool that is left out."""

    takes_any: ClassVar[bool] = True

    type: ShortText


_RUN_IT = "give a function, and run it yourself"
PlainTool = Annotated[
    Annotated[FunctionTool, Tag("type function")] | Annotated[OtherTool, Tag(_OTHER)],
    Discriminator(_tag),
    BeforeValidator(only(("function",), _RUN_IT, beside=_OTHER_TOOLS)),
]


class NamespaceTool(StrictModel):
    """Functions under a name that they share."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: Annotated[list[PlainTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


Tool = Annotated[
    Annotated[FunctionTool, Tag("type function")]
    | Annotated[NamespaceTool, Tag("type namespace")]
    | Annotated[OtherTool, Tag(_OTHER)],
    Discriminator(_tag),
    BeforeValidator(only(("function", "namespace"), _RUN_IT, beside=_OTHER_TOOLS)),
]


class NamedFunction(StrictModel):
    """`tool_choice`: the function that must be called."""

    type: Literal["function"]
    name: FunctionName
    namespace: FunctionName | None = None


class AllowedTool(StrictModel):
    """A tool that may be called; only functions have a name."""

    type: FunctionName  # a word, as names are
    name: FunctionName | None = None
    namespace: FunctionName | None = None


class AllowedFunctions(StrictModel):
    """`tool_choice`: the tools, of those that are given, that may be called, or have to."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


ChosenTools = Annotated[
    Annotated[NamedFunction, Tag("type function")]
    | Annotated[AllowedFunctions, Tag("type allowed_tools")]
    | Annotated[OtherTool, Tag(_OTHER)],
    Discriminator(_tag),
    BeforeValidator(only(("function", "allowed_tools"), "name a function, or allowed_tools", beside=_OTHER_TOOLS)),
]


class TextFormat(StrictModel):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: Text | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseTextFields(StrictModel):
    """`text`."""

    format: TextFormat | None = None
    verbosity: ShortText | None = None


class ReasoningFields(StrictModel):
    """`reasoning`. What the model thinks is shown as it is, whatever summary is asked for."""

    effort: ShortText | None = None
    summary: ShortText | None = None


_NAME_OF_CHAT_FIELD = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
    "tool_choice.function": "tool_choice",
}


class ResponsesRequest(SamplingFields, PromptCacheFields):
    """POST /v1/responses."""

    lacking: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {
        "previous_response_id": (_NOT_KEPT, ()),
        "conversation": (_NOT_KEPT, ()),
        "store": (f"{_NOT_KEPT}, and store: false", (False,)),
        "background": ("responses are not kept here; use stream, or wait", (False,)),
        "prompt": ("prompts are not kept here; send instructions and input", ()),
        "truncation": ("prompts are taken whole; leave out old items", ("disabled",)),
        "context_management": ("prompts are taken whole; leave out old items", ([],)),
        "moderation": ("this server does not judge texts", ()),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        (
            *("user", "safety_identifier", "prompt_cache_options"),
            *("max_tool_calls", "access_programs", "image", "client_metadata"),
        )
    )

    stream_options: StreamOptions | None = None
    input: Text | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stop: Stop | None = None  # vLLM's
    include: Annotated[list[Included], Field(fail_fast=True, max_length=16)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextFields | None = None
    reasoning: ReasoningFields | None = None
    metadata: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = None

    @property
    def left_out_tools(self) -> list[str]:
        tools = [tool for one in self.tools or () for tool in (one.tools if isinstance(one, NamespaceTool) else [one])]
        return [*dict.fromkeys(tool.type for tool in tools if isinstance(tool, OtherTool))][:MAX_TOLD]

    @property
    def functions(self) -> Iterator[tuple[str, str | None, FunctionTool]]:
        """Yield the functions, with their paths, and the namespaces of those within one."""
        for i, one in enumerate(self.tools or ()):
            if isinstance(one, FunctionTool):
                yield f"tools.{i}", None, one
            elif isinstance(one, NamespaceTool):
                for j, tool in enumerate(one.tools):
                    if isinstance(tool, FunctionTool):
                        yield f"tools.{i}.tools.{j}", one.name, tool

    def _chat_name(self, chosen: NamedFunction | AllowedTool, param: str) -> str | None:
        """The name in the chat of the function that is chosen, by its own name where only one has it."""
        names = {name_within(namespace, tool.name): tool.name for _, namespace, tool in self.functions}
        if chosen.name is None or chosen.name in names or chosen.namespace is not None:
            return chosen.name and name_within(chosen.namespace, chosen.name)
        found = [full for full, name in names.items() if name == chosen.name]
        if len(found) > 1:
            raise refusal(f"{param}.name", f"is the name of {len(found)} functions: give its namespace beside it")
        return found[0] if found else chosen.name

    def draft(self) -> ChatDraft:
        """The chat that this is."""
        draft = ChatDraft(self, _NAME_OF_CHAT_FIELD)
        if self.instructions:
            draft.add({"role": "system", "content": self.instructions}, "instructions")
        if isinstance(self.input, str):
            draft.add({"role": "user", "content": self.input}, "input")
        else:
            _add_items(draft, self.input)
        tools = list[dict[str, Any]]()
        for path, namespace, tool in self.functions:
            if len(name_within(namespace, tool.name)) > MAX_NAME:
                raise refusal(f"{path}.name", f"namespace and name together have at most {MAX_NAME - 2} characters")
            draft.name(f"tools.{len(tools)}.function", path)
            tools.append(_chat_tool(tool, namespace))
        text, reasoning = self.text or ResponseTextFields(), self.reasoning or ReasoningFields()
        wants_logprobs = bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
        draft.set(
            stream_options=self.stream_options and self.stream_options.model_dump(),
            max_completion_tokens=self.max_output_tokens,
            stop=self.stop,
            logprobs=wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=None if self.tools is None else tools,
            tool_choice=self._chosen(draft),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if text.format is None else _chat_format(text.format),
            verbosity=text.verbosity,
            reasoning_effort=reasoning.effort,
            prompt_cache_key=self.prompt_cache_key,
            prompt_cache_retention=self.prompt_cache_retention,
        )
        return draft

    def _chosen(self, draft: ChatDraft) -> Any:
        """Return the chat's choice of tools. Those that are left out are never called, so it has to have functions."""
        choice, param, others = self.tool_choice, "tool_choice", list[str]()
        if isinstance(choice, NamedFunction):
            return _chat_choice(self._chat_name(choice, param))
        if isinstance(choice, OtherTool):
            others = [choice.type]
        elif isinstance(choice, AllowedFunctions):
            path, tools = "tool_choice.allowed_tools", list[dict[str, Any]]()
            draft.name(path, param)
            for i, tool in enumerate(choice.tools):
                if tool.type == "function":
                    draft.name(f"{path}.tools.{len(tools)}.function", f"{param}.tools.{i}")
                    tools.append(_chat_choice(self._chat_name(tool, f"{param}.tools.{i}")))
            if tools:
                return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
            param, others = f"{param}.tools", [tool.type for tool in choice.tools]
        elif choice == "required" and not any(self.functions):
            others = self.left_out_tools
        if others:
            kinds = ", ".join(dict.fromkeys(others[:MAX_TOLD]))
            raise refusal(param, f"has no function: tools of the type {kinds} are left out; name a function, or auto")
        return choice


AnyItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | OtherItem


def _add_items(draft: ChatDraft, items: Sequence[AnyItem]) -> None:
    """Add the messages that these items are. What a model thought, said and called in one turn is one message.

    Of outputs in a row those of functions come first: templates want them right behind the calls.
    """
    turn: dict[str, Any] | None = None  # the model's, which may go on
    runs = groupby(range(len(items)), lambda i: isinstance(items[i], FunctionOutputItem) or _is_result(items[i]))
    for i in (i for _, run in runs for i in sorted(run, key=lambda i: _is_result(items[i]))):
        item, origin = items[i], f"input.{i}"
        match item:
            case ReasoningItem():
                thoughts = "\n".join(part.text for part in item.content or ())
                if thoughts:
                    turn = draft.add({"role": "assistant", "reasoning_content": thoughts}, origin)
            case FunctionCallItem():
                if turn is None:
                    turn = draft.add({"role": "assistant"}, origin)
                calls = turn.setdefault("tool_calls", [])
                draft.name(f"messages.{len(draft.messages) - 1}.tool_calls.{len(calls)}", origin)
                function = {"name": item.chat_name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case OtherItem() if _is_result(item):
                turn = None
                draft.add({"role": "user", "content": item.text}, origin)
            case OtherItem() | MessageItem(role="assistant"):
                more = _parts(item.text if isinstance(item, OtherItem) else _chat_content(item.content))
                content = turn.get("content", []) if turn else []
                is_next = isinstance(item, MessageItem) and content and turn and "tool_calls" not in turn
                if turn is None or is_next or len(content) + len(more) > MAX_PARTS:
                    turn, content = draft.add({"role": "assistant"}, origin), []
                turn["content"] = content + more
                draft.name(f"messages.{len(draft.messages) - 1}.content", f"{origin}.content")
            case MessageItem():
                turn = None
                draft.add({"role": item.role, "content": _chat_content(item.content)}, origin)
            case FunctionOutputItem():
                turn = None
                message = {"role": "tool", "tool_call_id": item.call_id, "content": _chat_content(item.output)}
                draft.add(message, origin)
                draft.name(f"messages.{len(draft.messages) - 1}.content", f"{origin}.output")


def _is_result(item: AnyItem) -> bool:
    """Return whether the client says what a tool that is left out has brought."""
    return isinstance(item, OtherItem) and item.type.endswith(("_output", "_response"))


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _chat_content(content: str | Sequence[ResponseTextPart | ResponseRefusalPart]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    texts = [part.text if isinstance(part, ResponseTextPart) else part.refusal for part in content]
    return [{"type": "text", "text": text} for text in texts]


def name_within(namespace: str | None, name: str) -> str:
    """Return the name that a function has in the chat."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def _chat_tool(tool: FunctionTool, namespace: str | None) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": {**function, "name": name_within(namespace, tool.name)}}


def _chat_choice(name: str | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _chat_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]  # none: the model is its only source
    logprobs: list[TokenLogprob]


class ReasoningText(TypedDict):
    """The reasoning of the model."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    """A message of an answer."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(TypedDict):
    """Reasoning before the rest of the answer."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]  # none: all is told
    content: list[ReasoningText]


class OutputFunctionCall(TypedDict):
    """A call that the model asks for."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]  # of the function, where the request had it within one
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class ResponseUsage(TypedDict):
    """`usage`."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseObject(TypedDict):
    """The answer of /v1/responses. What it does not tell by itself are the request's fields, with their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    error: dict[Literal["code", "message"], str] | None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    usage: ResponseUsage | None  # null in events before the last
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    truncation: Literal["disabled"]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    service_tier: NotRequired[str]


Event = dict[str, Any]
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponsesWriter(StreamWriter):
    """Writes a response: items one after the other, of which the last may be open."""

    def __init__(
        self,
        request: ResponsesRequest,
        body: GenerationFields,
        jobs: Sequence[ChoiceJob],
        tokenizer: TextTokenizer,
        *,
        model: str,
        created: int,
        service_tier: str | None,
    ):
        """`request` is what `body` was made of; the others are those of `ChoicesFormat`."""
        self._piece = tokenizer.piece
        self._has_tools = jobs[0].has_tools
        self._is_obfuscated = body.is_obfuscated
        self._head = _head(request, jobs[0], model, created, service_tier)
        self._names = {
            name_within(namespace, tool.name): {"name": tool.name, "namespace": namespace}
            for _, namespace, tool in request.functions
            if namespace is not None
        }  # of functions in the chat
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # the last of them, while it is open
        self._pieces: list[str] = []  # of the text of the open item
        self._logprobs: list[TokenLogprob] = []  # of the text of the open item
        self._untold: list[TokenLogprob] = []  # of tokens whose text is to come
        self._status: Status = "in_progress"
        self._has_begun = False
        self._numbers = itertools.count()  # of events

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]], usage: Usage) -> bytes:
        for delta in choices[0]:
            for _ in self._told(delta):
                pass
        return encode_json(self._response(usage))

    def events(self, delta: ChoiceDelta, usage: Usage | None = None) -> bytes:
        return self._written(self._told(delta))

    def ending(self, usage: Usage) -> bytes:
        return self._written([{"type": f"response.{self._status}", "response": self._response(usage)}])

    def failure(self, error: TwostrokeError) -> bytes:
        return self._written(self._failed(error))

    def _written(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event({**one, "sequence_number": next(self._numbers)}) for one in events)

    def _event(self, written: Event) -> bytes:
        is_padded = self._is_obfuscated and written["type"].endswith(".delta")
        return named_event(written["type"], obfuscated(written) if is_padded else written)

    def _told(self, delta: ChoiceDelta) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "response.created", "response": self._response(None)}
            yield {"type": "response.in_progress", "response": self._response(None)}
        if delta.text or not (delta.reasoning or delta.tool_calls):  # only what is said has log-probabilities
            self._untold += token_logprobs(delta.shown, self._piece)
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.text:
            yield from self._add_text("message", delta.text)
        for call in delta.tool_calls:
            yield from self._add_call(call)
        if delta.finish_reason is not None:
            is_cut_call = delta.finish_reason == "length" and self._has_tools
            if not self._output and not is_cut_call:  # an answer without a word is a message all the same
                yield from self._open_item({"type": "message", "role": "assistant", "content": []})
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self._close_item()

    def _add_text(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[Event]:
        if self._item is None or self._item["type"] != kind:
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._open_item({"type": kind, **more, "content": []})
        self._pieces.append(text)
        event = {"type": f"{_TEXT_EVENTS[kind]}.delta", **self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            event["logprobs"], self._untold = self._untold, []
            self._logprobs += event["logprobs"]
        yield event

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.call_id:
            fields = {"call_id": call.call_id, **self._names.get(call.name, {"name": call.name}), "arguments": ""}
            yield from self._open_item({"type": "function_call", **fields})
        if call.arguments:
            self._pieces.append(call.arguments)
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": call.arguments}

    def _open_item(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close_item()
        self._item = {"id": f"{_ID_PREFIXES[item['type']]}_{secrets.token_hex(12)}", "status": "in_progress", **item}
        self._output.append(self._item)
        index = len(self._output) - 1
        yield {"type": "response.output_item.added", "output_index": index, "item": self._item}
        if "content" in item:
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": self._part()}

    def _close_item(self) -> Iterator[Event]:
        """End the open item, if there is one; as the response, where that ends with it."""
        item = self._item
        if item is None:
            return
        if item["type"] == "message" and self._untold:  # tokens that brought no text
            yield from self._add_text("message", "")
        text = "".join(self._pieces)
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield {"type": "response.function_call_arguments.done", **self._place(), **done}
        else:
            part = self._part()
            item["content"] = [part]
            place = {**self._place(), "content_index": 0}
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield {"type": f"{_TEXT_EVENTS[item['type']]}.done", **place, **done}
            yield {"type": "response.content_part.done", **place, "part": part}
        item["status"] = "completed" if self._status == "in_progress" else self._status
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}
        self._item, self._pieces, self._logprobs = None, [], []

    def _place(self) -> dict[str, Any]:
        """Return the position of the open item."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _part(self) -> dict[str, Any]:
        """The only part of the open item, as far as it has come."""
        text = "".join(self._pieces)
        if self._output[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _failed(self, error: TwostrokeError) -> Iterator[Event]:
        body = error_object(error)["error"]
        self._status = "incomplete"
        yield from self._close_item()
        self._status = "failed"
        fields = {"code": body["code"], "message": body["message"]}
        yield {"type": "error", **fields, "param": body["param"]}
        yield {"type": "response.failed", "response": self._response(None) | {"error": fields}}

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        """The response as far as it has come."""
        is_cut = self._status == "incomplete"
        return self._head | {
            "status": self._status,
            "output": self._output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": None if usage is None else _usage(usage),
        }


def _head(
    request: ResponsesRequest, job: ChoiceJob, model: str, created: int, service_tier: str | None
) -> dict[str, Any]:
    """The fields that do not change while a response comes."""
    text, reasoning = request.text or ResponseTextFields(), request.reasoning or ReasoningFields()
    choice = request.tool_choice
    form = text.format or TextFormat(type="text")
    head = {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": created,
        "model": model,
        "store": False,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "temperature": job.request.sampling.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True), "verbosity": text.verbosity},
        "tool_choice": choice.model_dump(exclude_none=True) if isinstance(choice, StrictModel) else choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": job.request.sampling.top_p,
    }
    return head if service_tier is None else {**head, "service_tier": service_tier}


def _usage(usage: Usage) -> ResponseUsage:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": usage["total_tokens"],
    }
