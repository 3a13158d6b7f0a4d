"""Base model and checks that the models of requests share."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

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


def _cache_control(value: Any) -> Any:
    """Check by hand, because pydantic's error would lie deeper than errors name fields."""
    if value is not None and not (
        isinstance(value, dict) and value.get("type") == "ephemeral" and value.get("ttl") in (None, *_TTL_S)
    ):
        raise ValueError('cache_control must be {"type": "ephemeral"}, with a ttl of 5m or 1h or none')
    return value


CacheMark = Annotated[CacheControl | None, BeforeValidator(_cache_control)]


def longest_ttl(marks: Iterable[CacheControl | None]) -> float:
    """Return the longest of the times that these marks ask for, in seconds; 0 without any."""
    return max((_TTL_S[mark.ttl or "5m"] for mark in marks if mark is not None), default=0.0)
