"""OpenAI's Responses API, as a translation: a request becomes a chat, and what the chat brings output items and events.

Nothing is kept: whoever goes on with a conversation sends its items again, those of the answer as they came.
Items and events: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    token_logprobs,
)
from twostroke.router.openai.fields import ShortText, StrictModel, Text
from twostroke.router.openai.jobs import ChoiceJob
from twostroke.router.openai.schemas import MAX_LOGPROBS, GenerationFields, SamplingFields, Stop
from twostroke.router.openai.tools import FunctionName
from twostroke.router.openai.translation import ChatDraft, only
from twostroke.router.text.tokenizer import TextTokenizer

MAX_ITEMS = 4096
MAX_PARTS = 256  # of one item
MAX_TOOLS = 128
_NOT_KEPT = "responses are not kept here; send the items of the conversation as input"

Status = Literal["in_progress", "completed", "incomplete", "failed"]
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
    BeforeValidator(only(("input_text", "output_text", "refusal"), "this server reads and writes text alone")),
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


class ResponsesRequest(SamplingFields):
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
            *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
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
    tool_choice: str | dict[str, str]
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
        self._head = _head(request, jobs[0], model, created, service_tier)
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
        return b"".join(named_event(one["type"], {**one, "sequence_number": next(self._numbers)}) for one in events)

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
            if not self._output:  # an answer without a word is a message all the same
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
            told = {"call_id": call.call_id, "name": call.name, "arguments": ""}
            yield from self._open_item({"type": "function_call", **told})
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
        told = {"code": body["code"], "message": body["message"]}
        yield {"type": "error", **told, "param": body["param"]}
        yield {"type": "response.failed", "response": self._response(None) | {"error": told}}

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
    text, reasoning, choice = (
        request.text or ResponseTextFields(),
        request.reasoning or ReasoningFields(),
        request.tool_choice,
    )
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
        "tool_choice": {"type": "function", "name": choice.name}
        if isinstance(choice, NamedFunction)
        else choice or "auto",
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
            "reasoning_tokens": usage.get("completion_tokens_details", {"reasoning_tokens": 0})["reasoning_tokens"]
        },
        "total_tokens": usage["total_tokens"],
    }
