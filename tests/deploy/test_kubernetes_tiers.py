"""Tiers on Kubernetes: the comments of cpu-demo, once they are none, give pods the volumes that tiers name."""

import re
import shutil
from os.path import relpath
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.kubernetes_files import KUBERNETES, of_folder
from tests.deploy.programs import ROOT
from tests.deploy.proxies import adapted
from tests.deploy.test_kubernetes import KUBERAY, kuberay, wrong_with
from tests.deploy.test_kubernetes import KUBERNETES as VERSION
from twostroke.cluster.config.config import read_config
from twostroke.kvtiers.config import TiersConfig

WORKERS = ("prefill", "decode")
MOUNTS = {"kv-disk": "/kv", "kv-shared": "/kv-shared"}


def with_tiers(folder: Path) -> list[dict[str, Any]]:
    """The manifests of cpu-demo with both components and its line of settings."""
    copy = folder / "cpu-demo"
    shutil.copytree(KUBERNETES / "overlays/cpu-demo", copy)
    changes = {
        "kustomization.yaml": {f"  #- ../../components/{name} ": f"  - ../../components/{name} " for name in MOUNTS},
        "serve.yaml": {"      #kv_cache: ": "      kv_cache: "},
    }
    for name, lines in changes.items():
        text = adapted((copy / name).read_text(encoding="utf-8"), lines)
        (copy / name).write_text(text.replace("../../", f"{relpath(KUBERNETES, copy)}/"), encoding="utf-8")
    return list(of_folder(copy))


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = (each for each in found if each["kind"] == kind)
    return one


def tiers_of(service: dict[str, Any]) -> TiersConfig:
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return read_config(application["args"]).tiers


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return with_tiers(tmp_path_factory.mktemp("overlay"))


def test_all_who_read_the_manifests_know_every_field(found: list[dict[str, Any]]) -> None:
    service = of_kind(found, "RayService")
    for version in KUBERAY:
        assert wrong_with(kuberay(version), service) == []
    kubernetes_validate.validate(of_kind(found, "PersistentVolumeClaim"), VERSION, strict=True)
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group["groupName"]}}
        kubernetes_validate.validate(pod | {"spec": group["template"]["spec"]}, VERSION, strict=True)


def test_workers_pods_alone_have_the_volumes_and_tiers_lie_on_them(found: list[dict[str, Any]]) -> None:
    service = of_kind(found, "RayService")
    tiers = tiers_of(service)
    assert tiers.disk.path is not None
    assert tiers.shared.path is not None
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        mounted = {one["mountPath"]: one["name"] for one in container["volumeMounts"] if not one.get("readOnly")}
        if group["groupName"] not in WORKERS:
            assert set(mounted) == {"/tmp", "/home/twostroke", "/var/cache/twostroke"}
            continue
        volumes = {one["name"]: one for one in spec["volumes"]}
        # Workers make the directory itself, and nothing above it.
        disk, shared = (volumes[mounted[str(Path(path).parent)]] for path in (tiers.disk.path, tiers.shared.path))
        assert disk["hostPath"]["type"] == "Directory", "the kubelet would make one of root's"
        claim = of_kind(found, "PersistentVolumeClaim")
        assert shared["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_page_names_the_directory_its_owner_and_what_serve_yaml_says(found: list[dict[str, Any]]) -> None:
    page = (
        (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8").partition("\n## KV tiers\n")[2].partition("\n## ")[0]
    )
    service = of_kind(found, "RayService")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"]
    user = group["securityContext"]["runAsUser"]
    assert f"install -d -o {user} -g {user} -m 700" in page
    assert next(one["hostPath"]["path"] for one in group["volumes"] if "hostPath" in one) in page
    assert {name for name in MOUNTS if f"| `{name}` |" in page} == MOUNTS.keys()
    told = [yaml.safe_load(one)["kv_cache"]["tiers"] for one in re.findall(r"`(kv_cache: {[^`]+)`", page)]
    assert read_config({"kv_cache": {"tiers": {**told[0], **told[1]}}}).tiers == tiers_of(service)
