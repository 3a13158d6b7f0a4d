"""Base model and checks that the models of requests share, and the refusals of what they find wrong."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticKnownError

from twostroke.protocol.errors import RequestError
from twostroke.router.text.written_calls import is_unicode


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
