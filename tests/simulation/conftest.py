"""For all simulations."""

import pytest


@pytest.fixture(autouse=True)
def _quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings of aborted transfers and lost routers are what simulations are made of."""
    for name in ("router", "prefill_worker", "decode_worker", "protocol", "model", "kvtransfer"):
        caplog.set_level("CRITICAL", logger=name)
