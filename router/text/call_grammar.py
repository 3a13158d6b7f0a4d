"""Grammars of whole answers: calls that must be made, arguments that must be valid, and thinking that goes before.

Control tokens are named by their ids: llguidance lets no text stand for them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.router.text.grammar import WHITE_SPACE, of_lark
from twostroke.router.text.output_format import ArgumentSyntax, CallSyntax, ThinkingSyntax
from twostroke.router.text.response_parser import with_types

_TEXT = r"/(.|\n)*/"
_NOTHING = '""'


@dataclass(frozen=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool


class AnswerGrammar:
    """Writes the grammars of one model's answers."""

    def __init__(self, controls: Mapping[str, int]):
        """`controls`: the tokens that are not text, with their ids."""
        self._controls = controls
        longest_first = sorted(controls, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if controls else None

    def of_calls(self, how: CallSyntax, functions: Sequence[Function], *, is_parallel: bool) -> str:
        """The rules of `calls`: one call, or where `is_parallel` one or more."""
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
        for i, one in enumerate(functions):
            begin = self._literal(how.begin.replace("{name}", one.name))
            if how.argument is None:
                arguments = _json(one.parameters or {"type": "object"}, one)
            else:
                arguments = f"arguments_{i}"
                rules += self._arguments(arguments, how.argument, one)
            rules.append(f"call_{i}: {begin} {arguments} {self._literal(how.end)}")
        trigger, between = self._literal(how.trigger), self._literal(how.between)
        more = f"({between} {'' if how.last else trigger} call)*" if is_parallel and not how.is_single else ""
        rules.append(f"calls: {trigger} {self._literal(how.first)} call {more} {self._literal(how.last)}")
        return "\n".join(rules)

    def _arguments(self, rule: str, how: ArgumentSyntax, function: Function) -> list[str]:
        """The rules of arguments that stand one by one, in the schema's order; any, where it names none.

        Texts are held to `enum` and `const` alone.
        """
        schema, end = function.parameters, self._literal(how.end)
        if any(how.end.startswith(token) for token in self._controls):
            rules = [f"{rule}_text: {rule}_any {end}", f"{rule}_any: {_TEXT}"]
        else:
            rules = [f"{rule}_text[lazy]: {_TEXT} {end}"]
        if "properties" not in schema:
            before, after = map(self._literal, how.begin.split("{key}"))
            return [f"{rule}: ({before} /[^<>\\n]+/ {after} {rule}_text)*", *rules]
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = []
        required = schema.get("required", ())
        properties = with_types(schema)["properties"]
        for key, part in {**properties, **{name: {} for name in required if name not in properties}}.items():
            said = part if isinstance(part, dict) else {}
            choices = [said["const"]] if "const" in said else said.get("enum")
            if choices:
                texts = (choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
                value = f"({' | '.join(self._literal(text) or _NOTHING for text in texts)}) {end}"
            elif not said or _may_be_text(said):
                value = f"{rule}_text"
            else:
                value = f"{_json({**said, **shared}, function)} {end}"
            argument = f"{self._literal(how.begin.replace('{key}', key))} {value}"
            parts.append(argument if key in required else f"({argument})?")
        return [f"{rule}: {' '.join(parts) or _NOTHING}", *rules]

    def marks_calls(self, how: CallSyntax) -> bool:
        """Whether calls begin with a token that nothing else begins with, so that they are told from text."""
        return how.trigger in self._controls

    def ends_thoughts(self, how: ThinkingSyntax) -> bool:
        """Whether thoughts end with a token of its own, so that they can be cut off by their number of tokens."""
        return any(how.end.startswith(token) for token in self._controls)

    def of_answer(
        self, how: ThinkingSyntax | None, rest: str, *, is_open: bool, most_tokens: int | None, answer: str = ""
    ) -> str:
        """A grammar: thoughts, `most_tokens` at most, then `rest`, which are rules with the name `rest`.

        `is_open`: the prompt has begun them; without `how` there are none. `answer`: the grammar that `rest` calls
        @answer.
        """
        lark = f"start: rest\n{rest}"
        if how is not None:
            end, is_token = self._literal(how.end), self.ends_thoughts(how)
            limit = "" if most_tokens is None else f"[max_tokens={most_tokens}]"
            rule = f"thoughts{limit}: {_TEXT}" if is_token else f"thoughts[lazy]: {_TEXT} {end}"
            inside = f"thoughts {end}" if is_token else "thoughts"
            thoughts = inside if is_open else f"({self._literal(how.begin)} {inside})?"
            lark = f"start: {thoughts} rest\n{rule}\n{rest}"
        if not answer:
            return of_lark(lark)
        first, *others = json.loads(answer)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]})

    def _literal(self, text: str) -> str:
        """This text as a sequence of Lark."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(
            f"<[{self._controls[part]}]>" if part in self._controls else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    @property
    def anything(self) -> str:
        """The rule of `rest` that takes whatever a model writes."""
        return f"rest: free\n{self._free()}"

    def until_calls(self, how: CallSyntax) -> str:
        """The rule of `rest` that takes text, and behind it `calls`, or none; of calls that it `marks_calls` of."""
        return f"rest: free calls?\n{self._free(how.trigger)}"

    def _free(self, without: str = "") -> str:
        """The rule `free`: text, and control tokens but that one."""
        tokens = "".join(f" | <[{token_id}]>" for token, token_id in self._controls.items() if token != without)
        return f"free: (TEXT{tokens})*\nTEXT: /(.|\\n)+/"


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", [])
    unions = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return "string" in ([types] if isinstance(types, str) else types) or any(
        _may_be_text(choice) for choice in unions if isinstance(choice, dict)
    )


def _json(schema: Mapping[str, Any], function: Function) -> str:
    """JSON that the schema takes, in Lark."""
    options = {"lenient": not function.is_strict, "whitespace_pattern": WHITE_SPACE}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"
