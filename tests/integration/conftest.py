"""Fixtures that these tests share."""

from pathlib import Path
from typing import Any

import pytest

from tests.model.conftest import generate, write_checkpoint
from twostroke.protocol.stats import StepCosts
from twostroke.worker.speculator import Speculator

__all__ = ["generate", "write_checkpoint"]

CHEAP_ROWS = StepCosts(1.0, 1e-6, 0.0, 1e-6, 0.0)


@pytest.fixture(scope="session")
def folder(write_checkpoint: Any) -> Path:
    """A model of random weights, with fewer KV heads than the most ranks here."""
    path: Path = write_checkpoint(seed=3, num_attention_heads=8, num_key_value_heads=2)
    return path


@pytest.fixture
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every draft pay."""
    have_rows_pay(monkeypatch)


def have_rows_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell all speculators made from now on that a row costs next to nothing."""
    make = Speculator.__init__

    def made(speculator: Speculator, config: Any, costs: Any, safety: float) -> None:
        make(speculator, config, lambda: CHEAP_ROWS, safety)

    monkeypatch.setattr(Speculator, "__init__", made)
