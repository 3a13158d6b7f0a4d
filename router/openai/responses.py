"""Requests of OpenAI's Responses API, translated into chats. The answers: response_items.py.

The server keeps no conversation: clients send its items again, those of answers unchanged.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from twostroke.router.openai.fields import PromptCacheFields, ShortText, StrictModel, Text
from twostroke.router.openai.schemas import MAX_LOGPROBS, TEXT_ALONE, ChatDraft, SamplingFields, Stop, only
from twostroke.router.openai.tools import FunctionName

MAX_ITEMS = 4096
MAX_PARTS = 256
"""Most parts of one item."""
MAX_TOOLS = 128
_NOT_KEPT = "responses are not kept here; send the items of the conversation as input"

JsonSchema = dict[str, Any]
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


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
    namespace: None = None


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


def _type_of(value: Any) -> str:
    kind: str = value.get("type", "message") if isinstance(value, dict) else value.type
    return f"type {kind}"


# Tags are no words, so that `explain` takes them for no part of a path.
Part = Annotated[
    Annotated[ResponseTextPart, Tag("type input_text")]
    | Annotated[ResponseTextPart, Tag("type output_text")]
    | Annotated[ResponseRefusalPart, Tag("type refusal")],
    Discriminator(_type_of),
    BeforeValidator(only(("input_text", "output_text", "refusal"), TEXT_ALONE)),
]
Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]
Item = Annotated[
    Annotated[MessageItem, Tag("type message")]
    | Annotated[FunctionCallItem, Tag("type function_call")]
    | Annotated[FunctionOutputItem, Tag("type function_call_output")]
    | Annotated[ReasoningItem, Tag("type reasoning")],
    Discriminator(_type_of),
    BeforeValidator(
        only(
            ("message", "function_call", "function_call_output", "reasoning"),
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


Tool = Annotated[FunctionTool, BeforeValidator(only(("function",), "give a function, and run it yourself"))]


class NamedFunction(StrictModel):
    """`tool_choice`: the function that must be called."""

    type: Literal["function"]
    name: FunctionName


NamedTool = Annotated[NamedFunction, BeforeValidator(only(("function",), "name a function of tools"))]


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
            *("max_tool_calls", "stream_options", "access_programs", "image"),
        )
    )

    input: Text | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stop: Stop | None = None  # vLLM's
    include: Annotated[list[Included], Field(fail_fast=True, max_length=16)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextFields | None = None
    reasoning: ReasoningFields | None = None
    metadata: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = None

    def draft(self) -> ChatDraft:
        """The chat that this is."""
        draft = ChatDraft(self, _NAME_OF_CHAT_FIELD)
        if self.instructions:
            draft.add({"role": "system", "content": self.instructions}, "instructions")
        if isinstance(self.input, str):
            draft.add({"role": "user", "content": self.input}, "input")
        else:
            _add_items(draft, self.input)
        for i in range(len(self.tools or ())):
            draft.name(f"tools.{i}.function", f"tools.{i}")
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        text, reasoning = self.text or ResponseTextFields(), self.reasoning or ReasoningFields()
        wants_logprobs = bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
        draft.set(
            max_completion_tokens=self.max_output_tokens,
            stop=self.stop,
            logprobs=wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
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
    draft: ChatDraft, items: Sequence[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem]
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
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case MessageItem(role="assistant"):
                if turn is None or "content" in turn or "tool_calls" in turn:
                    turn = draft.add({"role": "assistant"}, origin)
                turn["content"] = _chat_content(item.content)
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


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _chat_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}
