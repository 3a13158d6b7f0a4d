"""A model's chat template, and conversations in the form that it shows.

Templates are rendered by jinja2, sandboxed and immutable, because model folders come from anywhere. They differ in what
they take: arguments as an object or as text, calls beside a null or an empty content, the roles, and a place for tools.
They drop or refuse the rest. `ChatForms` renders small conversations once, looks for their words in the prompt, and
puts the rest where the template shows it.
"""

import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.protocol.errors import ConfigError, RequestError
from twostroke.router.text.output_format import CallSyntax

MAX_RENDERED_CHARS = 16 * 1024 * 1024


class _Generation(Extension):
    """`{% generation %}`, which some templates have for training: renders its body as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Any) -> str:
        return str(caller())


class ChatTemplate:
    """Renders messages to a prompt, as Hugging Face's `apply_chat_template` does."""

    def __init__(self, source: str, *, origin: str, special_tokens: Mapping[str, str]):
        """`special_tokens` are the template's variables such as `bos_token`. Raises ConfigError naming `origin`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{origin}: chat_template is broken: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt. `variables` are the template's own. Raises RequestError for messages that it does not take."""
        try:
            text = self._template.render(
                {
                    **variables,
                    **self._special_tokens,
                    "messages": messages,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template is a program: whatever it raises over these messages is about them.
        except Exception as error:
            reason = str(error)[:200]
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from error
        if len(text) > MAX_RENDERED_CHARS:
            raise RequestError(
                f"prompt is too long: the chat template makes over {MAX_RENDERED_CHARS} characters of these messages",
                param="messages",
                code="context_length_exceeded",
            )
        return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


_NAME, _KEY, _VALUE = "zqfunction", "zqkey", "zqvalue"
_ASK, _SAID, _RESULT, _RULE, _OTHER_RULE = "zqask", "zqsaid", "zqresult", "zqrule", "zqother"
_CALL_ID = "zqcallid1"
"""Call id of nine letters and digits: Mistral's templates take no others."""
_USER = {"role": "user", "content": _ASK}
_CUT_OFF = f'{{"{_KEY}": "{_VALUE}'

Message = Mapping[str, Any]


@dataclass(frozen=True)
class CallForm:
    """The form in which a template takes the calls of earlier turns."""

    has_text_arguments: bool  # else they are an object
    has_null_content: bool  # content is null where the message says nothing; else it is empty
    is_apart: bool  # text beside calls is a message of its own
    is_single: bool = False  # each call is a message of its own


class ChatForms:
    """Puts conversations into the form that one template shows."""

    def __init__(self, template: ChatTemplate, call: CallSyntax, *, is_own: bool):
        """`call`: how calls are written where the template does not write them. `is_own`: it is the model's own way."""
        self._template = template
        self._call = call
        self._is_own = is_own
        self._takes: dict[tuple[str, str], bool] = {}  # two rules one after the other, by their roles

    def settled(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[list[Message], Sequence[Message] | None]:
        """The conversation and the tools as the template is to be given them."""
        history = self._with_ids(self._with_roles(messages))
        describes = bool(tools) and not (self._is_own and self.shows_tools)
        if any(message.get("tool_calls") for message in history):
            is_text = self.call_form is None or (describes and not self._is_own)
            history = [
                one for message in history for one in (self._as_text(message) if is_text else self._called(message))
            ]
        if any(message["role"] == "tool" for message in history) and not self.shows_results:
            history = _with_results_of_users(history)
        if tools and describes:
            history = self._with_rule(history, self._description(tools))
            return history, None
        return history, tools

    def probe(self) -> None:
        """Find out now what is needed of chats with tools."""
        _ = self.call_form, self.takes_cut_arguments, self.shows_tools, self.shows_results, self._developer

    @cached_property
    def call_form(self) -> CallForm | None:
        """The form in which calls of earlier turns are shown; None where they are not."""
        for is_null, is_text in itertools.product((False, True), (False, True)):
            form = CallForm(is_text, is_null, is_apart=False)
            shown = self._shows_call(form, says="")
            if not shown:
                continue
            apart = replace(form, is_apart=True)
            if not self._shows_call(form, says=_SAID) and self._shows_call(apart, says=_SAID) >= shown:
                form = apart  # unless turns have to alternate
            single = replace(form, is_single=True)
            return single if not self._shows_two(form) and self._shows_two(single) else form
        return None

    @cached_property
    def takes_cut_arguments(self) -> bool:
        """True where arguments that are no JSON are shown as they were written."""
        form = self.call_form
        if form is None:
            return True
        calls = {"role": "assistant", "content": None if form.has_null_content else "", "tool_calls": [_call(_CUT_OFF)]}
        return any(_CUT_OFF in text for text in map(self._rendered, _around(calls)))

    @cached_property
    def shows_tools(self) -> bool:
        """True where the template has a place for tools."""
        parameters = {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": _SAID}},
            "required": [_KEY],
        }
        function = {"name": _NAME, "description": _VALUE, "parameters": parameters}
        text = self._rendered([_USER], tools=[{"type": "function", "function": function}])
        return not text or _NAME in text  # a template that refuses says itself why

    @cached_property
    def shows_results(self) -> bool:
        """True where messages of tools are shown."""
        turn = [_of("assistant", _SAID)]
        if self.call_form is not None:
            turn = self._called({"role": "assistant", "content": "", "tool_calls": [_call(f'{{"{_KEY}": 1}}')]})
        return any(_RESULT in text for text in map(self._rendered, _around(*turn)))

    @cached_property
    def _developer(self) -> str:
        """The role that developers' messages have here."""
        is_known = "developer" in self._template.source  # else it is shown as any role is, beside a system prompt
        return "developer" if is_known and self._shows(_of("developer", _RULE), _USER) else "system"

    @cached_property
    def _shows_rules(self) -> bool:
        """True where system messages are shown, or refused with a reason."""
        text = self._rendered([_of("system", _RULE), _USER])
        return not text or _RULE in text

    @cached_property
    def _takes_rules(self) -> bool:
        return self._shows(_of("system", _RULE), _USER)

    def _takes_two(self, first: str, second: str) -> bool:
        """True where two rules of these roles are shown one after the other."""
        if (first, second) not in self._takes:
            shown = self._shows(_of(first, _RULE), _of(second, _OTHER_RULE), _USER)
            self._takes[first, second] = shown
        return self._takes[first, second]

    def _takes_later(self, role: str) -> bool:
        """True where a rule of this role is shown behind other messages."""
        if ("", role) not in self._takes:
            self._takes["", role] = self._shows(_USER, _of("assistant", _SAID), _of(role, _RULE), _USER)
        return self._takes["", role]

    def _with_roles(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with what developers and the system say where the template shows it."""
        rules = [i for i, one in enumerate(messages) if one["role"] in ("system", "developer")]
        if not rules:
            return [*messages]
        history: list[Message] = [
            {**one, "role": self._developer} if one["role"] == "developer" else one for one in messages
        ]
        is_one = len(rules) == 1 and rules[0] == 0
        roles = [history[i]["role"] for i in rules]
        num_first = next((n for n, i in enumerate(rules) if n != i), len(rules))
        if not is_one and not (
            all(self._takes_two(one, other) for one, other in itertools.pairwise(roles[:num_first]))
            and all(self._takes_later(role) for role in {*roles[num_first:]})
        ):
            text = "\n\n".join(history[i]["content"] for i in rules if history[i]["content"])
            history = [
                {**history[rules[0]], "content": text},
                *(one for i, one in enumerate(history) if i not in rules),
            ]
        if self._shows_rules or history[0]["role"] != "system":
            return history
        return _before_first_user(history[1:], history[0]["content"])

    def _with_ids(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with ids of calls that tell functions, in a format whose templates show ids alone."""
        if not self._call.id:
            return [*messages]
        ids: dict[str, str] = {}  # by those of the client
        numbers = itertools.count()

        def called(call: Message) -> Message:
            named = self._call.id.replace("{name}", call["function"]["name"])
            ids[call["id"]] = named.replace("{index}", str(next(numbers)))
            return {**call, "id": ids[call["id"]]}

        history: list[Message] = []
        for message in messages:
            if message.get("tool_calls"):
                message = {**message, "tool_calls": [called(call) for call in message["tool_calls"]]}
            elif message["role"] == "tool":
                message = {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
            history.append(message)
        return history

    def _with_rule(self, messages: list[Message], text: str) -> list[Message]:
        """The messages and one more rule."""
        if messages and messages[0]["role"] in ("system", "developer"):
            said = messages[0]["content"]
            return [{**messages[0], "content": f"{said}\n\n{text}" if said else text}, *messages[1:]]
        if self._takes_rules:
            return [_of("system", text), *messages]
        return _before_first_user(messages, text)

    def _description(self, tools: Sequence[Message]) -> str:
        """Describe the tools, for templates that say nothing of them."""
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = self._written([("NAME", {"PARAMETER": "VALUE"})])
        return (
            f"You may call functions. Each line has one of them, as JSON:\n<tools>\n{functions}\n</tools>\n\n"
            f"To call a function, write its name and its arguments, in this way:\n{example}\n"
            "What it returns is told you in the next message. Without a call, just answer."
        )

    def _written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls as they are written in an answer."""
        how = self._call

        def one(index: int, name: str, arguments: Mapping[str, Any]) -> str:
            if how.argument is not None:
                body = how.argument.between.join(how.argument.written(*argument) for argument in arguments.items())
            else:
                body = _bare(arguments, how.quote) if how.quote else _json(arguments)
            return how.begin.replace("{name}", name).replace("{index}", str(index)) + body + how.end

        between = how.between if how.last else how.between + how.trigger
        return how.trigger + how.first + between.join(one(i, *call) for i, call in enumerate(calls)) + how.last

    def _as_text(self, message: Message) -> list[Message]:
        """A message with its calls as a part of its text."""
        calls = message.get("tool_calls")
        if not calls:
            return [message]
        functions = [one["function"] for one in calls]
        written = self._written([(one["name"], _object(one["arguments"]) or {}) for one in functions])
        content = f"{message['content']}\n{written}" if message["content"] else written
        return [{**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}]

    def _called(self, message: Message, form: CallForm | None = None) -> list[Message]:
        """A message with its calls in the form that is shown."""
        form = form or self.call_form
        if form is None or not message.get("tool_calls"):
            return [message]
        calls = [self._arguments(one, form) for one in message["tool_calls"]]
        turns = [[one] for one in calls] if form.is_single else [calls]
        said = message["content"]
        first: list[Message] = []
        if said and form.is_apart:
            first = [{name: value for name, value in message.items() if name != "tool_calls"}]
        else:
            first = [{**message, "content": said or _nothing(form), "tool_calls": turns.pop(0)}]
        return first + [{"role": "assistant", "content": _nothing(form), "tool_calls": one} for one in turns]

    def _arguments(self, call: Message, form: CallForm) -> Message:
        """The call with its arguments in the form that is shown. What was cut off is no object, and `{}` where it can't
        stand as it is."""
        written = call["function"]["arguments"].strip()
        value = _object(written)
        if value is None:
            is_kept = bool(written) and self.takes_cut_arguments
            arguments: Any = written if is_kept else "{}" if form.has_text_arguments else {}
        else:
            arguments = written if form.has_text_arguments else value
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _shows_call(self, form: CallForm, *, says: str) -> set[int]:
        """The conversations of `_around` in which a call is shown as calls are written, and what is said beside it."""
        arguments = {_KEY: _VALUE}
        calls: Message = {
            "role": "assistant",
            "content": says or _nothing(form),
            "tool_calls": [_call(json.dumps(arguments) if form.has_text_arguments else arguments)],
        }
        turn = [calls]
        if says and form.is_apart:
            turn = [_of("assistant", says), {**calls, "content": _nothing(form)}]
        words = [_NAME, _KEY, _VALUE, says]
        # Text that was made JSON, and objects that were made text, are shown, but not as calls are written.
        wrong = (f'\\"{_KEY}', f"'{_KEY}'")
        return {
            i
            for i, text in enumerate(map(self._rendered, _around(*turn)))
            if all(word in text for word in words)
            and not any(one in text for one in wrong)
            and text.count("None") <= self._num_nones  # else null is shown as a word
        }

    def _shows_two(self, form: CallForm) -> bool:
        """True where two calls of one message are shown."""
        calls = [_call(f'{{"{_KEY}": "{word}"}}') for word in (_VALUE, _SAID)]
        turn = self._called({"role": "assistant", "content": "", "tool_calls": calls}, form)
        return any(_VALUE in text and _SAID in text for text in map(self._rendered, _around(*turn)))

    @cached_property
    def _num_nones(self) -> int:
        return self._rendered([_USER]).count("None")

    def _shows(self, *messages: Message) -> bool:
        text = self._rendered(messages)
        return all(one["content"] in text for one in messages)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        """The prompt; empty where the template refuses."""
        try:
            return self._template.render(self._with_ids(messages), tools=tools)
        except RequestError:
            return ""


def _of(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _call(arguments: Any) -> Message:
    return {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _result() -> Message:
    return {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _RESULT}


def _object(written: str) -> dict[str, Any] | None:
    """The object that a text is in JSON; None: it is none, or a prompt can't show it.

    Python reads numbers beyond a double (`1e999`) and halves of surrogate pairs, and neither can be written again.
    """
    try:
        value = json.loads(written)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: Any, quote: str) -> str:
    """A value in the form that `BareObject` describes."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_bare(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(one, quote) for one in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else _json(value)


def _around(*turn: Message) -> list[list[Message]]:
    """Conversations that have this turn: templates differ in what may follow it."""
    called = [_USER, *turn, _result()]
    return [called, [*called, _of("assistant", "zqthen"), _USER], [*called, _USER], [_USER, *turn, _USER]]


def _nothing(form: CallForm) -> str | None:
    return None if form.has_null_content else ""


def _before_first_user(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with a text before the first of the user's."""
    first = next((i for i, one in enumerate(messages) if one["role"] == "user"), None)
    if first is None:
        return [_of("user", text), *messages]
    said = messages[first]["content"]
    return [
        *messages[:first],
        {**messages[first], "content": f"{text}\n\n{said}" if said else text},
        *messages[first + 1 :],
    ]


def _with_results_of_users(messages: Sequence[Message]) -> list[Message]:
    """The messages with those of tools as the user's, joined with what the user says next: turns must alternate."""
    history: list[Message] = []
    is_result = False
    for message in messages:
        if message["role"] == "tool":
            message = _of("user", f"<tool_response>\n{message['content']}\n</tool_response>")
            is_next, joins = True, is_result
        else:
            is_next, joins = False, is_result and message["role"] == "user"
        if joins:
            history[-1] = {**history[-1], "content": f"{history[-1]['content']}\n{message['content']}"}
        else:
            history.append(message)
        is_result = is_next
    return history
