"""SLO classes: what is promised to whom. The promises themselves are kept by admission, queues and schedulers."""

from typing import Annotated

from annotated_types import Ge, Le, Lt
from pydantic import Field, PositiveFloat, field_validator, model_validator

from twostroke.protocol.settings import Interval, Section

STANDARD = "standard"
MOST_PRIORITY = 1000


class SLOClass(Section):
    """One class of requests."""

    name: str
    """Letters, digits, - and _."""
    ttft_s: PositiveFloat | None = None
    """To the first token; null: nothing promised, so never refused for being late."""
    tpot_s: PositiveFloat | None = None
    """Mean time between tokens after the first."""
    priority: Annotated[int, Ge(-MOST_PRIORITY), Le(MOST_PRIORITY)] = 0
    """A higher one goes first, gives way last, and is shed last."""
    share: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Of the workers' tokens that the class gets while it waits, so that it can't starve."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r} must be letters, digits, - and _")
        return name


class SLOConfig(Section):
    """All classes. Without any there is one, `standard`, that promises nothing."""

    classes: tuple[SLOClass, ...] = Field(default=(SLOClass(name=STANDARD),), strict=False)
    default: str | None = None
    """Of requests that name none, and whose API key has none; null: the first."""
    admission: bool = True
    """Refuse (429) what would be late, rather than serve it late."""
    max_queue_s: Interval = 600.0
    """Of work before a request that is promised nothing; longer queues refuse it."""

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
        """Raises KeyError."""
        for one in self.classes:
            if one.name == name:
                return one
        raise KeyError(name)

    @property
    def is_set(self) -> bool:
        """Whether anybody has said anything of classes."""
        return [one.name for one in self.classes] != [STANDARD]
