"""What a router says of a Ray that was started without our switches."""

from pathlib import Path

import pytest

from twostroke.cluster.deployments.proxies import HAPROXY_SWITCHES, SWITCHES, forgotten_switches
from twostroke.cluster.local.ray import ray_environment


@pytest.mark.parametrize("haproxy", [True, False])
def test_a_server_of_ours_forgets_no_switch_whatever_the_shell_has(haproxy: bool, tmp_path: Path) -> None:
    environment = ray_environment(tmp_path, haproxy=haproxy)
    assert forgotten_switches(environment) is None
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == str(int(haproxy))
    assert environment["RAY_worker_niceness"] == "0"  # no lower priority than other processes have


def test_a_bare_ray_is_told_what_it_lacks_and_where_that_is() -> None:
    said = forgotten_switches({"PATH": "/bin"})
    assert said is not None
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED=1" in said
    assert "deploy/ray.env" in said


def test_a_wrong_value_is_as_good_as_none() -> None:
    environment = {**SWITCHES, **HAPROXY_SWITCHES, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "120"}
    said = forgotten_switches(environment)
    assert said is not None
    assert "without RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=600:" in said
