"""deploy/ray.env: what Ray's processes find in their environment, wherever they are started from."""

import re
import subprocess
from pathlib import Path

import ray

from tests.deploy.files import DEPLOY, INSTALLED, ray_env
from twostroke.cluster.deployments.proxies import BINARY_VARIABLE
from twostroke.cluster.deployments.ray_switches import HAPROXY_SWITCHES, SWITCHES, forgotten_switches


def test_it_has_every_switch_that_replicas_count_on() -> None:
    assert forgotten_switches(ray_env()) is None
    assert {**SWITCHES, **HAPROXY_SWITCHES}.items() <= ray_env().items()


def test_ray_asks_for_its_token() -> None:
    assert ray_env()["RAY_AUTH_MODE"] == "token"


def test_it_holds_no_secret() -> None:
    assert not {"RAY_AUTH_TOKEN", "TWOSTROKE_SECRET"} & ray_env().keys()


def test_haproxy_is_started_by_the_script_that_the_project_installs() -> None:
    script = Path(ray_env()[BINARY_VARIABLE])
    assert script.parent == INSTALLED / "bin"
    scripts = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'{script.name} = "twostroke.cluster.deployments.proxies:main"' in scripts


def test_a_shell_reads_it_as_systemd_and_docker_do() -> None:
    """No quotes, no expansions, no spaces: what takes these apart differs."""
    for line in (DEPLOY / "ray.env").read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"|#.*|[A-Za-z_]+=[\w:./-]+", line), line
    told = subprocess.run(
        ["sh", "-c", f"set -a; . {DEPLOY}/ray.env; set +a; exec env"],
        env={},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert ray_env().items() <= dict(line.split("=", 1) for line in told.splitlines()).items()


def test_each_switch_says_why_it_is_there() -> None:
    is_explained = False
    for line in (DEPLOY / "ray.env").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            is_explained = True
        elif not line:
            is_explained = False
        else:
            assert is_explained, line


def test_ray_knows_every_name_in_it() -> None:
    """It ignores a switch that is misspelled, or that a later version has given up."""
    (package,) = (Path(folder) for folder in ray.__path__)
    of_python = b"".join(
        (package / name).read_bytes()
        for name in ("_private/ray_constants.py", "_common/usage/usage_constants.py", "serve/_private/constants.py")
    )
    compiled = (package / "_raylet.so").read_bytes()
    for name in ray_env():
        assert name.encode() in of_python or name.removeprefix("RAY_").encode() in compiled, name
