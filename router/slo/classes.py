"""SLO classes: what is promised to whom. The promises themselves are kept by admission, queues and schedulers.

`promise_of` tells what a request is promised: its class, by header, `service_tier`, API key or default, and what else
it asks for.
"""

from collections.abc import Mapping
from typing import Annotated

from annotated_types import Ge, Le, Lt
from pydantic import Field, PositiveFloat, field_validator, model_validator

from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import Promise
from twostroke.protocol.settings import Interval, Section

STANDARD = "standard"
MOST_PRIORITY = 1000


class SLOClass(Section):
    """One class of requests."""

    name: str
    """Letters, digits, `-` and `_`; what requests name in `service_tier` or `x-slo-class`."""
    ttft_s: PositiveFloat | None = None
    """Promised time to first token; null: nothing is promised, so nothing is refused for being late."""
    tpot_s: PositiveFloat | None = None
    """Mean time between tokens after the first; the tightest that runs limits a decode worker's batch."""
    priority: Annotated[int, Ge(-MOST_PRIORITY), Le(MOST_PRIORITY)] = 0
    """A class with a higher one goes first, gives way last, and is shed last."""
    share: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the workers' tokens that the class gets even where higher classes want all of them; 0: it may get
    nothing then. All together 1 at most."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r} must be letters, digits, - and _")
        return name


class SLOConfig(Section):
    """SLO classes and admission (docs/slo-classes.md).

    Without classes there is one, `standard`, that promises nothing.
    """

    classes: tuple[SLOClass, ...] = Field(default=(SLOClass(name=STANDARD),), strict=False)
    """The SLO classes."""
    default: str | None = None
    """The class of requests that name none, and whose API key has none; null: the first."""
    admission: bool = True
    """Refuse what would be late (429); `false`: serve it late. Queues keep their order either way."""
    max_queue_s: Interval = 600.0
    """Work before a request that is promised nothing; a longer queue refuses it. As long as clients wait."""

    @model_validator(mode="after")
    def _check(self) -> "SLOConfig":
        names = [one.name for one in self.classes]
        if not names:
            raise ValueError("classes: there must be one at least")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"classes: {name} is there twice")
        if self.default is not None and self.default not in names:
            raise ValueError(f"default: {self.default} is none of the classes {', '.join(names)}")
        if sum(one.share for one in self.classes) > 1:
            raise ValueError("classes: the shares of all together are over 1")
        return self

    @property
    def default_class(self) -> SLOClass:
        return self.classes[0] if self.default is None else self.named(self.default)

    def named(self, name: str) -> SLOClass:
        """One of those that there are."""
        return next(one for one in self.classes if one.name == name)

    @property
    def is_set(self) -> bool:
        """Return whether classes are configured."""
        return [one.name for one in self.classes] != [STANDARD]


CLASS_HEADER = "x-slo-class"
TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
PRIORITY_HEADER = "x-slo-priority"

MOST_MS = 3_600_000.0
MOST_ASKED_PRIORITY = 100
"""Largest priority, in either direction, that a request may add to that of its class."""

_DEFAULT_TIERS = ("auto", "default")
"""Service tiers of OpenAI's clients that mean the default class. `flex` means the class of the lowest priority,
`priority` that of the highest. A class of such a name goes first.
"""


def promise_of(
    config: SLOConfig,
    headers: Mapping[str, str],
    service_tier: str | None = None,
    priority: int | None = None,
    *,
    has_key: bool = False,
    key_class: str | None = None,
) -> Promise:
    """The promise of a request with these headers (names in lower case) and body fields.

    `priority` is vLLM's: the lower goes first. Where an API key asks (`has_key`), `key_class` is its class, if it has
    one. Raises RequestError: 400 for what can't be understood, 403 for what the request's API key may not have.
    """
    chosen, param = _chosen(config, key_class, headers, service_tier)
    if PRIORITY_HEADER in headers:
        priority = _whole(headers[PRIORITY_HEADER], PRIORITY_HEADER)
    ttft_s = _seconds(headers, TTFT_HEADER, chosen.ttft_s)
    tpot_s = _seconds(headers, TPOT_HEADER, chosen.tpot_s)
    result = chosen.priority - (priority or 0)
    if has_key:
        own = chosen if key_class is None else config.named(key_class)
        if chosen.priority > own.priority:
            raise _forbidden(param, f"{chosen.name} goes before {own.name}, the class of this API key")
        if result > own.priority:
            raise _forbidden("priority", f"an API key's requests can't go before those of its class, {own.name}")
        for name, asked_s, promised_s in (
            (TTFT_HEADER, ttft_s, chosen.ttft_s),
            (TPOT_HEADER, tpot_s, chosen.tpot_s),
        ):
            if asked_s is not None and (promised_s is None or asked_s < promised_s):
                raise _forbidden(name, f"an API key's requests may loosen what {chosen.name} promises, not tighten it")
    return Promise(chosen.name, result, chosen.share, ttft_s, tpot_s)


def _chosen(
    config: SLOConfig, key_class: str | None, headers: Mapping[str, str], service_tier: str | None
) -> tuple[SLOClass, str]:
    """The class, and which field or header named it."""
    default = config.default_class
    if key_class is not None:
        default = config.named(key_class)
    by_header = headers.get(CLASS_HEADER)
    # The header decides, but a tier that nobody knows is a mistake all the same.
    by_tier = default if service_tier is None else _named(config, default, service_tier, "service_tier")
    if by_header is None:
        return by_tier, "service_tier"
    return _named(config, default, by_header, CLASS_HEADER), CLASS_HEADER


def _named(config: SLOConfig, default: SLOClass, name: str, param: str) -> SLOClass:
    """The class that a client means by `name`. Raises RequestError (400) that names `param`."""
    for one in config.classes:
        if one.name == name:
            return one
    if name in _DEFAULT_TIERS:
        return default
    if name == "flex":
        return min(config.classes, key=lambda one: one.priority)
    if name == "priority":
        return max(config.classes, key=lambda one: one.priority)
    known = ", ".join(one.name for one in config.classes)
    shown = "".join(char if char.isprintable() else "?" for char in name[:80])
    raise RequestError(f"{param}: {shown!r} is none of the classes {known}", param=param)


def _seconds(headers: Mapping[str, str], name: str, otherwise_s: float | None) -> float | None:
    if name not in headers:
        return otherwise_s
    try:
        value = float(headers[name])
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_MS:  # NaN is not
        raise RequestError(f"{name}: must be milliseconds, above 0 and at most {MOST_MS:.0f}", param=name)
    return value / 1000


def _whole(text: str, name: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = MOST_ASKED_PRIORITY + 1
    if abs(value) > MOST_ASKED_PRIORITY:
        raise RequestError(
            f"{name}: must be a whole number from {-MOST_ASKED_PRIORITY} to {MOST_ASKED_PRIORITY}", param=name
        )
    return value


def _forbidden(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="not_allowed", status=403)
