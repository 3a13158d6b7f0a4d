"""SLO classes: what is promised to whom. The promises themselves are kept by admission, queues and schedulers."""

import math
from dataclasses import dataclass, field

from twostroke.protocol.errors import ConfigError

STANDARD = "standard"
MOST_PRIORITY = 1000


@dataclass(frozen=True)
class SLOClass:
    """One class of requests. Raises ConfigError for values that can't be meant."""

    name: str
    ttft_s: float | None = None  # to the first token; None: nothing promised, so never refused for being late
    tpot_s: float | None = None  # mean time between tokens after the first
    priority: int = 0  # a higher one goes first, gives way last, and is shed last
    share: float = 0.0  # of the workers' tokens that the class gets while it waits, so that it can't starve

    def __post_init__(self) -> None:
        if not self.name or not self.name.isascii() or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"name: {self.name!r} must be letters, digits, - and _")
        for what in ("ttft_s", "tpot_s"):
            value = getattr(self, what)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{what}: {value} must be above 0")
        if not -MOST_PRIORITY <= self.priority <= MOST_PRIORITY:
            raise ConfigError(f"priority: {self.priority} must be from {-MOST_PRIORITY} to {MOST_PRIORITY}")
        if not 0 <= self.share < 1:
            raise ConfigError(f"share: {self.share} must be at least 0 and below 1")


@dataclass(frozen=True)
class SLOConfig:
    """All classes. Without any there is one, `standard`, that promises nothing. Raises ConfigError."""

    classes: tuple[SLOClass, ...] = field(default_factory=lambda: (SLOClass(STANDARD),))
    default: str | None = None  # of requests that name none, and whose API key has none; None: the first
    admission: bool = True  # refuse (429) what would be late, rather than serve it late
    max_queue_s: float = 600.0  # of work before a request that is promised nothing; longer queues refuse it

    def __post_init__(self) -> None:
        names = [one.name for one in self.classes]
        if not names:
            raise ConfigError("classes: there must be one at least")
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"classes: {name} is there twice")
        if not self.max_queue_s > 0:
            raise ConfigError(f"max_queue_s: {self.max_queue_s} must be above 0")
        if self.default is not None and self.default not in names:
            raise ConfigError(f"default: {self.default} is none of the classes {', '.join(names)}")
        if sum(one.share for one in self.classes) > 1:
            raise ConfigError("classes: the shares of all together are over 1")

    @property
    def default_class(self) -> SLOClass:
        return self.classes[0] if self.default is None else self.named(self.default)

    def named(self, name: str) -> SLOClass:
        """Raises KeyError."""
        for one in self.classes:
            if one.name == name:
                return one
        raise KeyError(name)

    @property
    def is_set(self) -> bool:
        """Whether anybody has said anything of classes."""
        return [one.name for one in self.classes] != [STANDARD]
