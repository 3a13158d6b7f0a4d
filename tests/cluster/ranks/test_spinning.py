"""A CPU worker's idle threads sleep soon: the environment is set before OpenMP reads it."""

import subprocess
import sys

import pytest

from twostroke.cluster.ranks.rank_parts import SPIN_COUNT, limit_spinning


def test_nothing_loads_openmp_before_a_worker_limits_how_long_its_threads_spin() -> None:
    program = (
        "import twostroke.cluster.deployments.workers, twostroke.cluster.ranks.worker_parts\n"
        "loaded = open('/proc/self/maps').read()\n"
        "assert 'libgomp' not in loaded and 'libiomp' not in loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, str(SPIN_COUNT)),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_the_environment_may_say_otherwise(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(given)
    monkeypatch.setattr("os.environ", environment)
    limit_spinning()
    assert environment.get("GOMP_SPINCOUNT") == expected
