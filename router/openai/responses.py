"""Requests of OpenAI's Responses API, translated into chats. The answers: response_items.py.

The server keeps no conversation: clients send its items again, those of answers unchanged. Tools that no server but
OpenAI's runs are left out, and their items are text for the model; functions within a namespace are functions here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from twostroke.router.openai.fields import PromptCacheFields, ShortText, StrictModel, Text, only, type_tag
from twostroke.router.openai.schemas import MAX_LOGPROBS, TEXT_ALONE, ChatDraft, SamplingFields, Stop
from twostroke.router.openai.tools import FunctionName

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

_OTHER_TOOLS = ("web_search", "web_search_preview", "local_shell", "custom", "tool_search", "image_generation")
"""Types of tools that the model is not told of. Codex offers them whatever the server is."""
_OTHER_ITEMS = (
    *("web_search_call", "local_shell_call", "local_shell_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("tool_search_call", "tool_search_output", "image_generation_call"),
)
"""Types of the items of such tools."""
_OTHER = "another type"


def _tag(value: Any) -> str:
    """Return the tag of an item or a tool by its `type` (see `type_tag`): one for all that are left out."""
    tag = type_tag(value)
    return _OTHER if tag.removeprefix("type ") in (*_OTHER_TOOLS, *_OTHER_ITEMS) else tag


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
            ("message", "function_call", "function_call_output", "reasoning", *_OTHER_ITEMS),
            "nothing is kept here, and functions are the only tools; send messages, reasoning, calls and outputs",
            default="message",
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
    BeforeValidator(only(("function", *_OTHER_TOOLS), _RUN_IT)),
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
    BeforeValidator(only(("function", "namespace", *_OTHER_TOOLS), _RUN_IT)),
]


class NamedFunction(StrictModel):
    """`tool_choice`: the function that must be called."""

    type: Literal["function"]
    name: FunctionName


class AllowedTool(StrictModel):
    """A tool that may be called; only functions have a name."""

    type: ShortText
    name: FunctionName | None = None


class AllowedFunctions(StrictModel):
    """`tool_choice`: the tools, of those that are given, that may be called, or have to."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


ChosenTools = Annotated[
    Annotated[NamedFunction, Tag("type function")] | Annotated[AllowedFunctions, Tag("type allowed_tools")],
    Discriminator(type_tag),
    BeforeValidator(only(("function", "allowed_tools"), "name a function of tools, or allowed_tools")),
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
            *("max_tool_calls", "stream_options", "access_programs", "image", "client_metadata"),
        )
    )

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
        return [*dict.fromkeys(tool.type for tool in tools if isinstance(tool, OtherTool))]

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
            draft.name(f"tools.{len(tools)}.function", path)
            tools.append(_chat_tool(tool, namespace))
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = _chat_choice(choice.name)
        elif isinstance(choice, AllowedFunctions):
            choice = _chat_allowed(draft, choice)
        text, reasoning = self.text or ResponseTextFields(), self.reasoning or ReasoningFields()
        wants_logprobs = bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
        draft.set(
            max_completion_tokens=self.max_output_tokens,
            stop=self.stop,
            logprobs=wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=None if self.tools is None else tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if text.format is None else _chat_format(text.format),
            verbosity=text.verbosity,
            reasoning_effort=reasoning.effort,
            prompt_cache_key=self.prompt_cache_key,
            prompt_cache_retention=self.prompt_cache_retention,
        )
        return draft


def _add_items(
    draft: ChatDraft, items: Sequence[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | OtherItem]
) -> None:
    """Add the messages that these items are. What a model thought, said and called in one turn is one message."""
    turn: dict[str, Any] | None = None  # the model's, which may go on
    for i, item in enumerate(items):
        origin = f"input.{i}"
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
            case OtherItem() if item.type.endswith("_output"):
                turn = None
                draft.add({"role": "user", "content": item.text}, origin)
            case OtherItem() | MessageItem(role="assistant"):
                if turn is None or "content" in turn or "tool_calls" in turn:
                    turn = draft.add({"role": "assistant"}, origin)
                turn["content"] = item.text if isinstance(item, OtherItem) else _chat_content(item.content)
                draft.name(f"messages.{len(draft.messages) - 1}.content", f"{origin}.content")
            case MessageItem():
                turn = None
                draft.add({"role": item.role, "content": _chat_content(item.content)}, origin)
            case FunctionOutputItem():
                turn = None
                message = {"role": "tool", "tool_call_id": item.call_id, "content": _chat_content(item.output)}
                draft.add(message, origin)
                draft.name(f"messages.{len(draft.messages) - 1}.content", f"{origin}.output")


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


def _chat_allowed(draft: ChatDraft, choice: AllowedFunctions) -> dict[str, Any]:
    """Return the chat's choice of these functions. Other tools are never called."""
    path = "tool_choice.allowed_tools"
    functions = [(i, tool) for i, tool in enumerate(choice.tools) if tool.type == "function"]
    draft.name(path, "tool_choice")
    for number, (i, _) in enumerate(functions):
        draft.name(f"{path}.tools.{number}.function", f"tool_choice.tools.{i}")
    allowed = {"mode": choice.mode, "tools": [_chat_choice(tool.name) for _, tool in functions]}
    return {"type": choice.type, "allowed_tools": allowed}


def _chat_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}
