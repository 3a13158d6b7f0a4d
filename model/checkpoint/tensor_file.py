"""What a checkpoint's files are to those who read them: tensors by name, and quantised weights made of some of them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import WeightForm

WHOLE = slice(None)


@dataclass(frozen=True)
class StoredWeight:
    """One quantised weight [out, in] as it lies in a checkpoint; nothing of it is read before `read` is called."""

    form: WeightForm  # how it is held
    tensors: tuple[str, ...]  # what it is made of
    read: Callable[[slice], QuantizedWeight]  # some of its rows


class TensorFile(Protocol):
    """A file of tensors, mapped: nothing is read that is not asked for."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """As safetensors names it."""

    def tensor(self, name: str, rows: slice, columns: slice) -> Tensor:
        """A part of a weight, some rows of what has no columns, or one number.

        Raises ConfigError where it can't be read.
        """

    def stored_weight(self, name: str) -> StoredWeight | None:
        """A tensor that is a quantised weight by itself; None for any other."""

    def content(self, name: str) -> memoryview:
        """The tensor's bytes as they lie in the file."""
