"""deploy/kubernetes: who may ask Kubernetes' API, what pods' processes may do, and where TLS ends."""

import asyncio
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.node_provider import IN_CLUSTER_CA_CERT_PATH, IN_CLUSTER_TOKEN_PATH

from tests.deploy.kubernetes_files import KUBERNETES, OVERLAYS, kubernetes_haproxy, of_folder
from tests.deploy.programs import ROOT, needed, run
from tests.deploy.proxies import adapted, started
from tests.deploy.stub_entry import two_entries
from tests.deploy.test_kubernetes import KUBERNETES as VERSION
from tests.deploy.test_kubernetes import container, every_overlay, of_kind, ray_cluster, ray_service, templates
from tests.rigs.processes import comes
from twostroke.cluster.local.ray import free_ports

PATH = "/v1/completions"
WAIT_S = 10.0


def pods(overlay: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The specification of every pod that there will be, by the name of who has it."""
    for name, template in templates(overlay).items():
        yield name, template["spec"]
    for job in of_kind(overlay, "Job"):
        yield job["metadata"]["name"], job["spec"]["template"]["spec"]


def containers(overlay: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in pods(overlay):
        for one in (*pod["containers"], *pod.get("initContainers", ())):
            yield f"{name}/{one['name']}", one


@every_overlay
def test_no_pod_is_given_an_account_of_kubernetes_by_itself(overlay: str) -> None:
    for name, pod in pods(overlay):
        assert pod.get("automountServiceAccountToken") is False, name


@every_overlay
def test_the_autoscaler_alone_asks_kubernetes_and_its_token_is_where_ray_looks_for_it(overlay: str) -> None:
    (mount,) = ray_cluster(overlay)["autoscalerOptions"]["volumeMounts"]
    volumes = ray_cluster(overlay)["headGroupSpec"]["template"]["spec"]["volumes"]
    (volume,) = (one for one in volumes if one["name"] == mount["name"])
    token, authority = volume["projected"]["sources"]
    (item,) = authority["configMap"]["items"]
    found = [f"{mount['mountPath']}/{path}" for path in (token["serviceAccountToken"]["path"], item["path"])]
    assert found == [IN_CLUSTER_TOKEN_PATH, IN_CLUSTER_CA_CERT_PATH]
    assert authority["configMap"]["name"] == "kube-root-ca.crt"  # Kubernetes puts it into every namespace
    for name, one in containers(overlay):
        assert mount["name"] not in [own["name"] for own in one.get("volumeMounts", ())], name


@every_overlay
def test_no_container_gains_rights_and_nor_does_the_autoscalers_that_kuberay_makes(overlay: str) -> None:
    contexts = {name: one["securityContext"] for name, one in containers(overlay)}
    for name, context in (
        contexts | {"autoscaler": ray_cluster(overlay)["autoscalerOptions"]["securityContext"]}
    ).items():
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
    for name, pod in pods(overlay):
        assert pod["securityContext"]["runAsNonRoot"] is True, name


@every_overlay
def test_containers_write_into_volumes_alone(overlay: str) -> None:
    for name, one in containers(overlay):
        assert one["securityContext"]["readOnlyRootFilesystem"] is True, name
    for name, pod in pods(overlay):
        for one in pod["containers"]:
            mounted = {mount["mountPath"] for mount in one.get("volumeMounts", ()) if not mount.get("readOnly")}
            if one["name"].startswith("ray-"):  # the image's TRITON_CACHE_DIR and home, and Ray's folder
                assert mounted >= {"/tmp", "/home/twostroke", "/var/cache/twostroke"}, name
            assert {mount["name"] for mount in one.get("volumeMounts", ())} <= {
                volume["name"] for volume in pod["volumes"]
            }, name


# --- TLS ---

ENDS_TLS = tuple(
    name
    for name in OVERLAYS
    if "components/load-balancer" in (KUBERNETES / "overlays" / name / "kustomization.yaml").read_text(encoding="utf-8")
)
"""Overlays with a balancer of ours. In front of the others is a Gateway of KubeRay's."""


def with_tls(overlay: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The overlay once its commented line of TLS is none any more, by kind and name."""
    copy = folder / overlay
    shutil.copytree(KUBERNETES / "overlays" / overlay, copy)
    file = copy / "kustomization.yaml"
    text = adapted(file.read_text(encoding="utf-8"), {"  #- ../../components/tls": "  - ../../components/tls"})
    file.write_text(text.replace("../../", f"{relpath(KUBERNETES, copy)}/"), encoding="utf-8")
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in of_folder(copy)}


@pytest.mark.parametrize("overlay", ENDS_TLS)
def test_an_overlay_with_tls_listens_on_443_alone_and_asks_itself_by_https(overlay: str, tmp_path: Path) -> None:
    found = with_tls(overlay, tmp_path)
    service, deployment = found["Service/twostroke"], found["Deployment/twostroke-haproxy"]
    for one in (service, deployment):
        kubernetes_validate.validate(one, VERSION, strict=True)
    pod = deployment["spec"]["template"]["spec"]
    (port,) = container({"spec": pod})["ports"]
    assert service["spec"]["ports"] == [{"name": "https", "port": 443, "targetPort": port["name"]}]
    assert f"bind :{port['containerPort']} ssl" in kubernetes_haproxy()
    (haproxy,) = pod["containers"]
    assert haproxy["readinessProbe"]["httpGet"] == {"path": "/ready", "port": port["name"], "scheme": "HTTPS"}
    assert haproxy["livenessProbe"]["tcpSocket"] == {"port": port["name"]}
    assert {one["name"] for one in haproxy["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_the_page_says_of_every_overlay_where_its_tls_ends_and_a_gateway_of_kuberays_is_not_the_place() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    told = page.partition("\n## TLS\n")[2].partition("\n## ")[0]
    for overlay in OVERLAYS:
        row = next(line for line in told.splitlines() if line.startswith("| ") and f"`{overlay}`" in line)
        gateway = ray_service(overlay)["spec"]["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
        assert ("components/tls" in row, "in front" in row) == ((False, True) if gateway else (True, False)), overlay
    assert set(ENDS_TLS) < set(OVERLAYS)


def test_the_example_for_cert_manager_makes_the_secret_that_the_pods_mount(tmp_path: Path) -> None:
    example = yaml.safe_load((KUBERNETES / "components/tls/certificate.yaml").read_text(encoding="utf-8"))
    found = with_tls("cpu-demo", tmp_path)["Deployment/twostroke-haproxy"]
    (secret,) = (one["secret"] for one in found["spec"]["template"]["spec"]["volumes"] if one["name"] == "tls")
    assert example["spec"]["secretName"] == secret["secretName"]
    assert [item["key"] for item in secret["items"]] == ["tls.crt", "tls.key"]  # as in every kubernetes.io/tls
    assert example["metadata"]["namespace"] == found["metadata"]["namespace"]
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert f"create secret tls {secret['secretName']} " in page


def issue(folder: Path, name: str) -> bytes:
    """A new certificate for localhost with its key, as the pod's volume has them; returns the certificate."""
    certificate, key = folder / "new", folder / "new.key"
    run(
        *(needed("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"),
        *("-out", str(certificate), "-keyout", str(key)),
        check=True,
    )
    key.rename(folder / "twostroke.pem.key")
    certificate.rename(folder / "twostroke.pem")
    return (folder / "twostroke.pem").read_bytes()


async def test_the_pods_haproxy_ends_tls_and_takes_a_renewed_certificate_in_while_its_streams_go_on(
    tmp_path: Path,
) -> None:
    """The very command, configuration and environment of the rendered pod, but for ports, folders and patience."""
    program = needed("haproxy")
    haproxy = with_tls("cpu-demo", tmp_path)["Deployment/twostroke-haproxy"]["spec"]["template"]["spec"]["containers"][
        0
    ]
    clients, operators = free_ports(2)
    mounted = tmp_path / "twostroke-tls"
    mounted.mkdir()
    first = issue(mounted, "first")
    async with two_entries() as (one, two):
        servers = f"    server one 127.0.0.1:{one.port}\n    server two 127.0.0.1:{two.port}"
        config = adapted(
            re.sub(r"    # HAProxy's resolvers .*\n    server-template .*", servers, kubernetes_haproxy()),
            {
                "bind :8443": f"bind 127.0.0.1:{clients}",
                "127.0.0.1:8081": f"127.0.0.1:{operators}",
                "/etc/twostroke-tls": str(mounted),
                "stats socket /run/haproxy-twostroke.sock": f"stats socket {tmp_path}/haproxy.sock",
                "inter 1s fastinter 500ms": "inter 50ms fastinter 50ms",
            },
        )
        file = tmp_path / "haproxy.cfg"
        file.write_text(config, encoding="utf-8")
        (script,) = haproxy["args"]
        changes = {
            "haproxy -W": f"{program} -W",
            "/usr/local/etc/haproxy/haproxy.cfg": str(file),
            "sleep 30": "sleep 0.1",
        }
        script = adapted(script, changes | {"/etc/twostroke-tls": str(mounted)})
        variables = [f"{variable['name']}={variable['value']}" for variable in haproxy["env"] if "value" in variable]
        command = ["env", *variables, *haproxy["command"], script]
        balancer = started(command, (clients, operators), tmp_path / "log")
        shell = await asyncio.to_thread(balancer.__enter__)
        try:
            one.manner = two.manner = "stream"
            async with client(clients, first) as trusting, trusting.stream("POST", PATH, json={}) as answer:
                assert answer.headers["strict-transport-security"]
                assert await comes(lambda: one.asked or two.asked, WAIT_S)
                entry, other = (one, two) if one.asked else (two, one)
                assert entry.asked[0].headers["x-forwarded-proto"] == "https"
                one.manner = two.manner = "answer"
                second = issue(mounted, "second")
                async with client(clients, second) as renewed:
                    assert await comes_true(renewed)
                    assert (await renewed.post(PATH, json={})).text in (entry.name, other.name)
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    async with client(clients, first) as stale:
                        await stale.get("/ready")
                async with httpx.AsyncClient() as plain:
                    with pytest.raises(httpx.TransportError):
                        await plain.post(f"http://127.0.0.1:{clients}{PATH}", json={})
                hook = haproxy["lifecycle"]["preStop"]["exec"]["command"][-1]
                assert "kill -USR1 1;" in hook
                shell.send_signal(signal.SIGUSR1)  # it is the pod's process 1
                assert await comes(lambda: not listens(clients), WAIT_S)
                entry.events.put_nowait(b"data: still here\n\n")
                entry.events.put_nowait(None)
                assert await answer.aread() == b"data: still here\n\n"
            assert await asyncio.to_thread(shell.wait, WAIT_S) == 0
        finally:
            await asyncio.to_thread(balancer.__exit__, None, None, None)


def test_a_haproxy_that_fails_fails_its_container(tmp_path: Path) -> None:
    deployment = with_tls("cpu-demo", tmp_path)["Deployment/twostroke-haproxy"]
    haproxy = deployment["spec"]["template"]["spec"]["containers"][0]
    (script,) = haproxy["args"]
    command = "haproxy -W -db -f /usr/local/etc/haproxy/haproxy.cfg"
    script = adapted(script, {command: "exit 3", "sleep 30": "sleep 0.1", "/etc/twostroke-tls": str(tmp_path)})
    assert subprocess.run([*haproxy["command"], script], check=False, timeout=WAIT_S).returncode == 3


def client(port: int, certificate: bytes) -> httpx.AsyncClient:
    """Return a client that trusts this certificate and no other."""
    trusted = ssl.create_default_context(cadata=certificate.decode())
    return httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=trusted, timeout=WAIT_S)


def listens(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0


async def comes_true(renewed: httpx.AsyncClient) -> bool:
    """Return true once the server has the certificate that this client trusts. Raises TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return (await renewed.get("/ready")).status_code == 200
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
