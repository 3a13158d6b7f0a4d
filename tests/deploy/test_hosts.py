"""The files of a host (ray.env, serve.yaml, systemd units, the image) agree with their readers and each other."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from packaging.utils import canonicalize_name
from ray.serve.schema import ServeDeploySchema

from tests.deploy.programs import (
    DEPLOY,
    INSTALLED,
    LABEL,
    ROLES,
    ROOT,
    SETTINGS,
    application,
    of_pip,
    ray_env,
    run,
    serve_config,
    text_of,
)
from tests.rigs.nodes.ray_nodes import HEADLESS_S
from twostroke.cluster.commands.serve import REQUIRE_KEYS
from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.cluster.deployments.haproxy import BINARY_VARIABLE
from twostroke.cluster.deployments.proxies import HAPROXY_SWITCHES, SWITCHES, forgotten_switches
from twostroke.cluster.deployments.serve_app import build_app
from twostroke.router.http.tenants import new_key

# --- ray.env: what Ray's processes find in their environment, wherever they are started from ---


def test_ray_env_has_every_switch_that_replicas_count_on_and_no_secret() -> None:
    assert forgotten_switches(ray_env()) is None
    assert {**SWITCHES, **HAPROXY_SWITCHES}.items() <= ray_env().items()
    assert ray_env()["RAY_AUTH_MODE"] == "token"
    assert not {"RAY_AUTH_TOKEN", "TWOSTROKE_SECRET"} & ray_env().keys()


def test_haproxy_is_started_by_the_script_that_the_project_installs() -> None:
    script = Path(ray_env()[BINARY_VARIABLE])
    assert script.parent == INSTALLED / "bin"
    assert project()["scripts"][script.name] == "twostroke.cluster.deployments.haproxy:main"


def test_a_shell_reads_ray_env_as_systemd_and_docker_do_and_each_switch_says_why_it_is_there() -> None:
    """No quotes, no expansions, no spaces: what takes these apart differs."""
    is_explained = False
    for line in text_of("ray.env").splitlines():
        assert re.fullmatch(r"|#.*|[A-Za-z_]+=[\w:./-]+", line), line
        assert is_explained or not line or line.startswith("#"), line
        is_explained = line.startswith("#") or bool(line and is_explained)
    told = run("sh", "-c", f"set -a; . {DEPLOY}/ray.env; set +a; exec env", env={}).stdout
    assert ray_env().items() <= dict(line.split("=", 1) for line in told.splitlines()).items()


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


# --- serve.yaml, as `serve deploy` and the cluster take it ---


def config() -> ClusterConfig:
    return read_config(application())


def test_the_application_is_built_from_serve_yaml(tmp_path: Path) -> None:
    schema = ServeDeploySchema.model_validate(serve_config())
    assert [one.import_path for one in schema.applications] == ["twostroke.cluster.deployments.serve_app:build_app"]
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"name": "someone", "sha256": new_key()[1]}]}), encoding="utf-8")
    app = build_app(application() | {"auth": {"keys_file": str(keys)}})
    ((router,),) = (one["deployments"] for one in serve_config()["applications"])
    assert router == {"name": app._bound_deployment.name, "max_replicas_per_node": 1}
    assert app._bound_deployment.name == "Router"


def test_two_routers_stand_behind_the_balancer_on_every_node() -> None:
    assert config().router.replicas == 2
    assert serve_config()["proxy_location"] == "EveryNode"
    assert serve_config()["http_options"] == {"host": "0.0.0.0", "port": 8000}
    assert config().router.drain_notice_s >= 5  # a leaving router says so for longer than balancers take to look


def test_each_role_is_placed_on_nodes_of_its_own_with_cores_of_theirs() -> None:
    for role, section in zip(ROLES, (config().prefill, config().decode), strict=True):
        assert section.node_labels == {LABEL: role}
        assert section.node_resources == {f"{role}_slot": 1}
        assert section.threads is not None  # who deploys knows his own machine only


def test_whoever_reaches_it_needs_a_key_and_the_file_holds_no_secret() -> None:
    assert config().auth.keys_file == str(SETTINGS / "keys.yaml")
    assert "TWOSTROKE_SECRET=" not in text_of("serve.yaml")
    assert "runtime_env" not in text_of("serve.yaml")


# --- the systemd units, by systemd's own checks, and against what they start ---

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
RAYS_START_S = 60.0  # of `ray start`, where it fails
MOST_EXPOSURE = 4.0  # systemd's own measure: below 5 is "OK", 10 is a unit without any restriction


def values(unit: Path, name: str) -> list[str]:
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


@needs_systemd
def test_systemd_finds_nothing_wrong(installed: list[Path]) -> None:
    done = run("systemd-analyze", "verify", "--man=no", *map(str, installed))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("name", [one.name for one in UNITS])
def test_what_runs_can_do_little_beside(name: str, installed: list[Path]) -> None:
    (path,) = (copy for copy in installed if copy.name == name)
    done = run("systemd-analyze", "security", "--offline=true", str(path))
    rated = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert rated is not None, done.stdout + done.stderr
    assert float(rated[1]) < MOST_EXPOSURE


def test_every_unit_has_rays_environment_and_the_secrets() -> None:
    for one in UNITS:
        assert values(one, "EnvironmentFile")[:2] == [f"{SETTINGS}/ray.env", f"{SETTINGS}/secret.env"], one.name


def test_a_worker_node_has_its_instances_role_as_label_and_resource() -> None:
    (start,) = values(unit("twostroke-ray-worker@"), "ExecStart")
    assert f"--labels={LABEL}=%i" in start
    assert """'--resources={"%i_slot": ${SLOTS}}'""" in start
    assert {role for role in ROLES if role in unit("twostroke-ray-worker@").read_text(encoding="utf-8")} == set(ROLES)


def test_a_worker_node_is_given_the_time_to_take_its_replicas_elsewhere() -> None:
    (stop_s,) = values(unit("twostroke-ray-worker@"), "TimeoutStopSec")
    assert int(stop_s) > float(ray_env()["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) + 10
    assert values(unit("twostroke-ray-worker@"), "KillMode") == ["mixed"]


def test_the_application_lets_streams_end_before_it_is_shut_down_and_has_the_time() -> None:
    (drain,) = values(unit("twostroke-serve"), "ExecStop")
    (shutdown,) = values(unit("twostroke-serve"), "ExecStopPost")
    assert "/twostroke drain " in drain
    assert "/serve shutdown " in shutdown
    grace_s, notice_s = (float(re.findall(rf"--{name} (\d+)", drain)[0]) for name in ("grace", "notice"))
    assert notice_s < grace_s
    shutdown_s = 30  # Serve's own limit for that command
    assert int(values(unit("twostroke-serve"), "TimeoutStopSec")[0]) > grace_s + shutdown_s


def test_the_application_s_unit_is_active_only_once_it_runs() -> None:
    for when in ("ExecStart", "ExecReload"):
        deploy, wait = values(unit("twostroke-serve"), when)
        assert "/serve deploy " in deploy
        assert "/twostroke await " in wait
        waits_s = float(re.findall(r"--timeout (\d+)", wait)[0])
        assert int(values(unit("twostroke-serve"), "TimeoutStartSec")[0]) > waits_s


def test_the_head_may_have_its_state_in_a_redis_and_is_waited_for() -> None:
    head = unit("twostroke-ray-head")
    assert values(head, "EnvironmentFile")[-1] == f"-{SETTINGS}/redis.env"  # or none
    (start,) = values(head, "ExecStart")
    assert "--redis-password=${RAY_REDIS_PASSWORD} " in start
    restart_s = float(values(head, "RestartSec")[0]) + RAYS_START_S
    assert float(ray_env()["RAY_gcs_rpc_server_reconnect_timeout_s"]) == HEADLESS_S > 3 * restart_s


def test_the_head_listens_for_its_dashboard_on_itself_alone() -> None:
    (start,) = values(unit("twostroke-ray-head"), "ExecStart")
    assert "--dashboard-host=127.0.0.1" in start


# --- the image, by a linter where there is one, and what is installed everywhere ---

DEPLOYED = [
    str(path.relative_to(DEPLOY))
    for path in sorted(DEPLOY.rglob("*"))
    if path.suffix in ("", ".yaml") and path.is_file()
]
DOCKERFILE = re.sub(r"\\\n", "", text_of("Dockerfile"))


def instructions(name: str) -> list[str]:
    """Return the arguments of this instruction, with continued lines joined."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, flags=re.MULTILINE)


def test_the_linter_finds_nothing() -> None:
    done = run(of_pip("hadolint"), str(DEPLOY / "Dockerfile"))
    assert (done.returncode, done.stdout) == (0, "")


def test_the_images_environment_is_that_of_ray_env() -> None:
    environment = dict(part.split("=", 1) for line in instructions("ENV") for part in line.split())
    assert {name: environment.get(name) for name in ray_env()} == ray_env()
    assert environment[REQUIRE_KEYS] == "1"
    assert {name for name in environment if name.startswith("RAY_")} == ray_env().keys()
    assert environment["PATH"].startswith(f"{INSTALLED}/bin:")


def project() -> dict[str, Any]:
    """The project's section of pyproject.toml, with the packages that are listed there."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return read["project"] | {"packages": read["tool"]["setuptools"]["packages"]}


def test_the_image_takes_what_pip_installs_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    taken = {line[1:] for line in ignored if line.startswith("!")}
    packages = {name.split(".")[1] for name in project()["packages"]}
    assert "*" in ignored
    assert taken == packages | {"pyproject.toml", "constraints.lock", "README.md", "LICENSE"}


def test_what_pip_installs_on_the_nodes_has_every_package() -> None:
    """A package that pyproject.toml forgets is found in a checkout, and missing on every node."""
    tops = {name.split(".")[1] for name in project()["packages"]}
    there = {
        ".".join(("twostroke", *path.parent.relative_to(ROOT).parts))
        for top in tops
        for path in (ROOT / top).rglob("*.py")
    }
    assert there == set(project()["packages"])


def test_what_is_installed_is_pinned_by_the_versions_that_tests_passed_with() -> None:
    built, install = (line for line in instructions("RUN") if "pip install" in line)
    assert "--require-hashes" in built
    assert "pip wheel --no-cache-dir --no-deps --no-build-isolation" in built  # by the setuptools of the lock
    steps = [step for step in install.split("&&") if "pip install" in step]
    of_uv, of_torch, of_all = steps
    assert "--require-hashes" in of_uv
    assert "--index-url" in of_torch
    assert "--constraint constraints.lock" in of_all
    assert "--extra-index-url" not in install
    assert all("--no-build" in step or "--only-binary :all:" in step for step in steps)


def test_the_lock_has_hashes_of_every_pinned_version() -> None:
    pins = {line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")}
    locked = re.findall(
        r"^(\S+==\S+)[^\n]*\\\n    --hash=sha256:[0-9a-f]{64}", (ROOT / "constraints.lock").read_text(), re.M
    )
    assert sorted(map(canonical, locked)) == sorted(map(canonical, pins))


def canonical(pin: str) -> str:
    name, _, version = pin.partition("==")
    return f"{canonicalize_name(name)}=={version.partition(' ')[0].rstrip(';')}"


def test_the_image_has_the_wheel_and_its_tags_the_version() -> None:
    built, installed = (line for line in instructions("RUN") if re.search(r"pip (wheel|install)", line))
    assert "pip wheel" in built
    assert "/wheels/twostroke-*.whl" in installed
    tags = re.findall(r"twostroke:(\d+\.\d+\.\d+)|newTag: (\d+\.\d+\.\d+)", "".join(map(text_of, DEPLOYED)))
    assert {"".join(pair) for pair in tags} == {project()["version"]}


def test_nobody_in_the_image_is_root() -> None:
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[2:]:
        users = re.findall(r"^USER (.*)$", stage, flags=re.MULTILINE)
        assert users[-1:] in ([], ["1000"])


def test_each_kind_of_device_is_a_stage() -> None:
    assert {stage.rpartition(" AS ")[2] for stage in instructions("FROM")} >= {"cpu", "gpu", "${DEVICE}"}
