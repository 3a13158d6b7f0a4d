"""GPUs that are there are used, and those that stay idle are told of; on a machine whose number of GPUs is given."""

from typing import Any

import pytest

from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.gpus import one_for_each_rank, share_gpus
from twostroke.protocol.errors import ConfigError

TP4 = {role: {"tensor_parallel": 4} for role in ("prefill", "decode")}


def workers(settings: dict[str, Any]) -> tuple[tuple[int, float], tuple[int, float]]:
    """Of both roles: how many there are, and the GPUs of each one's ranks."""
    config = read_config(settings)
    return tuple((config.counts[role].most, config.roles[role].gpus) for role in ("prefill", "decode"))  # type: ignore


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, 0, ((1, 0), (1, 0))),
        ({}, 1, ((0, 0), (1, 1))),
        ({}, 2, ((1, 1), (1, 1))),
        ({}, 8, ((3, 1), (5, 1))),
        ({"prefill": None, "decode": {"num_gpus": "auto"}}, 8, ((3, 1), (5, 1))),
        (TP4, 8, ((1, 1), (1, 1))),
        (TP4, 4, ((0, 0), (1, 1))),
        ({"decode": {"tensor_parallel": 2}}, 5, ((1, 1), (2, 1))),
        ({"prefill": {"replicas": 1}, "decode": {"replicas": 1}}, 1, ((1, 0.5), (1, 0.5))),
        ({"prefill": {"replicas": 0}, "decode": {"replicas": 4}}, 4, ((0, 0), (4, 1))),
        ({"decode": {"replicas": 4}}, 2, ((1, 0.3333), (4, 0.3333))),
        ({"prefill": {"num_gpus": 0}}, 8, ((1, 0), (1, 0))),
        ({"prefill": {"num_gpus": 0.25}, "decode": {"num_gpus": 0.5}}, 1, ((1, 0.25), (1, 0.5))),
        ({"model": {"device": "cpu"}}, 8, ((1, 0), (1, 0))),
    ],
)
def test_gpus_are_shared_out(settings: dict[str, Any], gpus: int, expected: object) -> None:
    assert workers(share_gpus(settings, gpus).settings) == expected


@pytest.mark.parametrize(
    ("settings", "gpus", "idle"),
    [
        ({}, 8, None),
        ({}, 0, None),
        ({"prefill": {"replicas": 1}}, 8, "6 GPUs stay idle: more prefill.replicas"),
        ({"prefill": {"num_gpus": 0}}, 8, "8 GPUs stay idle: the workers are told to take 0 of 8"),
        ({"model": {"device": "cpu"}}, 1, "1 GPU stays idle: model.device is cpu"),
        (TP4, 7, "3 GPUs stay idle: tensor_parallel"),
    ],
)
def test_gpus_that_stay_idle_are_told_of(settings: dict[str, Any], gpus: int, idle: str | None) -> None:
    shared = share_gpus(settings, gpus)
    assert shared.is_idle == (idle is not None)
    assert idle is None or idle in (shared.line or "")


def test_the_autoscaler_has_the_gpus_for_budget() -> None:
    autoscaling = {"enabled": True, "prefill": {"max": 8}, "decode": {"max": 8}}
    shared = share_gpus({"autoscaling": autoscaling}, 4)
    assert read_config(shared.settings).autoscaling.budget == 4
    assert workers(shared.settings) == ((8, 1), (8, 1))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"decode": {"tensor_parallel": 4}}, "decode.tensor_parallel: 4 ranks need as many GPUs, and there are 2"),
        (
            {role: {"tensor_parallel": 2, "replicas": 1} for role in ("prefill", "decode")},
            "4 ranks together, for 2 GPUs",
        ),
    ],
)
def test_too_few_gpus_for_what_is_asked_is_said_before_anything_starts(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        share_gpus(settings, 2)


def test_on_a_cluster_with_gpus_each_rank_has_one_unless_somebody_says_otherwise() -> None:
    assert workers(one_for_each_rank({}, has_gpus=True)) == ((1, 1), (1, 1))
    assert workers(one_for_each_rank({}, has_gpus=False)) == ((1, 0), (1, 0))
    assert workers(one_for_each_rank({"decode": {"num_gpus": 0}}, has_gpus=True)) == ((1, 0), (1, 0))
    assert workers(one_for_each_rank({"decode": {"num_gpus": 0.5}}, has_gpus=True)) == ((1, 1), (1, 0.5))
