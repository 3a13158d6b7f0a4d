"""A model's chat template: jinja2, sandboxed and immutable, because model folders come from anywhere."""

import datetime
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.protocol.errors import ConfigError, RequestError

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
            raise RequestError("the rendered chat is too long", param="messages", code="context_length_exceeded")
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
