"""deploy/serve.yaml, as `serve deploy` and the cluster take it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.deploy.files import DEPLOY, LABEL, ROLES, SETTINGS, serve_config
from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.cluster.deployments.serve_app import build_app
from twostroke.router.http.tenants import new_key


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    """What the file tells the application, with the keys in a file of this test."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"name": "someone", "sha256": new_key()[1]}]}), encoding="utf-8")
    (application,) = serve_config()["applications"]
    told: dict[str, Any] = application["args"]
    return told | {"auth": {"keys_file": str(keys)}}


def config() -> ClusterConfig:
    (application,) = serve_config()["applications"]
    return read_config(application["args"])


def test_serve_takes_the_file() -> None:
    schema = ServeDeploySchema.model_validate(serve_config())
    assert [application.import_path for application in schema.applications] == [
        "twostroke.cluster.deployments.serve_app:build_app"
    ]


def test_the_application_is_built_from_it(arguments: dict[str, Any]) -> None:
    app = build_app(arguments)
    assert app._bound_deployment.name == "Router"


def test_what_the_file_says_of_deployments_is_said_of_ones_that_there_are(arguments: dict[str, Any]) -> None:
    (application,) = serve_config()["applications"]
    (router,) = application["deployments"]
    app = build_app(arguments)
    assert router == {"name": app._bound_deployment.name, "max_replicas_per_node": 1}


def test_two_routers_stand_behind_the_balancer_on_every_node() -> None:
    assert config().router.replicas == 2
    assert serve_config()["proxy_location"] == "EveryNode"
    assert serve_config()["http_options"] == {"host": "0.0.0.0", "port": 8000}


def test_each_role_is_placed_on_nodes_of_its_own() -> None:
    for role, section in zip(ROLES, (config().prefill, config().decode), strict=True):
        assert section.placement.node_labels == {LABEL: role}
        assert section.placement.node_resources == {f"{role}_slot": 1}


def test_cores_are_said_since_who_deploys_knows_his_own_machine_only() -> None:
    assert config().prefill.resources.threads is not None
    assert config().decode.resources.threads is not None


def test_whoever_reaches_it_needs_a_key() -> None:
    assert config().auth.keys_file == str(SETTINGS / "keys.yaml")


def test_a_leaving_router_says_so_for_longer_than_balancers_take_to_look() -> None:
    assert config().router.drain_notice_s >= 5


def test_the_file_holds_no_secret() -> None:
    assert "TWOSTROKE_SECRET=" not in (DEPLOY / "serve.yaml").read_text(encoding="utf-8")
    assert "runtime_env" not in (DEPLOY / "serve.yaml").read_text(encoding="utf-8")


def test_what_pip_installs_on_the_nodes_has_every_package() -> None:
    """A package that pyproject.toml forgets is found in a checkout, and missing on every node."""
    root = DEPLOY.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    tops = {name.split(".")[1] for name in listed}
    there = {
        ".".join(("twostroke", *path.parent.relative_to(root).parts))
        for top in tops
        for path in (root / top).rglob("*.py")
    }
    assert there == set(listed)
