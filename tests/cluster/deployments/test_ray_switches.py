"""What a router says of a Ray that was started without our switches."""

from pathlib import Path

import pytest

from twostroke.cluster.deployments.ray_switches import HAPROXY_SWITCHES, SWITCHES, forgotten_switches
from twostroke.cluster.local.ray import LocalRayOptions, ray_environment


@pytest.mark.parametrize("haproxy", [True, False])
def test_a_server_of_ours_forgets_no_switch(haproxy: bool, tmp_path: Path) -> None:
    options = LocalRayOptions("127.0.0.1", 8000, num_cpus=1, num_gpus=0, haproxy=haproxy, verbose=False)
    assert forgotten_switches(ray_environment(options, tmp_path)) is None


def test_a_shell_with_the_clusters_switches_changes_nothing_for_a_server_without_haproxy(tmp_path: Path) -> None:
    options = LocalRayOptions("127.0.0.1", 8000, num_cpus=1, num_gpus=0, haproxy=False, verbose=False)
    assert ray_environment(options, tmp_path)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


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


def test_ray_starts_our_workers_at_no_lower_priority_than_other_processes(tmp_path: Path) -> None:
    options = LocalRayOptions("127.0.0.1", 8000, num_cpus=1, num_gpus=0, haproxy=False, verbose=False)
    assert ray_environment(options, tmp_path)["RAY_worker_niceness"] == "0"
