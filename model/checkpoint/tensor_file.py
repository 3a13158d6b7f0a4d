"""Interfaces of a checkpoint's files: tensors by name, and quantised weights composed of several tensors."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import TEXT_PREFIXES, WeightForm

WHOLE = slice(None)


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight [out, in] as stored in a checkpoint; its bytes are loaded by `read`."""

    form: WeightForm  # how it is held
    tensors: tuple[str, ...]  # what it is made of
    read: Callable[[slice], QuantizedWeight]  # some of its rows


class TensorFile(Protocol):
    """A file of tensors, mapped: nothing is read that is not asked for."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Return the dtype by safetensors' name."""

    def tensor(self, name: str, rows: slice, columns: slice) -> Tensor:
        """A part of a weight, some rows of what has no columns, or one number.

        Raises ConfigError where it can't be read.
        """

    def stored_weight(self, name: str) -> StoredWeight | None:
        """A tensor that is a quantised weight by itself; None for any other."""

    def content(self, name: str) -> memoryview:
        """Return the tensor's bytes as stored in the file."""


class RenamedTensor:
    """Implements TensorFile for one tensor of another, by another name."""

    def __init__(self, file: TensorFile, name: str, name_there: str):
        self._file = file
        self._name = name
        self._name_there = name_there

    def names(self) -> Collection[str]:
        return (self._name,)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._name_there)

    def dtype(self, name: str) -> str:
        return self._file.dtype(self._name_there)

    def tensor(self, name: str, rows: slice, columns: slice) -> Tensor:
        return self._file.tensor(self._name_there, rows, columns)

    def stored_weight(self, name: str) -> StoredWeight | None:
        return self._file.stored_weight(self._name_there)

    def content(self, name: str) -> memoryview:
        return self._file.content(self._name_there)


class ExpertTensor:
    """Implements TensorFile for one expert's projection in a tensor of all experts [experts, out, in].

    An expert's rows may be those of several projections, one behind the other; a scale that they share has one row.
    """

    def __init__(
        self, file: TensorFile, name_there: str, expert: int, place: int, count: int, has_columns_first: bool = False
    ):
        """`place` is which of the `count` projections it is. `has_columns_first`: tensors are [experts, in, out]."""
        self._file = file
        self._name_there = name_there
        self._expert = slice(expert, expert + 1)
        self._has_columns_first = has_columns_first
        rows, self._columns = file.shape(name_there)[:0:-1] if has_columns_first else file.shape(name_there)[1:]
        each = rows // count or rows
        self._rows = slice(place * each, (place + 1) * each) if rows > 1 else WHOLE
        self._count = each

    def names(self) -> Collection[str]:
        return (self._name_there,)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._count, self._columns

    def dtype(self, name: str) -> str:
        return self._file.dtype(self._name_there)

    def tensor(self, name: str, rows: slice, columns: slice) -> Tensor:
        found: Tensor = self._file.tensor(self._name_there, self._expert, WHOLE)[0]
        return (found.T if self._has_columns_first else found)[self._rows][rows, columns]

    def stored_weight(self, name: str) -> StoredWeight | None:
        return None

    def content(self, name: str) -> memoryview:
        return self.tensor(name, WHOLE, WHOLE).contiguous().view(-1).view(torch.uint8).numpy().data


class ExpertNumber(RenamedTensor):
    """One expert's number in a tensor that has one for each of `count` experts, or one for all."""

    def __init__(self, file: TensorFile, name_there: str, expert: int, count: int):
        super().__init__(file, name_there, name_there)
        self._place = expert if file.shape(name_there) == (count,) else 0

    def shape(self, name: str) -> tuple[int, ...]:
        return (1,)

    def tensor(self, name: str, rows: slice, columns: slice) -> Tensor:
        return super().tensor(name, WHOLE, WHOLE).reshape(-1)[self._place : self._place + 1]


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the tensors of the text in a checkpoint that sees images: their names there by those of text alone."""
    names = list(names)
    for text, head in TEXT_PREFIXES:
        of_text = {f"model.{name.removeprefix(text)}": name for name in names if name.startswith(text)}
        if of_text:
            return of_text | {name.removeprefix(head): name for name in names if name.startswith(f"{head}lm_head.")}
    return {name: name for name in names if name.startswith(("model.", "lm_head."))}


_ROWS_AT_ONCE = 1024


def equal_tensors(file: TensorFile, name: str, other_file: TensorFile, other: str) -> bool:
    """Return whether two matrices hold the same numbers. Most that differ do in their first rows: no more is read."""
    shape = file.shape(name)
    if shape != other_file.shape(other) or file.dtype(name) != other_file.dtype(other):
        return False
    for first in range(0, shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        if not torch.equal(file.tensor(name, rows, WHOLE), other_file.tensor(other, rows, WHOLE)):
            return False
    return True
