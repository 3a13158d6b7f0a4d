"""Requests of OpenAI's Responses API, translated into chats. The answers: response_items.py.

The server keeps no conversation: clients send its items again, those of answers unchanged. Tools that no server but
OpenAI's runs are left out, and their items are text for the model; functions within a namespace are functions here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from twostroke.router.openai.fields import PromptCacheFields, ShortText, StrictModel, Text, only, refusal, type_tag
from twostroke.router.openai.schemas import MAX_LOGPROBS, TEXT_ALONE, ChatDraft, SamplingFields, Stop, StreamOptions
from twostroke.router.openai.tools import MAX_NAME, FunctionName

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
