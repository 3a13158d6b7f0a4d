"""From a request's fields to what the model is asked: every refusal names the field at fault as the client wrote it."""

import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from twostroke.protocol.errors import RequestError
from twostroke.router.openai.schemas import LACKING, MAX_CHOICES, WITHOUT_EFFECT, CompletionRequest, FieldError, valid

_log = logging.getLogger(__name__)

MAX_NAMED = 256
"""Unknown fields that are named in the log, each once: clients could think of any number."""

Prompt = str | list[int]


def explain(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The refusal of a body that pydantic found these errors in: it names the first field at fault."""
    # Of a field that may be of several types, the attempt that got furthest has the message that helps.
    field = errors[0]["loc"][:1]
    first = max((one for one in errors if one["loc"][:1] == field), key=lambda one: len(one["loc"]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return _refusal(cause.param, str(cause))
    # Unions add the tried type's name to the path: not a part of what the client sent.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or part.replace("_", "").isalnum()]
    param = shown(".".join(path[:4])) or "body"
    if first["type"] == "missing":
        return _refusal(param, "is required")
    if isinstance(cause, ValueError):
        return _refusal(param, str(cause))
    message = first["msg"]
    return _refusal(param, message[:1].lower() + message[1:])


class UnknownFields:
    """What becomes of fields that nobody here knows: each is named once in the log, or, where `strict`, refused."""

    def __init__(self, *, strict: bool):
        self._strict = strict
        self._named: set[str] = set()

    def check(self, asked: BaseModel) -> None:
        """Raises RequestError where there are any, and none are taken."""
        for path, known in _unknown(asked, ()):
            if self._strict:
                name = str(path[-1])
                near = difflib.get_close_matches(name, known, n=1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise _refusal(shown(".".join(map(str, path))), f"is not a known field{hint}")
            self._name(".".join(part for part in path if isinstance(part, str)))

    def _name(self, field: str) -> None:
        """A name that is no word may be a part of a prompt by mistake: it is not told."""
        field = field if re.fullmatch(r"[\w.-]{1,128}", field, re.ASCII) else "(not a word)"
        if field not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(field)
            _log.warning("requests have the field %s, which is not known here: it is ignored", field)


def prompts_of(asked: CompletionRequest, max_context: int) -> Sequence[Prompt]:
    """The `prompt` field, always as a list of prompts, texts or token ids. Raises RequestError naming the field."""
    prompts = _prompts(asked.prompt, max_context)
    if len(prompts) * (asked.n or 1) > MAX_CHOICES:
        raise _refusal("n", f"at most {MAX_CHOICES} choices, over all prompts")
    return prompts


def token_ids_of(value: Any, param: str, max_context: int) -> list[int]:
    """A non-empty list of token ids, `max_context` at most; whether the vocabulary has them is checked elsewhere."""
    if not isinstance(value, list) or not value:
        raise _refusal(param, "must be a non-empty list of token ids")
    if len(value) > max_context:
        raise too_long(param, str(len(value)), max_context)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**31:
        raise _refusal(param, "token ids must be non-negative integers")
    return value


def too_long(param: str, has: str, max_context: int) -> RequestError:
    """The refusal of a prompt that the model's context can't take."""
    return RequestError(
        f"{param}: the model's context is {max_context} tokens, output included; the prompt has {has}",
        param=param,
        code="context_length_exceeded",
    )


def shown(name: str) -> str:
    """A name from outside, safe to put into an answer and a log."""
    return "".join(char if char.isprintable() else "?" for char in name[:80])


def _prompts(value: Any, max_context: int) -> Sequence[Prompt]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise _refusal("prompt", "must be a string, a list of strings, or token ids")
    if not value:
        raise _refusal("prompt", "must not be empty")
    if not isinstance(value[0], str | list):
        return [token_ids_of(value, "prompt", max_context)]
    if len(value) > MAX_CHOICES:
        raise _refusal("prompt", f"must be at most {MAX_CHOICES} prompts, is {len(value)}")
    if isinstance(value[0], list):
        return [token_ids_of(one, "prompt", max_context) for one in value]
    for one in value:
        if not isinstance(one, str):
            raise _refusal("prompt", "a list must be all strings or all token ids")
        if not one:
            raise _refusal("prompt", "must not be empty")
        try:
            valid(one)
        except ValueError as error:
            raise _refusal("prompt", str(error)) from None
    return value


def _unknown(asked: BaseModel, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Sequence[str]]]:
    """The paths of unknown fields, each with the names that its object may have."""
    for name, value in asked:
        if name not in type(asked).model_fields:
            if path or (name not in LACKING and name not in WITHOUT_EFFECT):
                yield (*path, name), [*type(asked).model_fields]
        elif isinstance(value, BaseModel):
            yield from _unknown(value, (*path, name))
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if not isinstance(one, BaseModel):  # lists of ids are long
                    break
                yield from _unknown(one, (*path, name, i))


def _refusal(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param)
