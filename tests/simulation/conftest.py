"""Makes `tests.simulation` importable, also where pytest is started without the repository's root on its path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(autouse=True)
def _quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings of aborted transfers and lost routers are what simulations are made of."""
    for name in ("router", "prefill_worker", "decode_worker", "protocol", "model", "kvtransfer"):
        caplog.set_level("CRITICAL", logger=name)
