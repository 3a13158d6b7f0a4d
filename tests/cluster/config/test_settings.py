"""YAML to sections: every wrong setting is named by its path."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, NonNegativeFloat, model_validator

from twostroke.cluster.config.config import ClusterConfig, api_keys, check_keys, lay_over, read_config
from twostroke.cluster.config.reading import load_yaml, read_settings
from twostroke.cluster.config.sections import parse_cores
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.deployments.router import RouterSettings
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import Section
from twostroke.router.http.tenants import KeyConfig
from twostroke.router.slo.classes import SLOClass

NO_SECTION = "stands where a section should: write `name: value` lines under it"


class Inner(Section):
    speed: NonNegativeFloat = 1.0

    @model_validator(mode="after")
    def _check_speed(self) -> "Inner":
        if self.speed == 13:
            raise ValueError("speed 13 can't be meant")
        if self.speed == 14:
            raise ValueError("speed: 14 can't be meant")
        return self


class Beside(Section):
    weight: Annotated[float, Gt(0), Lt(5)] = 1.0


class Outer(Beside):
    name: str
    count: Annotated[int, Ge(1), Le(9)] | None = None
    mode: Literal["fast", "slow"] = "slow"
    inner: Inner = Field(default_factory=Inner)
    many: tuple[Inner, ...] = Field(default=(), strict=False)
    labels: Mapping[str, Annotated[float, Ge(2)]] = Field(default_factory=dict)


def test_values_land_in_their_sections_and_a_part_is_told_its_own() -> None:
    raw = {"name": "x", "count": 3, "inner": {"speed": 2}, "weight": 2, "many": [{"speed": 3}, {}], "labels": None}
    raw.pop("labels")
    whole = read_settings(Outer, raw)
    assert whole == Outer(
        name="x", count=3, inner=Inner(speed=2.0), weight=2.0, many=(Inner(speed=3.0), Inner()), mode="slow"
    )
    assert whole.part(Beside) == Beside(weight=2.0)
    assert read_settings(Outer, {"name": "x", "inner": None}) == Outer(name="x")  # all of its lines commented out


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "name: is required"),
        ({"name": 3}, "name: 3 should be a valid string"),
        ({"name": "x", "count": 10}, "count: 10 should be less than or equal to 9"),
        ({"name": "x", "count": True}, "count: True should be a valid integer"),
        ({"name": "x", "count": 2.0}, "count: 2.0 should be a valid integer"),
        ({"name": "x", "mode": "fest"}, "mode: 'fest' should be 'fast' or 'slow'"),
        ({"name": "x", "inner": {"spede": 1}}, "inner.spede: there is no such setting; did you mean speed?"),
        ({"name": "x", "inner": {"zzz": 1}}, "inner.zzz: there is no such setting; known are speed"),
        ({"name": "x", "inner": {"speed": float("nan")}}, "inner.speed: nan should be a finite number"),
        ({"name": "x", "inner": {"speed": -0.5}}, "inner.speed: -0.5 should be greater than or equal to 0"),
        ({"name": "x", "inner": {"speed": 13}}, "inner: speed 13 can't be meant"),
        ({"name": "x", "many": {"speed": 3}}, "many: {'speed': 3} should be a valid tuple"),
        ({"name": "x", "many": [{"speed": 3}, 4]}, f"many[1]: 4 {NO_SECTION}"),
        ({"name": "x", "inner": {"speed": 14}}, "inner.speed: 14 can't be meant"),
        (
            {"name": "x", "many": [{"speed": 3}, {"speed": -1}]},
            "many[1].speed: -1 should be greater than or equal to 0",
        ),
        ({"name": "x", "weight": 5}, "weight: 5 should be less than 5"),
        ({"name": "x", "labels": {"a": 1}}, "labels.a: 1 should be greater than or equal to 2"),
        ({"name": "x", "labels": {"a": "1"}}, "labels.a: '1' should be a valid number"),
        ({"name": "x", "labels": {3: 4}}, "labels[3]: 3 should be a valid string"),
        ({"name": "x", "labels": [4]}, "labels: [4] should be a valid dictionary"),
        ({"name": "x", 3: 4}, "3: there is no such setting; known are count, inner, labels, many, mode, name, weight"),
        ({"name": "x", "many": [{"spede": 3}]}, "many[0].spede: there is no such setting; did you mean speed?"),
        ({"name": "x", "inner": [1]}, f"inner: [1] {NO_SECTION}"),
        ("text", f"the configuration: 'text' {NO_SECTION}"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(raw: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(Outer, raw)
    assert str(caught.value) == message


def test_tokens_may_be_written_as_a_flag_takes_them() -> None:
    config = read_config({"model": {"max_context": "8k"}, "prefill": {"max_step_tokens": "4K"}})
    assert (config.model.max_context, config.prefill.worker.max_step_tokens) == (8000, 4096)
    with pytest.raises(ConfigError, match=r"^model\.max_context: '8kb' is no number of tokens: write 8192, 8k or 8K$"):
        read_config({"model": {"max_context": "8kb"}})


@pytest.mark.parametrize("written", [4, "4", 4.0])
def test_bytes_that_were_meant_in_another_unit_are_refused(written: object) -> None:
    """vLLM's flag for the same counts GiB."""
    with pytest.raises(ConfigError) as caught:
        read_config({"kv_cache": {"tiers": {"host_bytes": written}}})
    assert str(caught.value) == f"kv_cache.tiers.host_bytes: {written} would be bytes: write a unit, such as 4GiB"
    assert read_config({"kv_cache": {"tiers": {"host_bytes": 2**30}}}).kv_cache.tiers.host_bytes == 2**30


def test_an_empty_file_is_the_default_cluster(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert read_config(load_yaml(path)) == ClusterConfig()


def test_the_consumers_settings_stand_in_their_sections() -> None:
    config = read_config(
        {
            "prefill": {"replicas": 0, "max_step_tokens": 300},
            "decode": {"max_batch": 8, "token_channel": {"lease_s": 20}},
            "router": {"retries": 1},
            "kv_transfer": {"transport": "torch_distributed", "lease_s": 2.5},
        }
    )
    assert config.prefill.replicas == 0
    assert config.prefill.worker.max_step_tokens == 300
    assert config.decode.worker.max_batch == 8
    assert config.decode.worker.token_channel.lease_s == 20
    assert config.router.pipeline.retries == 1
    assert config.kv_transfer.lease_s == 2.5


def test_a_role_may_hold_the_model_in_its_own_way() -> None:
    config = read_config(
        {
            "model": {"quantization": "int8", "dtype": "bfloat16", "max_context": 512},
            "prefill": {"quantization": "none"},
            "decode": {"quantization": "int4", "num_blocks": 64},
        }
    )
    held = {role: WorkerSettings.of(config, section).model for role, section in config.roles.items()}
    assert [held[role].quantization for role in ("prefill", "decode")] == ["none", "int4"]
    assert {(one.dtype, one.max_context) for one in held.values()} == {("bfloat16", 512)}
    assert WorkerSettings.of(config, config.decode).engine_config(Path("m")).quantization == "int4"
    assert config.model_section(read_config({}).decode) == config.model


def test_kv_in_fp8_is_not_encoded_once_more() -> None:
    raw = {"model": {"kv_cache_dtype": "fp8"}, "kv_transfer": {"encoding": "int8"}}
    with pytest.raises(ConfigError, match=r"^kv_transfer\.encoding: int8 beside model\.kv_cache_dtype fp8, .* to raw"):
        read_config(raw)
    assert read_config({**raw, "kv_transfer": None}).model.kv_cache_dtype == "fp8"


def test_roles_that_exchange_kv_have_one_dtype() -> None:
    raw = {"model": {"dtype": "bfloat16"}, "prefill": {"dtype": "float32"}}
    with pytest.raises(
        ConfigError, match=r"^prefill\.dtype: float32 beside decode\.dtype bfloat16: .* give them the s"
    ):
        read_config(raw)
    assert read_config({"prefill": {"dtype": "float32", "replicas": 0}}).prefill.dtype == "float32"
    assert read_config({**raw, "decode": {"dtype": "float32"}}).model.dtype == "bfloat16"


def test_an_option_goes_before_what_a_file_says_of_one_role() -> None:
    raw = {"decode": {"quantization": "int4", "replicas": 2}, "prefill": None, "model": {"dtype": "float32"}}
    lay_over(raw, dtype=None, quantization="int8")
    assert raw == {
        "decode": {"replicas": 2},
        "prefill": None,
        "model": {"dtype": "float32", "quantization": "int8"},
    }


CLASSES = {
    "classes": [
        {"name": "interactive", "ttft_s": 0.5, "tpot_s": 0.05, "priority": 10, "share": 0.3},
        {"name": "batch"},
    ],
    "default": "batch",
}
KEY = {"name": "a", "sha256": "ab" * 32}
ONE_TO_TWO = {"min": 1, "max": 2}
SCALED = {"enabled": True, "prefill": {"min": 0, "max": 2}, "decode": {"min": 1, "max": 3}}
GPUS = {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1, "tensor_parallel": 4}}


@pytest.mark.parametrize(
    ("raw", "beginning"),
    [
        ({"prefil": {}}, "prefil: there is no such setting; did you mean prefill?"),
        ({"prefill": {"replica": 2}}, "prefill.replica: there is no such setting; did you mean replicas?"),
        ({"kv_transfer": {"transport": "pigeon"}}, "kv_transfer.transport: 'pigeon' should be 'auto', 'tcp', 'shm'"),
        ({"kv_transfer": {"lease_s": -1}}, "kv_transfer.lease_s: -1.0 must be at least 0.1"),
        ({"kv_transfer": {"lease_s": 9, "progress_s": 8}}, "kv_transfer.progress_s: 8 must be at least kv_transfer.le"),
        ({"kv_transfer": {"lease_s": 0.5, "progress_s": 0.9}}, "kv_transfer.progress_s: 0.9 must be at least 1"),
        ({"kv_transfer": {"transport": "nccl"}}, "kv_transfer.transport: nccl is not a name here: set torch_distri"),
        ({"kv_transfer": {"transport": "Gloo"}}, "kv_transfer.transport: Gloo is not a name here: set torch_distri"),
        ({"router": {"retry_first_s": 2}}, "router.retry_first_s: 2 must be at most retry_most_s (1)"),
        (
            {"router": {"ejection": {"first_s": 5, "most_s": 4}}},
            "router.ejection.first_s: 5 must be at most most_s (4)",
        ),
        (
            {"prefill": {"token_channel": {"stats_interval_s": 2, "lease_s": 3}}},
            "prefill.token_channel.stats_interval_s: 2 must be at most a third of lease_s (3)",
        ),
        (
            {"router": {"token_channel": {"silence_s": 0.9}}},
            "router.token_channel.silence_s: 0.9 must be at least twice",
        ),
        (
            {"decode": {"token_channel": {"lease_s": 2.5}}},
            "router.token_channel.ping_s: 1 must be at most a third of de",
        ),
        # Settings that contradict each other.
        ({"decode": {"num_blocks": 77, "kv_cache_gib": 0.5}}, "decode.num_blocks: 77 beside kv_cache_gib 0.5: "),
        ({"decode": {"preemption": "recompute", "swap_gib": 1}}, "decode.swap_gib: 1 is never used with preemption re"),
        ({"decode": {"preemption": "swap"}}, "decode.preemption: swap has no memory, since swap_gib is 0"),
        ({"decode": {"cores": "0", "threads": 2}}, "decode.threads: 2 on the cores 0: "),
        ({"decode": {"cores": "0-1", "tensor_parallel": 2}}, "decode.cores: 0-1 can't be shared"),
        ({"decode": {"cores": "0-"}}, "decode.cores: '0-' is no list"),
        ({"prefill": {"tensor_parallel": 3}}, "prefill.tensor_parallel: 3 is none of 1, 2, 4, 8"),
        ({"prefill": {"tensor_parallel": 2, "num_gpus": 0.5}}, "prefill.num_gpus: 0.5 for each of a worker's 2 ranks"),
        # Classes and keys.
        ({"slo": {"classes": [{"name": "b", "ttft_s": 0}]}}, "slo.classes[0].ttft_s: 0 should be greater than 0"),
        ({"slo": {"classes": [{"name": "a"}, {"ttft_s": 1}]}}, "slo.classes[1].name: is required"),
        ({"slo": {"classes": [{"name": "a"}, {"name": "a"}]}}, "slo.classes: a is there twice"),
        ({"slo": {"classes": []}}, "slo.classes: there must be one at least"),
        ({"slo": {**CLASSES, "default": "x"}}, "slo.default: x is none of the classes interactive, batch"),
        ({"auth": {"keys": [{**KEY, "sha256": "secret"}]}}, "auth.keys[0].sha256: must be the 64 hexadecimal"),
        ({"auth": {"keys": [KEY] * 2}}, "auth.keys: name a is there twice"),
        ({"auth": {"keys": [{**KEY, "slo_class": "gold"}]}}, "auth.keys: a's slo_class gold is none of standard"),
        # Places.
        ({"prefill": {"node_labels": {"gpu": True}}}, "prefill.node_labels.gpu: True should be a valid string"),
        ({"prefill": {"node_labels": {"role": "a, b"}}}, "prefill.node_labels: role can't be 'a, b': give a value, "),
        ({"prefill": {"node_resources": {"slot": 1.5}}}, "prefill.node_resources: slot is 1.5: above 1 Ray takes whol"),
        ({"prefill": {"node_resources": {"CPU": 2}}}, "prefill.node_resources: CPU is what threads takes: set that i"),
        ({"prefill": {"node_resources": {"memory": 2}}}, "prefill.node_resources: 'memory' is no custom resource"),
        # Numbers of workers.
        ({"decode": {"replicas": 4}, "autoscaling": SCALED}, "decode.replicas: 4, where the autoscaler begins, must"),
        ({"prefill": {"replicas": 0}, "autoscaling": {**SCALED, "prefill": ONE_TO_TWO}}, "prefill.replicas: 0, where"),
        (
            {"autoscaling": {**SCALED, "prefill": ONE_TO_TWO, "budget": 1}},
            "autoscaling.budget: 1 workers are fewer tha",
        ),
        ({**GPUS, "autoscaling": {**SCALED, "budget": 3}}, "autoscaling.budget: 3 GPUs are fewer than the 4 "),
        ({"autoscaling": {"prefill": {"min": 3, "max": 2}}}, "autoscaling.prefill.min: 3 must be from 0 to max"),
    ],
)
def test_a_wrong_configuration_names_the_setting(raw: object, beginning: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(raw)
    assert str(caught.value).startswith(beginning)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "just words"])
def test_a_file_that_is_no_mapping_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("decode:\n  replicas: 2\n\n  replicas: 3\n", "replicas is given twice, in lines 2 and 4"),
        ("prefill: {}\ndecode: {}\nprefill: {replicas: 2}\n", "prefill is given twice, in lines 1 and 3"),
        ("decode: {replicas: 1, 'replicas': 1}\n", "replicas is given twice, in lines 1 and 1"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert str(caught.value) == f"{path}: {told}"


def test_a_key_may_stand_in_two_sections(tmp_path: Path) -> None:
    path = tmp_path / "once.yaml"
    path.write_text("prefill: {replicas: 2}\ndecode: {replicas: 2}\n")
    assert read_config(load_yaml(path)).num_workers == 4


def test_workers_and_ranks_share_the_cores_unless_told_otherwise() -> None:
    several = read_config({"prefill": {"replicas": 500}, "decode": {"replicas": 500, "threads": 3}})
    assert several.threads(several.prefill) == 1
    assert several.threads(several.decode) == 3
    ranks = read_config({"prefill": {"tensor_parallel": 2}, "decode": {"tensor_parallel": 8, "replicas": 60}})
    assert (ranks.num_ranks, ranks.threads(ranks.decode)) == (2 + 480, 1)


@pytest.mark.parametrize(
    ("replicas", "autoscaling", "prefill", "decode"),
    [
        ((0, 4), {"decode": {"max": 2}, "budget": 0.5}, (0, 0, 0), (4, 4, 4)),  # not enabled
        ((1, 2), SCALED, (0, 1, 2), (1, 2, 3)),
        ((0, 1), SCALED, (0, 0, 2), (1, 1, 3)),  # prefill workers may come later, and go again altogether
        ((0, 1), {"enabled": True, "decode": {"max": 3}}, (0, 0, 0), (1, 1, 3)),  # an aggregated server
    ],
)
def test_a_role_has_the_replicas_asked_for_or_what_the_autoscaler_may_make_of_them(
    replicas: tuple[int, int], autoscaling: object, prefill: tuple[int, int, int], decode: tuple[int, int, int]
) -> None:
    own = {"prefill": {"replicas": replicas[0]}, "decode": {"replicas": replicas[1], "tensor_parallel": 2}}
    config = read_config({**own, "autoscaling": autoscaling})
    assert config.counts == {"prefill": prefill, "decode": decode}
    assert config.has_prefill == (prefill[2] > 0)
    # Cores and memory are planned for as many as there may be.
    assert (config.num_workers, config.num_ranks) == (prefill[2] + decode[2], prefill[2] + 2 * decode[2])


def test_each_role_may_have_its_own_block_size() -> None:
    config = read_config({"model": {"block_size": 32}, "decode": {"block_size": 64}})
    assert WorkerSettings.of(config, config.prefill).block_size == 32
    assert WorkerSettings.of(config, config.decode).block_size == 64
    assert WorkerSettings.of(config, config.decode).engine_config(Path("folder")).block_size == 64


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm", "torch_distributed"])
def test_workers_are_told_how_kv_travels(transport: str) -> None:
    config = read_config({"kv_transfer": {"transport": transport, "tcp_streams": 2, "lease_s": 3}})
    settings = WorkerSettings.of(config, config.prefill)
    transfer = settings.transfer
    assert (transfer.transport, transfer.tcp_streams, transfer.lease_s) == (transport, 2, 3.0)


@pytest.mark.parametrize(
    ("transfer", "num_gpus", "told"),
    [
        (
            {"transport": "cuda_ipc"},
            0,
            "kv_transfer.transport: cuda_ipc can't reach a cache on cpu: use auto, tcp, shm",
        ),
        ({"transport": "shm"}, 1, "kv_transfer.transport: shm can't reach a cache on cuda: use auto, torch_dis"),
        (
            {"transport": "tcp"},
            1,
            "kv_transfer.transport: tcp can't reach a cache on cuda: use auto, torch_distributed",
        ),
        (
            {"transport": "shm", "encoding": "int8"},
            0,
            "kv_transfer.encoding: shm moves KV as it is stored, not as int8",
        ),
        ({"transport": "cuda_ipc", "encoding": "fp8"}, 1, "kv_transfer.encoding: cuda_ipc moves KV as it is stored"),
    ],
)
def test_a_transport_that_can_not_be_is_told_with_the_way_out(
    transfer: dict[str, str], num_gpus: int, told: str
) -> None:
    config = read_config({"kv_transfer": transfer} | {role: {"num_gpus": num_gpus} for role in ("prefill", "decode")})
    with pytest.raises(ConfigError) as caught:
        WorkerSettings.of(config, config.decode)
    assert str(caught.value).startswith(told)


def test_the_router_is_told_how_many_workers_are_to_be_there() -> None:
    config = read_config({"prefill": {"replicas": 0}, "decode": {"replicas": 3}})
    assert RouterSettings.of(config).expected == {"prefill": 0, "decode": 3}


def test_a_cache_is_sized_by_blocks_or_by_bytes_or_by_the_host() -> None:
    config = read_config({"prefill": {"num_blocks": 77}, "decode": {"replicas": 2, "kv_cache_gib": 0.5}})
    prefill, decode = (
        WorkerSettings.of(config, section).engine_config(Path("m")) for section in (config.prefill, config.decode)
    )
    assert (prefill.kv_cache_bytes, prefill.num_blocks, prefill.host_ranks) == (None, 77, 3)
    assert (decode.kv_cache_bytes, decode.num_blocks) == (2**29, None)


def test_a_part_of_a_gpu_comes_with_that_part_of_its_memory() -> None:
    config = read_config({"decode": {"num_gpus": 0.5, "gpu_memory_utilization": 0.8}, "prefill": {"num_gpus": 2}})
    assert config.decode.gpu_memory_share == pytest.approx(0.4)
    assert config.prefill.gpu_memory_share == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("settings", "links", "mebibytes"),
    [
        ({}, (2, 2), (192, 192)),
        ({"prefill": {"replicas": 3}, "decode": {"replicas": 5}}, (14, 14), (1023, 1023)),
        ({"prefill": {"tensor_parallel": 2}, "decode": {"replicas": 2}}, (4, 6), (384, 576)),
        ({"prefill": {"replicas": 0}}, (2, 0), (192, 0)),
        ({"kv_transfer": {"max_chunk_bytes": 2**20}}, (2, 2), (6, 6)),
        ({"kv_transfer": {"transport": "cuda_ipc"}}, (2, 2), (0, 0)),
        ({"kv_transfer": {"transport": "torch_distributed"}}, (2, 2), (192 + 1800, 192 + 1800)),
        ({"model": {"device": "cpu"}}, (2, 2), (0, 0)),
        (
            {role: {"tensor_parallel": 4, "context_parallel": True} for role in ("prefill", "decode")},
            (2, 2),
            (192, 192),
        ),
        (
            {"prefill": {"tensor_parallel": 2}, "decode": {"tensor_parallel": 4, "context_parallel": True}},
            (8, 4),
            (768, 384),
        ),
    ],
)
def test_engines_leave_the_memory_of_all_links_that_their_workers_may_have(
    settings: dict[str, dict[str, object]], links: tuple[int, int], mebibytes: tuple[int, int]
) -> None:
    for role in ("prefill", "decode"):
        settings = settings | {role: {"num_gpus": 1} | settings.get(role, {})}
    config = read_config(settings)
    told = [WorkerSettings.of(config, section) for section in (config.prefill, config.decode)]
    assert tuple(each.num_links for each in told) == links
    assert tuple(each.engine_config(Path("m")).staging_bytes // 2**20 for each in told) == mebibytes


def test_roles_whose_parts_of_blocks_can_not_be_exchanged_are_refused() -> None:
    shares = {"tensor_parallel": 2, "context_parallel": True}
    config = read_config({"prefill": shares | {"block_size": 64}, "decode": shares | {"block_size": 32}})
    with pytest.raises(ConfigError, match="blocks of 64 tokens that 2 ranks of a prefill worker share, and of 32"):
        WorkerSettings.of(config, config.decode)
    config = read_config({"prefill": shares, "decode": {"tensor_parallel": 8, "context_parallel": True}})
    settings = WorkerSettings.of(config, config.prefill)
    assert settings.block_size == 8 * 16
    assert [peer.cut.context_ranks for peer in settings.peers] == [8, 2]


def test_both_roles_load_an_mtp_head_or_none() -> None:
    mtp = {"speculation": "mtp"}
    config = read_config({"prefill": mtp, "decode": mtp})
    assert all(WorkerSettings.of(config, each).engine_config(Path("m")).has_mtp for each in config.roles.values())
    assert read_config({"prefill": {"replicas": 0}, "decode": mtp}).has_mtp
    assert not read_config({}).has_mtp
    with pytest.raises(ConfigError, match=r"^prefill\.speculation\.method and decode\..*: set both to mtp or none"):
        WorkerSettings.of(read_config({"decode": mtp}), config.decode)


def test_blocks_are_larger_on_gpus_where_nothing_is_said() -> None:
    gpus = {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}
    assert read_config({}).default_block_size == 16
    assert read_config(gpus).default_block_size == 64
    assert read_config({**gpus, "model": {"block_size": 32}}).default_block_size == 32


def test_slo_classes_and_api_keys_are_lists_of_sections() -> None:
    config = read_config({"slo": CLASSES, "auth": {"keys": [{**KEY, "slo_class": "batch"}]}})
    assert config.slo.default_class == SLOClass(name="batch")
    assert config.slo.named("interactive") == SLOClass(
        name="interactive", ttft_s=0.5, tpot_s=0.05, priority=10, share=0.3
    )
    assert config.auth.keys == (KeyConfig(**KEY, slo_class="batch"),)


def test_a_file_of_keys_adds_to_those_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- {{name: b, sha256: {'cd' * 32}}}\n")
    config = read_config({"auth": {"keys": [KEY], "keys_file": str(path)}})
    assert [key.name for key in api_keys(check_keys(config))] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: []", "has no keys, so nobody could get in"),
        ("keys: [{name: b}]", "keys[0].sha256: is required"),
        (f"keys: [{{name: a, sha256: {'cd' * 32}}}]", "keys: name a is there twice"),
    ],
)
def test_a_wrong_file_of_keys_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    own = [] if "no keys" in message else [KEY]
    config = read_config({"auth": {"keys": own, "keys_file": str(path)}})
    with pytest.raises(ConfigError, match=re.escape(f"auth.keys_file: {path}: {message}")):
        check_keys(config)


@pytest.mark.parametrize(
    ("text", "cores"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), (" 5 , 2-2,1-2", (1, 2, 5)), ("7,7", (7,))]
)
def test_ranges_and_single_cores_are_read(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-100000", "1.5"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no "):
        parse_cores(text)


def test_what_the_shell_has_opened_is_read_though_it_is_a_pipe() -> None:
    """`--config <(envsubst < FILE)` has a writer, so that nobody waits for one."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"decode: {replicas: 3}")
        os.close(writer)
        assert read_config(load_yaml(Path(f"/dev/fd/{reader}"))).decode.replicas == 3
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ({"path": "hub:../x"}, "model.path"),
        ({"path": "someone/model", "revision": "../../x"}, "model.revision"),
        ({"path": "someone/model", "revision": "a..b"}, "model.revision"),
        ({"path": "someone/model", "revision": "main?x"}, "model.revision"),
    ],
)
def test_a_hub_id_and_a_revision_lead_nowhere_else(model: dict[str, str], setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting}: "):
        read_config({"model": model})


@pytest.mark.parametrize("revision", ["main", "v1.2", "refs/pr/7", "0f" * 20, "feature_x-1"])
def test_branches_tags_and_commits_are_revisions(revision: str) -> None:
    assert read_config({"model": {"path": "hub:someone/model", "revision": revision}}).model.revision == revision
