"""Answers of OpenAI's Responses API: the output items and events that a chat's deltas become.

Items and events: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NotRequired

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
from twostroke.router.openai.fields import StrictModel
from twostroke.router.openai.responses import (
    ReasoningFields,
    ResponsesRequest,
    ResponseTextFields,
    TextFormat,
    name_within,
)
from twostroke.router.openai.schemas import GenerationFields
from twostroke.router.request_state import ChoiceJob
from twostroke.router.text.tokenizer import TextTokenizer

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
