"""What the configuration's `tensor_parallel` makes of a worker's place, its share of cores, and its settings."""

from pathlib import Path

import pytest

from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.deployments.worker_parts import check_step_size
from twostroke.cluster.ranks.tensor_parallel_ranks import rank_options
from twostroke.protocol.errors import ConfigError


def test_each_rank_has_a_bundle_of_its_own_on_one_machine() -> None:
    config = read_config({"decode": {"tensor_parallel": 4, "threads": 3}})
    options = rank_options(WorkerSettings.of(config, config.decode), config.decode)
    assert options["placement_group_bundles"] == [{"CPU": 3}] * 4
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"]["num_cpus"] == 3


def test_each_rank_has_a_gpu_and_sees_the_others() -> None:
    gpus = {"tensor_parallel": 2, "num_gpus": 1, "threads": 1}
    config = read_config({"prefill": gpus, "decode": gpus})
    options = rank_options(WorkerSettings.of(config, config.decode), config.decode)
    assert options["placement_group_bundles"] == [{"CPU": 1, "GPU": 1.0}] * 2
    env = options["ray_actor_options"]["runtime_env"]["env_vars"]
    assert env == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def test_a_worker_of_one_rank_needs_no_placement_group() -> None:
    config = read_config({"decode": {"threads": 2}})
    options = rank_options(WorkerSettings.of(config, config.decode), config.decode)
    assert options == {"ray_actor_options": {"num_cpus": 2, "num_gpus": 0.0}}


def test_ranks_share_the_machines_cores_as_workers_do() -> None:
    config = read_config({"prefill": {"tensor_parallel": 2}, "decode": {"tensor_parallel": 8, "replicas": 60}})
    assert config.num_ranks == 2 + 480
    assert config.threads(config.decode) == 1


def test_the_engine_is_told_its_ranks() -> None:
    config = read_config({"prefill": {"tensor_parallel": 2}})
    assert WorkerSettings.of(config, config.prefill).engine_config(Path(), gpu=1).tensor_parallel == 2
    assert WorkerSettings.of(config, config.decode).engine_config(Path()).tensor_parallel == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tensor_parallel": 3}, "prefill.tensor_parallel: 3 is none of 1, 2, 4, 8"),
        ({"tensor_parallel": 16}, "prefill.tensor_parallel: 16 must be from 1 to 8"),
        ({"tensor_parallel": 2, "num_gpus": 0.5}, "prefill.num_gpus: 0.5 for each of 2 tensor-parallel ranks"),
    ],
)
def test_what_ranks_can_not_be_is_told(section: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({"prefill": section})


def test_steps_that_no_message_could_hold_are_refused() -> None:
    config = read_config({"decode": {"tensor_parallel": 2}, "model": {"block_size": 16}})
    settings = WorkerSettings.of(config, config.decode)
    check_step_size(settings, max_context=32_768, host_blocks=10_000)
    with pytest.raises(ConfigError, match="max_batch: steps of 256 requests with 131072 tokens in blocks of 16"):
        check_step_size(settings, max_context=131_072, host_blocks=0)
    with pytest.raises(ConfigError, match="max_context or swap_gib"):
        check_step_size(settings, max_context=32_768, host_blocks=1_000_000)
