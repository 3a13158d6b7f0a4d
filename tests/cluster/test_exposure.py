"""The loud line where an endpoint is open to others and nobody needs a key."""

import pytest

from twostroke.cluster.deployments.proxies import exposure_warning, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_alone_is_no_concern(host: str) -> None:
    assert is_loopback(host)
    assert exposure_warning(host, has_keys=False) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "server.example", ""])
def test_others_are_unless_they_need_a_key(host: str) -> None:
    assert "NO API KEYS" in str(exposure_warning(host, has_keys=False))
    assert exposure_warning(host, has_keys=True) is None
