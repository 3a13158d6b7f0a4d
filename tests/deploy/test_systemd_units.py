"""The systemd units, by systemd's own checks, and against what they start."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY, INSTALLED, LABEL, ROLES, SETTINGS, ray_env

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MOST_EXPOSURE = 4.0  # systemd's own measure: below 5 is "OK", 10 is a unit without any restriction


def settings(unit: Path, name: str) -> list[str]:
    """The values of one setting, lines that go on joined."""
    text = re.sub(r"\\\n\s*", "", unit.read_text(encoding="utf-8"))
    return re.findall(rf"^{name}=(.*)$", text, flags=re.MULTILINE)


def unit(name: str) -> Path:
    return DEPLOY / "systemd" / f"{name}.service"


@pytest.fixture
def installed(tmp_path: Path) -> list[Path]:
    """Copies whose commands are there: systemd looks for them."""
    copies = []
    for original in UNITS:
        text = re.sub(rf"{INSTALLED}/bin/\w+", "/bin/true", original.read_text(encoding="utf-8"))
        copies.append(tmp_path / original.name)
        copies[-1].write_text(text, encoding="utf-8")
    return copies


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong(installed: list[Path]) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, installed)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("name", [one.name for one in UNITS])
def test_what_runs_can_do_little_beside(name: str, installed: list[Path]) -> None:
    (path,) = (copy for copy in installed if copy.name == name)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(path)], capture_output=True, text=True, timeout=60
    )
    rated = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert rated is not None, done.stdout + done.stderr
    assert float(rated[1]) < MOST_EXPOSURE


def test_every_unit_has_rays_environment_and_the_secrets() -> None:
    for one in UNITS:
        assert settings(one, "EnvironmentFile")[:2] == [f"{SETTINGS}/ray.env", f"{SETTINGS}/secret.env"], one.name


def test_a_worker_node_has_its_instances_role_as_label_and_resource() -> None:
    (start,) = settings(unit("twostroke-ray-worker@"), "ExecStart")
    assert f"--labels={LABEL}=%i" in start
    assert """'--resources={"%i_slot": ${SLOTS}}'""" in start
    assert {role for role in ROLES if role in unit("twostroke-ray-worker@").read_text(encoding="utf-8")} == set(ROLES)


def test_a_worker_node_is_given_the_time_to_take_its_replicas_elsewhere() -> None:
    (stop_s,) = settings(unit("twostroke-ray-worker@"), "TimeoutStopSec")
    assert int(stop_s) > float(ray_env()["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) + 10
    assert settings(unit("twostroke-ray-worker@"), "KillMode") == ["mixed"]


def test_the_application_lets_streams_end_before_it_is_shut_down_and_has_the_time() -> None:
    (drain,) = settings(unit("twostroke-serve"), "ExecStop")
    (shutdown,) = settings(unit("twostroke-serve"), "ExecStopPost")
    assert "/twostroke drain " in drain
    assert "/serve shutdown " in shutdown
    grace_s, notice_s = (float(re.findall(rf"--{name} (\d+)", drain)[0]) for name in ("grace", "notice"))
    assert notice_s < grace_s
    shutdown_s = 30  # Serve's own limit for that command
    assert int(settings(unit("twostroke-serve"), "TimeoutStopSec")[0]) > grace_s + shutdown_s


def test_the_application_s_unit_is_active_only_once_it_runs() -> None:
    for when in ("ExecStart", "ExecReload"):
        deploy, wait = settings(unit("twostroke-serve"), when)
        assert "/serve deploy " in deploy
        assert "/twostroke await " in wait
        waits_s = float(re.findall(r"--seconds (\d+)", wait)[0])
        assert int(settings(unit("twostroke-serve"), "TimeoutStartSec")[0]) > waits_s


def test_the_head_listens_for_its_dashboard_on_itself_alone() -> None:
    (start,) = settings(unit("twostroke-ray-head"), "ExecStart")
    assert "--dashboard-host=127.0.0.1" in start
