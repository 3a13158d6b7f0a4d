"""Fixtures of all simulations."""

import gc

import pytest

# A run leaves thousands of objects that die together: looking for them often takes an eighth of the time.
gc.freeze()
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def _quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings of aborted transfers and lost routers are what simulations are made of."""
    caplog.set_level("CRITICAL", logger="twostroke")
