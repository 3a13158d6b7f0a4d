"""Tests that need a CUDA device. Triton and the kernels are imported by fixtures only: on a host without a GPU, or in a
process that runs the kernels' interpreter tests, collecting these must not import Triton first."""

import os
from typing import TYPE_CHECKING

import pytest
import torch

from tests.model.conftest import generate, write_checkpoint

if TYPE_CHECKING:
    from twostroke.model.cuda.backend import CudaBackend

__all__ = ["generate", "write_checkpoint"]


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process runs Triton's interpreter: run `pytest tests/gpu -m gpu` alone")


@pytest.fixture
def backend(_gpu: None) -> "CudaBackend":
    from twostroke.model.cuda.backend import CudaBackend

    return CudaBackend()
