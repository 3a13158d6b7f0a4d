"""For all simulations."""

import pytest


@pytest.fixture(autouse=True)
def _quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings of aborted transfers and lost routers are what simulations are made of."""
    caplog.set_level("CRITICAL", logger="twostroke")
