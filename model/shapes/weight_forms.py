"""Forms of quantised weights: in a checkpoint's files, and as they are held. No torch here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WeightForm:
    """Form of a quantised weight, from which all its bytes follow."""

    kind: Literal["int8", "int4", "fp8", "fp4"]  # fp8 is e4m3, fp4 e2m1
    group_size: int | None  # columns that share a scale; None: a row's
    has_offsets: bool = False  # each group's, beside its scale

    @property
    def bits(self) -> Literal[8, 4]:
        return 4 if self.kind in ("int4", "fp4") else 8


@dataclass(frozen=True)
class StoredQuantization:
    """Form of a checkpoint's projections in its files, where each is quantised in several tensors.

    Modules are named by their whole names, parts of those, and `re:` patterns.
    """

    method: Literal["fp8", "int8", "packed", "awq", "gptq", "fp4", "mxfp4"]  # mxfp4: stacked experts alone
    form: WeightForm  # what they are held in
    left: tuple[str, ...] = ()  # modules that are not quantised
    block: tuple[int, int] | None = None  # fp8: rows and columns that share a scale
    zero_shift: int = 0  # gptq: what is added to its zero points
    targets: tuple[str, ...] = ()  # modules of this form, or `Linear`, which is all that no form names; (): all
    others: tuple["StoredQuantization", ...] = ()  # forms of other modules of the same checkpoint

    def leaves(self, names: Sequence[str]) -> bool:
        """Return True if the module, which files may call by any of `names`, is not quantised."""
        return _is_named(self.left, names)

    def of_module(self, names: Sequence[str]) -> "StoredQuantization | None":
        """Return the form of a module that is quantised: the first one that names it, else one of all modules."""
        forms = (self, *self.others)
        named = (one for one in forms if _is_named(one.targets, names))
        of_all = (one for one in forms if not one.targets or "Linear" in one.targets)
        return next(named, None) or next(of_all, None)


def _is_named(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(
        re.match(pattern.removeprefix("re:"), name) if pattern.startswith("re:") else f".{pattern}." in f".{name}."
        for pattern in patterns
        for name in names
    )
