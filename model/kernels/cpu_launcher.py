"""The one place through which CPU kernels get their output memory and are run."""

import torch
from torch import Tensor

from model.kernels.cpu_launch import Kernel


class Launcher:
    """Runs kernels at once. Belongs to one engine, and is used on its thread."""

    def run(self, kernel: Kernel, num_items: int, grain: int, *arguments: int) -> None:
        """As Kernel.run."""
        kernel.run(num_items, grain, *arguments)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, contiguous memory for a kernel's output."""
        return torch.empty(shape, dtype=dtype)
