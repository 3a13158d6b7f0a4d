"""`node_labels` and `node_resources` reach the options of Ray Serve."""

import pytest
from ray._private.label_utils import validate_label_selector
from ray.serve._private.config import ReplicaConfig

from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.sections import Placement
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.deployments.router import router_options
from twostroke.cluster.deployments.workers import worker_options
from twostroke.cluster.local.server import check_is_anywhere
from twostroke.protocol.errors import ConfigError

PLACE = {"node_labels": {"twostroke-role": "decode"}, "node_resources": {"decode_slot": 1}}


class Replica:
    """Something for Serve to check the options of."""


def test_a_worker_asks_for_the_nodes_labels_and_once_for_its_resources() -> None:
    config = read_config({"decode": {"threads": 2, "tensor_parallel": 2, **PLACE}})
    options = worker_options(WorkerSettings.of(config, config.decode), config.decode, grace_s=1.0)["ray_actor_options"]
    place = {"label_selector": {"twostroke-role": "decode"}, "resources": {"decode_slot": 1.0}}
    assert options == {"num_cpus": 4, "num_gpus": 0.0, **place}
    ReplicaConfig.create(Replica, ray_actor_options=options)


def test_a_router_may_be_placed_too() -> None:
    config = read_config({"router": {"node_labels": {"twostroke-role": "in(router, head)"}}})
    assert router_options(config.router)["ray_actor_options"]["label_selector"] == {
        "twostroke-role": "in(router, head)"
    }


@pytest.mark.parametrize(
    "labels",
    [
        {"twostroke-role": "prefill"},
        {"ray.io/accelerator-type": "!H100"},
        {"zone": "in(a, b-2)"},
        {"zone": "!in(a,b)"},
        {"9._a": "x"},
    ],
)
def test_labels_that_are_allowed_are_allowed_by_ray(labels: dict[str, str]) -> None:
    assert Placement(node_labels=labels).actor_options() == {"label_selector": labels}
    assert validate_label_selector(labels) is None


@pytest.mark.parametrize(
    "labels",
    [
        {"-role": "a"},
        {"role": "a b"},
        {"role": "in()"},
        {"role": "in(a"},
        {"ro le": "a"},
        {"a" * 64: "b"},
        {"a": "!!b"},
    ],
)
def test_labels_that_ray_refuses_are_refused_before(labels: dict[str, str]) -> None:
    assert validate_label_selector(labels) is not None
    with pytest.raises(ValueError, match="node_labels: "):
        Placement(node_labels=labels)


@pytest.mark.parametrize(
    ("raw", "setting"),
    [
        ({"decode": {"node_labels": {"role": "a"}}}, "decode.node_labels"),
        ({"prefill": {"node_resources": {"slot": 1}}}, "prefill.node_resources"),
        ({"router": {"node_labels": {"role": "a"}}}, "router.node_labels"),
    ],
)
def test_a_server_on_one_machine_refuses_to_wait_for_nodes(raw: dict[str, object], setting: str) -> None:
    check_is_anywhere(read_config({}))
    with pytest.raises(ConfigError, match=rf"^{setting}: `twostroke serve` has this machine alone"):
        check_is_anywhere(read_config(raw))
