"""The checkpoint that these tests share."""

from pathlib import Path
from typing import Any

import pytest

from tests.model.conftest import generate, write_checkpoint

__all__ = ["generate", "write_checkpoint"]


@pytest.fixture(scope="session")
def folder(write_checkpoint: Any) -> Path:
    """A model of random weights, with fewer KV heads than the most ranks here."""
    path: Path = write_checkpoint(seed=3, num_attention_heads=8, num_key_value_heads=2)
    return path
