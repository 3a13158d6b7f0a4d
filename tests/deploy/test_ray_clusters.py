"""The Ray cluster files, by the code of `ray up` and of Ray's autoscaler, and by the shell that runs their commands."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.command_runner import _with_interactive
from ray.autoscaler._private.util import prepare_config, validate_config, with_head_node_ip

from tests.deploy.files import DEPLOY, INSTALLED, LABEL, ROLES, SETTINGS, serve_config
from tests.deploy.ray_autoscaler import launched_for

FILES = ("ray-cluster.yaml", "ray-cluster-aws.yaml")
HEAD = "10.0.0.10"
OF_AN_INSTANCE = {"CPU": 192, "GPU": 8}
"""What Ray finds out about the GPU nodes' types by asking AWS."""


def prepared(name: str) -> dict[str, Any]:
    """The file with Ray's defaults, as `ray up` has it when it begins."""
    config: dict[str, Any] = prepare_config(yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8")))
    return config


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_the_file(name: str) -> None:
    validate_config(prepared(name))


@pytest.mark.parametrize("name", FILES)
def test_ray_starts_on_every_node_with_our_switches_and_secrets(name: str) -> None:
    config = prepared(name)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        (start,) = (command for command in commands if "ray start" in command)
        environment, _, rest = start.partition("set +a;")
        assert environment.endswith(f"set -a; . {SETTINGS}/ray.env; . {SETTINGS}/secret.env; ")
        assert f"{INSTALLED}/bin/ray start" in rest


@pytest.mark.parametrize("name", FILES)
def test_the_files_on_the_nodes_are_made_by_the_setup(name: str) -> None:
    setup = "\n".join(prepared(name)["setup_commands"])
    for file in ("ray.env", "secret.env", "keys.yaml"):
        assert f"/{file} " in setup
    assert f"python3 -m venv {INSTALLED}" in setup


@pytest.mark.parametrize("name", FILES)
def test_the_dashboard_listens_on_the_head_itself_alone(name: str) -> None:
    assert "--dashboard-host=127.0.0.1 " in prepared(name)["head_start_ray_commands"][-1]


@pytest.mark.parametrize("name", FILES)
def test_a_haproxy_that_was_left_is_ended_and_not_the_shell_that_looks_for_it(name: str) -> None:
    for commands in (prepared(name)["head_start_ray_commands"], prepared(name)["worker_start_ray_commands"]):
        (end,) = (command for command in commands if "pkill" in command)
        (pattern,) = [part for part in end.split("'") if "aproxy" in part]
        assert _matches(pattern, "/x/bin/haproxy -dS -db -f /tmp/haproxy-serve/4a6271/haproxy.cfg -dR")
        assert not _matches(pattern, "/usr/sbin/haproxy -Ws -f /etc/haproxy/haproxy.cfg")
        assert not _matches(pattern, f"bash --login -c -i {end}")


@pytest.mark.parametrize(
    ("addresses", "started"),
    [
        (f"{HEAD[:-2]}11 172.17.0.1", (f"{HEAD[:-2]}11", "prefill")),
        (f"172.17.0.1 {HEAD[:-2]}22", (f"{HEAD[:-2]}22", "decode")),
    ],
)
def test_a_bare_host_gets_its_role_by_its_address(addresses: str, started: tuple[str, str], tmp_path: Path) -> None:
    address, role = started
    done = _start_worker(addresses, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "start",
        f"--address={HEAD}:6379",
        f"--node-ip-address={address}",
        "--metrics-export-port=8085",
        f"--labels={LABEL}={role}",
        f'--resources={{"{role}_slot": 8}}',
        "token=of the cluster",
    ]


def test_a_bare_host_without_a_role_is_told_so(tmp_path: Path) -> None:
    done = _start_worker("10.0.0.1 10.0.0.111", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no role for this host, 10.0.0.1 10.0.0.111" in done.stderr


def test_every_bare_host_has_one_role() -> None:
    config = prepared("ray-cluster.yaml")
    start = config["worker_start_ray_commands"][-1]
    for address in config["provider"]["worker_ips"]:
        assert start.count(address) == 1
    assert f"--node-ip-address={config['provider']['head_ip']} " in config["head_start_ray_commands"][-1]


def test_on_aws_a_worker_that_finds_no_place_brings_a_node_of_its_role() -> None:
    config = prepared("ray-cluster-aws.yaml")
    (application,) = serve_config()["applications"]
    for role in ROLES:
        config["available_node_types"][role]["resources"] |= OF_AN_INSTANCE
    for role in ROLES:
        worker = application["args"][role]
        demand = {"CPU": worker["threads"], "GPU": 1, **worker["node_resources"]}
        nine = launched_for(config, demand, worker["node_labels"], count=9)
        minimum = {name: node["min_workers"] for name, node in config["available_node_types"].items()}
        assert nine == {name: count for name, count in (minimum | {role: 2}).items() if count}


def _matches(pattern: str, command_line: str) -> bool:
    done = subprocess.run(["grep", "-E", "-q", pattern], input=command_line, text=True, timeout=30)
    return done.returncode == 0


def _start_worker(addresses: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a bare host's start command with a Ray that tells what it was given, on a host with these addresses."""
    script = prepared("ray-cluster.yaml")["worker_start_ray_commands"][-1]
    (folder / "ray.env").write_text("RAY_AUTH_MODE=token\n", encoding="utf-8")
    (folder / "secret.env").write_text('RAY_AUTH_TOKEN="of the cluster"\n', encoding="utf-8")
    _executable(folder / "ray", 'printf "%s\\n" "$@"; echo "token=$RAY_AUTH_TOKEN"')
    _executable(folder / "hostname", f'test "$1" = -I && echo "{addresses} "')
    script = script.replace(f"{INSTALLED}/bin/ray", str(folder / "ray")).replace(str(SETTINGS), str(folder))
    # A limit that this shell may not be allowed to raise.
    script = script.replace("ulimit -n 65536", "true")
    (folder / ".bashrc").write_text(f"PATH={folder}:$PATH\n", encoding="utf-8")
    (command,) = with_head_node_ip([script], HEAD)
    # What `ray up` hands to SSH, and a host's shell is given by its daemon.
    return subprocess.run(
        ["sh", "-c", " ".join(_with_interactive(command))],
        env={**os.environ, "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )


def _executable(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o700)
