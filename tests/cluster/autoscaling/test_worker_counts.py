"""How many workers the configuration allows, and what contradicts itself there."""

from typing import Any

import pytest

from twostroke.cluster.config.config import read_config
from twostroke.protocol.errors import ConfigError

SCALED = {"enabled": True, "prefill": {"min": 0, "max": 2}, "decode": {"min": 1, "max": 3}}


def test_without_autoscaling_a_role_has_the_replicas_that_are_asked_for() -> None:
    config = read_config({"prefill": {"replicas": 0}, "decode": {"replicas": 4}, "autoscaling": {"decode": {"max": 2}}})
    assert config.counts == {"prefill": (0, 0, 0), "decode": (4, 4, 4)}
    assert not config.has_prefill


def test_cores_and_memory_are_planned_for_as_many_workers_as_there_may_be() -> None:
    config = read_config({"decode": {"replicas": 2, "tensor_parallel": 2}, "autoscaling": SCALED})
    assert config.counts == {"prefill": (0, 1, 2), "decode": (1, 2, 3)}
    assert (config.num_workers, config.num_ranks) == (5, 2 + 6)


def test_prefill_workers_may_come_later_and_go_again_altogether() -> None:
    assert read_config({"prefill": {"replicas": 0}, "autoscaling": SCALED}).has_prefill


def test_an_aggregated_server_scales_its_decode_workers_alone() -> None:
    config = read_config({"prefill": {"replicas": 0}, "autoscaling": {"enabled": True, "decode": {"max": 3}}})
    assert config.counts == {"prefill": (0, 0, 0), "decode": (1, 1, 3)}
    assert not config.has_prefill


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"decode": {"replicas": 4}, "autoscaling": SCALED},
            r"decode\.replicas: 4, where the autoscaler begins, must be from 1 .* to 3 \(autoscaling\.decode\.max\)",
        ),
        (
            {"prefill": {"replicas": 0}, "autoscaling": {"enabled": True, "prefill": {"min": 1, "max": 2}}},
            r"prefill\.replicas: 0, .* must be from 1",
        ),
        (
            {"autoscaling": SCALED | {"prefill": {"min": 1, "max": 2}, "budget": 1}},
            r"autoscaling\.budget: 1 workers are fewer than the 2 ",
        ),
        (
            {
                "prefill": {"num_gpus": 1},
                "decode": {"num_gpus": 1, "tensor_parallel": 4},
                "autoscaling": SCALED | {"budget": 3},
            },
            r"autoscaling\.budget: 3 GPUs are fewer than the 4 ",
        ),
        ({"autoscaling": {"prefill": {"min": 3, "max": 2}}}, r"autoscaling\.prefill\.min: 3 must be from 0 to max"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(settings)


def test_a_budget_counts_only_where_there_is_an_autoscaler() -> None:
    assert not read_config({"autoscaling": {"budget": 0.5}}).autoscaling.enabled
