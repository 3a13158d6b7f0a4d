"""Fields and checks that the models of requests share, and the refusals of what they find wrong.

- `StrictModel`, the base of all, and prompt caching.
- Tools and reasoning: the functions that a client offers, which of them may or must be called, the calls of earlier
  turns, and how much the model is to think.
- Structured output: `response_format`, vLLM's `structured_outputs`, and the names that older clients and other servers
  have for the same. All become one grammar.
"""

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticKnownError

from twostroke.protocol.errors import RequestError, is_unicode
from twostroke.router.text import grammar


class FieldError(ValueError):
    """A fault that shows only with the whole request in sight."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def check_values(value: Any, param: str) -> None:
    """Check that a JSON value can be written as JSON again, for the libraries that it ends in.

    Python reads `NaN`, numbers beyond a double (`1e999`) and halves of surrogate pairs, none of which can be written.
    Raises RequestError naming the member; `param` is where the value is from.
    """
    if isinstance(value, str):
        if not is_unicode(value):
            raise RequestError(f"{param}: must be valid Unicode: it has a lone surrogate", param=param)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RequestError(f"{param}: must be a finite number, within the range of a double", param=param)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            check_values(member, f"{param}.{index}")
    elif isinstance(value, dict):
        for name, member in value.items():
            shown = name if is_unicode(name) else "(not Unicode)"
            check_values(name, f"{param}.{shown}")
            check_values(member, f"{param}.{shown[:64]}")


def _valid(text: str) -> str:
    """Text that can be UTF-8; of a bounded text pydantic itself sees to that."""
    if not is_unicode(text):
        raise ValueError("must be valid Unicode: it has a lone surrogate")
    return text


Text = Annotated[str, AfterValidator(_valid)]
ShortText = Annotated[str, Field(max_length=512)]


class StrictModel(BaseModel):
    """An object of a request: unknown members are kept, to be named."""

    takes_any: ClassVar[bool] = False  # no member is unknown

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=(), allow_inf_nan=False)


REUSE_S = 300.0
"""Seconds for which KV is wanted where a client says that it will send a prompt's beginning again, and not when."""

_RETENTION_S = {"in_memory": REUSE_S, "in-memory": REUSE_S, "24h": 86400.0}
_TTL_S = {"5m": 300.0, "1h": 3600.0}


class PromptCacheFields(BaseModel):
    """OpenAI's fields that tell how long a prompt's KV should be kept. They find no KV of another key or salt."""

    prompt_cache_key: ShortText | None = None  # which prompts share it is found by their tokens, whatever it says
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def keep_s(self) -> float:
        """Seconds for which the client wants the prompt's KV kept; 0: no wish."""
        asked = 0.0 if self.prompt_cache_retention is None else _RETENTION_S[self.prompt_cache_retention]
        return max(asked, REUSE_S if self.prompt_cache_key else 0.0)


class CacheControl(StrictModel):
    """Anthropic's `cache_control`: the prompt's beginning, up to where it stands, will be sent again."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


CacheMark = CacheControl | None


def longest_ttl(marks: Iterable[CacheControl | None]) -> float:
    """Return the longest of the times that these marks ask for, in seconds; 0 without any."""
    return max((_TTL_S[mark.ttl or "5m"] for mark in marks if mark is not None), default=0.0)


def shown(name: str) -> str:
    """A name from outside, safe to put into an answer and a log."""
    return "".join(char if char.isprintable() else "?" for char in name[:80])


_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
"""The names that the APIs have for a part of text."""


def only(
    known: Collection[str], way_out: str, *, default: str | None = None, beside: re.Pattern[str] | None = None
) -> Callable[[Any], Any]:
    """A validator of objects with a `type`: raises ValueError where it is none of `known`, nor matches `beside`.
    `default`: of those without.

    The error says what is not supported and `way_out`, where pydantic would tell of all that might have been meant.
    """
    texts = [name for name in known if name in _TEXT_PARTS]

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticKnownError("dict_type")
        kind = value.get("type", default)
        if not isinstance(kind, str):
            raise ValueError("must have a type, which is a string")
        if kind not in known and not (beside and beside.fullmatch(kind)):
            instead = f"text is of the type {' or '.join(texts)} here" if texts and kind in _TEXT_PARTS else way_out
            raise ValueError(f"the type {shown(kind)!r} is not supported: {instead}")
        return value

    return check


def type_tag(value: Any) -> str:
    """Return the tag of an object in a union that is told apart by `type`. It is no name that a member could have."""
    kind: str = value.get("type", "message") if isinstance(value, dict) else value.type
    return f"type {kind}"


_FORMS = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
"""Forms that a value may have, by pydantic's errors about another form."""


def explain(errors: Sequence[Mapping[str, Any]], body: Any) -> RequestError:
    """The refusal of a body that pydantic found these errors in: it names the first field at fault, where the client
    has it, and all forms that it may have."""
    field = errors[0]["loc"][:1]
    found = [(one, _path_in(body, one)) for one in errors if one["loc"][:1] == field]
    first, path = max(found, key=_how_far)
    param = ".".join(shown(str(part)) for part in path) or "body"
    forms = dict.fromkeys(form for one, place in found if place == path and (form := _form(one)))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        param, message = getattr(cause, "param", param), str(cause)
    elif first["type"] == "missing":
        message = "is required"
    elif _form(first):
        message = f"must be {' or '.join(forms)}"
    else:
        message = first["msg"][:1].lower() + first["msg"][1:]
    return refusal(param, message)


def _form(error: Mapping[str, Any]) -> str | None:
    """Return the form that was expected; None where the error is of another kind."""
    expected: str | None = error["ctx"]["expected"] if error["type"] == "literal_error" else _FORMS.get(error["type"])
    return expected


def _path_in(body: Any, error: Mapping[str, Any]) -> list[str | int]:
    """Return the path of an error in the body: pydantic's has the names of the types that it tried among the steps."""
    path, value, steps = list[str | int](), body, error["loc"]
    for number, step in enumerate(steps, 1):
        is_member = step in value if isinstance(value, dict) else isinstance(value, list) and isinstance(step, int)
        if is_member:
            value = value[step]
        if is_member or (number == len(steps) and error["type"] == "missing"):
            path.append(step)
    return path


def _how_far(found: tuple[Mapping[str, Any], list[str | int]]) -> tuple[bool, int, list[int], bool]:
    """Return the most helpful error of a field that may be of several types: that of the attempt that got furthest.

    Of two that got as far, our own says more than that the value is none of some words.
    """
    error, path = found
    numbers = [part for part in path if isinstance(part, int)]
    return not error["type"].endswith("_type"), len(path), numbers, error["type"] == "value_error"


def refusal(param: str, message: str) -> RequestError:
    """Return the error about one field."""
    return RequestError(f"{param}: {message}", param=param)


MAX_TOOLS = 128
MAX_CALLS = 128
"""Most calls of one message."""
MAX_TOOLS_BYTES = 256 * 1024
"""Most bytes of all tools, as JSON."""
MAX_VARIABLES = 64
"""Most variables in chat_template_kwargs."""
MAX_DOCUMENTS = 256

_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))

MAX_NAME = 128
"""Most characters of a function's name."""
FunctionName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_-]{{1,{MAX_NAME}}}$")]


class FunctionSpec(StrictModel):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it has none
    strict: bool | None = None


class Tool(StrictModel):
    """A tool: functions are the only ones."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionChoice(StrictModel):
    """The name of a function."""

    name: FunctionName


class NamedChoice(StrictModel):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(StrictModel):
    """`tool_choice.allowed_tools`: the tools, of those that are given, that may be called, or have to."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]

    @property
    def names(self) -> list[str]:
        """The names of these functions."""
        return [tool.function.name for tool in self.tools]


class AllowedChoice(StrictModel):
    """`tool_choice` of some functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledBefore(StrictModel):
    """The function of a call in the history."""

    name: FunctionName
    arguments: Text | None  # JSON, as the model wrote it; "" and null: none

    def as_call(self) -> "CallBefore":
        """The call of one that had none of its own around it."""
        return CallBefore(id=old_call_id(self.name), function=self)


class CallBefore(StrictModel):
    """A call in the history."""

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledBefore

    def as_template_sees(self) -> dict[str, Any]:
        """The call with its arguments as text: `ChatForms` gives them the form that the chat template shows."""
        function = {"name": self.function.name, "arguments": self.function.arguments or ""}
        return {"id": self.id, "type": self.type, "function": function}


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningChoice(StrictModel):
    """`reasoning`: how much the model is to think, and whether."""

    effort: Effort | None = None
    enabled: bool | None = None


_SWITCHES = ("enable_thinking", "thinking")
"""Names of one template variable: Qwen, GLM and Gemma have the first, DeepSeek and Kimi the second."""

Calls = Annotated[list[CallBefore], Field(fail_fast=True, max_length=MAX_CALLS)]
ChosenTools = Annotated[
    Annotated[NamedChoice, Tag("type function")] | Annotated[AllowedChoice, Tag("type allowed_tools")],
    Discriminator(type_tag),
    BeforeValidator(only(("function", "allowed_tools"), "name a function, or allowed_tools")),
]
ToolChoice = Literal["auto", "none", "required"] | ChosenTools


class ToolFields(StrictModel):
    """The fields of a chat about tools and reasoning."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    functions: Annotated[list[FunctionSpec], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None  # as it was
    function_call: Literal["auto", "none"] | FunctionChoice | None = None  # before there were tools
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningChoice | None = None  # SGLang's
    include_reasoning: bool | None = None  # vLLM's
    thinking_token_budget: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # vLLM's
    chat_template_kwargs: Annotated[dict[ShortText, Any], Field(max_length=MAX_VARIABLES)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools, and functions as tools."""
        return self.tools or [Tool(type="function", function=one) for one in self.functions or ()]

    @property
    def choice(self) -> ToolChoice | None:
        """The tool to call."""
        if isinstance(self.function_call, FunctionChoice):
            return NamedChoice(type="function", function=self.function_call)
        return self.tool_choice or self.function_call

    @property
    def is_parallel(self) -> bool:
        """Return whether there may be several calls. A named function is called once, as at OpenAI: small models would
        call it up to their limit."""
        return self.parallel_tool_calls is not False and not self.functions and not isinstance(self.choice, NamedChoice)

    @property
    def allowed_tools(self) -> list[Tool]:
        """The tools that the model sees and may call."""
        if isinstance(self.choice, AllowedChoice):
            names = self.choice.allowed_tools.names
            return [tool for tool in self.offered_tools if tool.function.name in names]
        return [] if self.choice == "none" else self.offered_tools

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which one must be called; none where the model may choose."""
        if isinstance(self.choice, NamedChoice):
            name = self.choice.function.name
            return [tool for tool in self.offered_tools if tool.function.name == name]
        is_required = isinstance(self.choice, AllowedChoice) and self.choice.allowed_tools.mode == "required"
        return self.allowed_tools if is_required or self.choice == "required" else []

    def path_of(self, tool: Tool) -> str:
        """Return the path at which the client has the function of one of `offered_tools`."""
        index = self.offered_tools.index(tool)
        return f"tools.{index}.function" if self.tools else f"functions.{index}"

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the arguments of the chat template beside messages and tools."""
        said: dict[str, Any] = {}
        effort, asked = self.reasoning_effort, self.reasoning or ReasoningChoice()
        effort = asked.effort if effort is None else effort
        if effort is not None:
            said["reasoning_effort"] = effort
        if effort == "none" or asked.enabled is not None:
            said["enable_thinking"] = effort != "none" and asked.enabled is not False
        said |= self.chat_template_kwargs or {}
        for name, other in (_SWITCHES, _SWITCHES[::-1]):
            if name in said:
                said.setdefault(other, said[name])
        return said

    @model_validator(mode="after")
    def _tools_agree(self) -> "ToolFields":
        if self.tools and self.functions:
            raise FieldError("functions", "is the old name of tools: not beside them")
        if self.tools and self.function_call not in (None, "auto"):
            raise FieldError("function_call", "is for functions: tools have tool_choice")
        if self.functions and self.tool_choice not in (None, "auto"):
            raise FieldError("tool_choice", "is for tools: functions have function_call")
        names: Mapping[str, int] = {}
        kind = "functions" if self.functions else "tools"
        for i, tool in enumerate(self.offered_tools):
            name = tool.function.name
            if name in names:
                path = f"functions.{i}.name" if self.functions else f"tools.{i}.function.name"
                raise FieldError(path, f"is the name of {kind}.{names[name]}, too")
            names = {**names, name: i}
        if names and _json_bytes([tool.model_dump() for tool in self.offered_tools]) > MAX_TOOLS_BYTES:
            raise FieldError(kind, f"has more than {MAX_TOOLS_BYTES} bytes")
        if isinstance(self.choice, NamedChoice) and self.choice.function.name not in names:
            path = "tool_choice.function.name" if self.function_call is None else "function_call.name"
            raise FieldError(path, f"is not the name of one of the {kind}")
        if isinstance(self.choice, AllowedChoice):
            for i, name in enumerate(self.choice.allowed_tools.names):
                if name not in names:
                    path = f"tool_choice.allowed_tools.tools.{i}.function.name"
                    raise FieldError(path, "is not the name of one of the tools")
        if self.tool_choice == "required" and not self.tools:
            raise FieldError("tool_choice", "needs tools")
        reserved = _RESERVED.intersection(self.chat_template_kwargs or ())
        if reserved:
            raise FieldError("chat_template_kwargs", f"can't have {min(reserved)}: it has a field of its own")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("add_generation_prompt", "must be false with continue_final_message")
        return self


def old_call_id(name: str) -> str:
    """The id of a function's call in the history, where calls have none: the same for call and result, as they are told
    by the name alone. Nine letters and digits: Mistral's templates take no others."""
    return hashlib.sha256(name.encode()).hexdigest()[:9]


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


MAX_ALTERNATIVES = 1024
"""Most alternatives of a choice."""
MAX_NESTING = 64
"""Deepest nesting of a schema."""

Schema = dict[str, Any]
_Source = Annotated[str, Field(max_length=grammar.MAX_SOURCE_BYTES)]  # an empty one asks for nothing
_JsonSchema = Schema | bool | _Source
_Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]],
    Field(fail_fast=True, min_length=1, max_length=MAX_ALTERNATIVES),
]


class JsonSchemaFormat(StrictModel):
    """`response_format.json_schema`."""

    name: Annotated[str, Field(max_length=512)] | None = None
    description: str | None = None
    schema_: Annotated[Schema | bool | None, Field(alias="schema")] = None  # None: any object
    strict: bool | None = None  # what an answer can't be held to is refused; else it is left out


class ResponseFormat(StrictModel):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Schema | bool | None, Field(alias="schema")] = None  # of json_object, as other servers take it


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`."""

    json_: Annotated[_JsonSchema | None, Field(alias="json")] = None
    regex: _Source | None = None
    choice: _Choices | None = None
    grammar: _Source | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class StructuredFields(StrictModel):
    """The fields of completions and chat that say what an answer is to look like; at most one of them may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _JsonSchema | None = None  # vLLM's, before they were one
    guided_regex: _Source | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Source | None = None
    json_schema: _JsonSchema | None = None  # SGLang's and llama.cpp's
    regex: _Source | None = None
    ebnf: _Source | None = None
    grammar: _Source | None = None


_Kind = Literal["json", "regex", "choice", "grammar"]
_FIELDS: dict[str, _Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
ANY_OBJECT: Schema = {"type": "object"}


async def grammar_of(body: StructuredFields, checks: grammar.GrammarChecks) -> str:
    """The grammar of what is asked for; empty where nothing is.

    Raises RequestError naming the field, and where it is a schema the place in it, for what can't be.
    """
    wanted = list(_wanted(body))
    if not wanted:
        return ""
    if len(wanted) > 1:
        raise RequestError(f"{wanted[1][0]}: {wanted[0][0]} is given already: one of them", param=wanted[1][0])
    ((param, kind, value),) = wanted
    if kind == "json":
        strict = body.response_format is None or bool(
            body.response_format.json_schema and body.response_format.json_schema.strict
        )
        compact = body.structured_outputs is not None and bool(body.structured_outputs.disable_any_whitespace)
        schema = await checks.schema(_schema(value, param), param, lenient=not strict, compact=compact)
        return await checks.check(grammar.of_schema(schema, lenient=not strict, compact=compact), param)
    if kind == "regex":
        made = grammar.of_regex(value)
    elif kind == "choice":
        made = grammar.of_choices(value)
    else:
        try:
            made = await asyncio.to_thread(grammar.of_text, value)
        except RequestError as error:
            raise grammar.named(error, param) from error
    return await checks.check(made, param)


def _wanted(body: StructuredFields) -> Iterator[tuple[str, _Kind, Any]]:
    """(field, kind, value) of all that are given."""
    form = body.response_format
    if form is not None and form.type == "json_object":
        yield "response_format.schema", "json", ANY_OBJECT if form.schema_ is None else form.schema_
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise RequestError("response_format.json_schema: is required", param="response_format.json_schema")
        schema = form.json_schema.schema_
        yield "response_format.json_schema.schema", "json", ANY_OBJECT if schema is None else schema
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.json_object:
            yield "structured_outputs.json_object", "json", ANY_OBJECT
        values: dict[_Kind, Any] = {
            "json": outputs.json_,
            "regex": outputs.regex,
            "choice": outputs.choice,
            "grammar": outputs.grammar,
        }
        for kind, value in values.items():
            if _is_given(value):
                yield f"structured_outputs.{kind}", kind, value
    for name, kind in _FIELDS.items():
        if _is_given(value := getattr(body, name)):
            yield name, kind, value


def _is_given(value: Any) -> bool:
    return value is not None and value != ""


def _schema(value: Schema | bool | str, param: str) -> Schema:
    """The schema that is meant. Raises RequestError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param}: is no JSON: {error}", param=param) from error
        if _is_deeper(value, MAX_NESTING):
            raise _too_deep(param)
        check_values(value, param)
    if isinstance(value, bool):
        return {} if value else {"enum": []}
    if not isinstance(value, dict):
        raise RequestError(f"{param}: a schema is an object, true or false", param=param)
    if _is_deeper(value, MAX_NESTING):
        raise _too_deep(param)
    size = len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace"))
    if size > grammar.MAX_SOURCE_BYTES:
        raise RequestError(f"{param}: takes {size} bytes: at most {grammar.MAX_SOURCE_BYTES} are taken", param=param)
    return value


def _too_deep(param: str) -> RequestError:
    return RequestError(f"{param}: a schema may be nested {MAX_NESTING} levels deep", param=param)


def _is_deeper(value: Any, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return most == 0 or any(_is_deeper(one, most - 1) for one in (value.values() if isinstance(value, dict) else value))
