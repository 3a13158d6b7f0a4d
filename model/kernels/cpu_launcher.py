"""The one place through which CPU kernels get their output memory and are run, or recorded."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twostroke.model.kernels.cpu_arena import Arena
from twostroke.model.kernels.cpu_launch import Kernel
from twostroke.model.kernels.cpu_program import Program


class NotRecordable(Exception):
    """Something other than our kernels was to compute: torch runs at once, and can't be replayed."""


class Launcher:
    """Runs kernels at once, or records them. Belongs to one engine, and is used on its thread."""

    def __init__(self) -> None:
        self.arena = Arena()
        """Where programs have their intermediate results."""
        self._program: Program | None = None

    def run(self, kernel: Kernel, num_items: int, grain: int, *arguments: int) -> None:
        """As Kernel.run."""
        if self._program is None:
            kernel.run(num_items, grain, *arguments)
        else:
            self._program.append(kernel, num_items, grain, arguments)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, contiguous memory for a kernel's output."""
        if self._program is None:
            return torch.empty(shape, dtype=dtype)
        return self.arena.empty(shape, dtype)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Program]:
        """Within, `run` only notes what is to be run, and `empty` gives places of the arena: tensors without values.

        Raises NotRecordable, within, where torch is asked to compute: only views may be taken.
        """
        program = Program()
        self._program = program
        try:
            with _OnlyViews():
                yield program
        finally:
            self._program = None


class _OnlyViews(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Torch would import its compiler to keep that out: a second of every start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if not func.is_view:
            raise NotRecordable(f"{func} computes at once, so it can't be part of a program")
        return func(*args, **(kwargs or {}))
