"""Runs the Triton kernels of these tests in Triton's CPU interpreter, with bf16 put right.

Triton reads TRITON_INTERPRET as it and the kernels are imported, so it is set here, before either. `make test` runs
this folder as a process of its own. Where an earlier test of the same process has imported Triton for a GPU, the tests
that need the interpreter are skipped.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from tests.model.conftest import write_checkpoint
from tests.rigs.triton_interpreter import bf16_interpreter

__all__ = ["write_checkpoint"]


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter with bf16 put right; new tensors are full of NaN, so that what a kernel does not write shows."""
    if not isinstance(tl.sum, triton_interpreter.InterpretedFunction):
        pytest.skip("Triton was imported by an earlier test without its interpreter: run `pytest tests/kernels` alone")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    with bf16_interpreter():
        yield
    torch.set_num_threads(threads)
