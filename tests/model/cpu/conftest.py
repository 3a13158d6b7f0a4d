"""CPU kernels on each of the units that this CPU can multiply bf16 with."""

import pytest

from twostroke.model.cpu.kernels import amx


@pytest.fixture(params=["AMX", "vectors"] if amx.is_usable() else ["vectors"])
def on_each_unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AMX multiplies in its tiles; the test runs a second time as on one that has vectors alone."""
    monkeypatch.setattr(amx, "is_usable", lambda: request.param == "AMX")
