"""The files for `ray up`: by Ray's code that reads them, and by the shell that runs their commands."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.command_runner import _with_interactive
from ray.autoscaler._private.util import prepare_config, validate_config, with_head_node_ip
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.common_pb2 import LabelSelectorOperator

from tests.deploy.programs import INSTALLED, LABEL, ROLES, ROOT, SETTINGS, application, run, text_of

RAY_FILES = ("ray-cluster.yaml", "ray-cluster-aws.yaml")
HEAD = "10.0.0.10"
OF_AN_INSTANCE = {"CPU": 192, "GPU": 8}
"""Resources of the GPU nodes' types, which Ray learns by asking AWS."""


def prepared(name: str) -> dict[str, Any]:
    """The file with Ray's defaults, as `ray up` has it when it begins."""
    config: dict[str, Any] = prepare_config(yaml.safe_load(text_of(name)))
    return config


@pytest.mark.parametrize("name", RAY_FILES)
def test_ray_takes_the_file_and_starts_on_every_node_with_our_switches_and_secrets(name: str) -> None:
    config = prepared(name)
    validate_config(config)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        (start,) = (command for command in commands if "ray start" in command)
        environment, _, rest = start.partition("set +a;")
        assert environment.endswith(f"set -a; . {SETTINGS}/ray.env; . {SETTINGS}/secret.env; ")
        assert f"{INSTALLED}/bin/ray start" in rest
    setup = "\n".join(config["setup_commands"])  # makes what these read
    assert [file for file in ("ray.env", "secret.env", "keys.yaml") if f"/{file} " not in setup] == []
    assert f"python3 -m venv {INSTALLED}" in setup
    assert "--dashboard-host=127.0.0.1 " in config["head_start_ray_commands"][-1]  # the head itself alone


@pytest.mark.parametrize("name", RAY_FILES)
def test_workers_may_lock_the_memory_that_their_host_lets_them_and_hosts_get_sources_alone(name: str) -> None:
    config = prepared(name)
    assert 'ulimit -l "$(ulimit -H -l)"; ' in config["worker_start_ray_commands"][-1]
    made = [line for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines() if line.endswith("/")]
    assert config["rsync_exclude"] == [".git/", *sorted(made, key=config["rsync_exclude"].index)]


@pytest.mark.parametrize("name", RAY_FILES)
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


def test_as_many_workers_may_be_started_as_the_hosts_have_slots() -> None:
    start = prepared("ray-cluster.yaml")["worker_start_ray_commands"][-1]
    nodes = prepared("ray-cluster-aws.yaml")["available_node_types"]
    for role in ROLES:
        hosts, slots = re.search(rf"(\S+)\) role={role}; slots=(\d+)", start).groups()  # type: ignore[union-attr]
        most = len(hosts.split("|")) * int(slots)
        on_aws = nodes[role]["max_workers"] * int(nodes[role]["resources"][f"{role}_slot"])
        assert application()["autoscaling"][role]["max"] == most
        assert re.search(rf"{role}: {{min: 1, max: {most}}} # AWS: {on_aws}\b", text_of("serve.yaml"))


def test_on_aws_a_worker_that_finds_no_place_brings_a_node_of_its_role() -> None:
    config = prepared("ray-cluster-aws.yaml")
    for role in ROLES:
        config["available_node_types"][role]["resources"] |= OF_AN_INSTANCE
    for role in ROLES:
        nine = launched_for(config, application()[role] | {"num_gpus": 1}, count=9)
        minimum = {name: node["min_workers"] for name, node in config["available_node_types"].items()}
        assert nine == {name: count for name, count in (minimum | {role: 2}).items() if count}


def _matches(pattern: str, command_line: str) -> bool:
    return run("grep", "-E", "-q", pattern, input=command_line).returncode == 0


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
    shell = " ".join(_with_interactive(command))
    return run("sh", "-c", shell, env={**os.environ, "HOME": str(folder)}, stdin=subprocess.DEVNULL)


def _executable(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o700)


def launched_for(config: Mapping[str, Any], worker: Mapping[str, Any], count: int) -> dict[str, int]:
    """Return how many nodes of each type Ray's autoscaler starts in an empty cluster for `count` workers."""
    types = AutoscalingConfig(dict(config), skip_content_hash=True)
    demand = {"CPU": worker["threads"], "GPU": worker["num_gpus"], **worker["node_resources"]}
    selector = [
        (name, LabelSelectorOperator.LABEL_OPERATOR_IN, [value]) for name, value in worker["node_labels"].items()
    ]
    actors = [ResourceRequestUtil.make(demand, label_selectors=[selector]) for _ in range(count)]
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=types.get_node_type_configs(),
            max_num_nodes=types.get_max_num_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(actors),
        )
    )
    assert not reply.infeasible_resource_requests
    return {launch.instance_type: launch.count for launch in reply.to_launch}
