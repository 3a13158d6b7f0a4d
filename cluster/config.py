"""The whole configuration, from one YAML file: each part's own config, and what only the cluster needs to know.

Imports no torch: the router's process reads it too.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.worker_counts import WorkerCounts, check_counts, worker_counts
from cluster.core_list import parse_cores
from cluster.placement import Placement
from cluster.process_logs import LoggingConfig
from cluster.settings import SAME_LEVEL, Least, bounds, bounds_within, instead, read_settings
from decode_worker.config import DecodeConfig
from kvtransfer.config import TransferConfig
from prefill_worker.config import PrefillConfig
from protocol.errors import ConfigError
from protocol.stats import Role
from protocol.token_server import TokenServerConfig
from router.pipeline import PipelineConfig
from router.slo import MOST_PRIORITY, SLOConfig
from router.tenants import AuthConfig, KeyConfig
from router.token_channels import TokenChannelConfig
from router.tracing import TracingConfig

BUNDLED_MODEL = "bundled"

CPU_BLOCK_SIZE = 16
GPU_BLOCK_SIZE = 64
"""The least that Hopper's attention kernel copies by TMA."""

CPU_CACHE_GIB = 0.25
"""Of one worker's KV cache, where nothing is said and no GPU's memory sets a limit."""

TransportChoice = Literal["auto", "tcp", "shm", "torch_distributed", "cuda_ipc"]

# What a time must at least be that is waited for again and again.
_NOT_AT_ONCE_S = 0.001
_WORKER_CHANNEL = {"stats_interval_s": 0.01, "lease_s": 0.1, "max_unsent_bytes": 1}
_LEAST_INTERVAL_S = 0.5  # of autoscaling: routers and Serve's controller talk at this pace
OWN_KEY = "twostroke serve"
"""The name of the key that `twostroke serve` asks its own router with."""
_KEYS_LEAST: Least = {"keys": {"requests_per_minute": 1, "tokens_per_minute": 1, "max_in_flight": 1}}


@dataclass(frozen=True)
class ModelSection:
    """Which model, and how all workers hold it."""

    path: str = BUNDLED_MODEL  # `bundled`, a folder, or a Hugging Face hub id
    name: str | None = None  # what clients call it; None: the folder's name
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where the workers are given GPUs
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"  # of the projections' weights, as they are loaded
    block_size: int | None = field(default=None, metadata=bounds(1, 1024))  # tokens; None: as `default_block_size`
    max_context: int | None = field(default=None, metadata=bounds(2))  # tokens; None: what model and cache allow


@dataclass(frozen=True)
class WorkerResources:
    """What one worker takes of its machine."""

    tensor_parallel: int = field(default=1, metadata=bounds(1, 8))  # ranks that share the model; the rest is each one's
    threads: int | None = field(default=None, metadata=bounds(1, 1024))  # None: the cores shared among all workers
    cores: str | None = None  # which ones, as `0-3,8`; None: whichever the system chooses
    num_gpus: float = field(default=0.0, metadata=bounds(0, 64))
    kv_cache_gib: float | None = field(default=None, metadata=bounds(0.001, 65536))  # None: see kv_cache_size
    num_blocks: int | None = field(default=None, metadata=bounds(1))  # instead of kv_cache_gib
    # What weights, steps and cache may take of the worker's GPU, or of its part of one.
    gpu_memory_utilization: float = field(default=0.9, metadata=bounds(0.05, 1))

    def __post_init__(self) -> None:
        """Raises ConfigError for a number of ranks that can't be, and for settings that contradict each other."""
        if self.tensor_parallel not in (1, 2, 4, 8):
            raise ConfigError(f"tensor_parallel: {self.tensor_parallel} is none of 1, 2, 4, 8")
        if self.tensor_parallel > 1 and self.num_gpus not in (0, 1):
            raise ConfigError(
                f"num_gpus: {self.num_gpus:g} for each of {self.tensor_parallel} tensor-parallel ranks: "
                "give each one GPU, or none"
            )
        if self.cores is not None and self.threads not in (None, len(parse_cores(self.cores))):
            raise ConfigError(f"threads: {self.threads} on the cores {self.cores}: give one of the two, or as many")
        if self.num_blocks is not None and self.kv_cache_gib is not None:
            raise ConfigError(
                f"num_blocks: {self.num_blocks} beside kv_cache_gib {self.kv_cache_gib:g}: give one of them"
            )
        if self.cores is not None and self.tensor_parallel > 1:
            raise ConfigError(f"cores: {self.cores} can't be shared by {self.tensor_parallel} tensor-parallel ranks")

    @property
    def gpu_memory_share(self) -> float:
        """What the worker may use of its GPU's memory."""
        return self.gpu_memory_utilization * min(1.0, self.num_gpus)


@dataclass(frozen=True)
class PrefillSection:
    replicas: int = field(default=1, metadata=bounds(0, 1024))  # 0: aggregated, decode workers read prompts themselves
    block_size: int | None = field(default=None, metadata=bounds(1, 1024))  # tokens; None: model.block_size
    resources: WorkerResources = field(default_factory=WorkerResources, metadata=SAME_LEVEL)
    placement: Placement = field(default_factory=Placement, metadata=SAME_LEVEL)
    worker: PrefillConfig = field(
        default_factory=PrefillConfig,
        metadata=SAME_LEVEL
        | bounds_within(
            max_step_tokens=1,
            max_batch=1,
            max_waiting=1,
            pull_wait_s=_NOT_AT_ONCE_S,
            min_pull_tokens=1,
            max_step_s=_NOT_AT_ONCE_S,
            token_channel=_WORKER_CHANNEL,
        ),
    )


@dataclass(frozen=True)
class DecodeSection:
    replicas: int = field(default=1, metadata=bounds(1, 1024))
    block_size: int | None = field(default=None, metadata=bounds(1, 1024))  # tokens; None: model.block_size
    resources: WorkerResources = field(default_factory=WorkerResources, metadata=SAME_LEVEL)
    placement: Placement = field(default_factory=Placement, metadata=SAME_LEVEL)
    worker: DecodeConfig = field(
        default_factory=DecodeConfig,
        metadata=SAME_LEVEL
        | bounds_within(
            max_step_tokens=1,
            max_batch=1,
            max_waiting=1,
            tpot_safety=0.01,
            stall_factor=1,
            min_chunk_tokens=1,
            offer_wait_s=_NOT_AT_ONCE_S,
            swap_gib=0,
            max_step_s=_NOT_AT_ONCE_S,
            token_channel=_WORKER_CHANNEL,
        ),
    )


@dataclass(frozen=True)
class RouterSection:
    replicas: int = field(default=1, metadata=bounds(1, 256))
    placement: Placement = field(default_factory=Placement, metadata=SAME_LEVEL)
    max_body_mib: float = field(default=8.0, metadata=bounds(0.001, 1024))
    max_choices_in_flight: int = field(default=4096, metadata=bounds(1))  # of one replica; more are refused
    drain_grace_s: float = field(default=20.0, metadata=bounds(0, 3600))  # then others go on with a leaving worker's
    stream_grace_s: float = field(default=60.0, metadata=bounds(0, 86400))  # of a leaving router, whose streams end
    drain_notice_s: float = field(default=0.0, metadata=bounds(0, 600))  # not ready, and still serving, before it ends
    pipeline: PipelineConfig = field(
        default_factory=PipelineConfig,
        metadata=SAME_LEVEL
        | bounds_within(
            retry_poll_s=_NOT_AT_ONCE_S,
            prefill_failed_repeat_s=_NOT_AT_ONCE_S,
            pull_min_tokens=1,
            index_blocks=1,
            expected_s=_NOT_AT_ONCE_S,
        ),
    )
    token_channel: TokenChannelConfig = field(
        default_factory=TokenChannelConfig,
        metadata=bounds_within(
            ping_s=_NOT_AT_ONCE_S,
            silence_s=_NOT_AT_ONCE_S,
            connect_s=_NOT_AT_ONCE_S,
            backoff_first_s=_NOT_AT_ONCE_S,
            backoff_most_s=_NOT_AT_ONCE_S,
        ),
    )
    tracing: TracingConfig = field(default_factory=TracingConfig)


@dataclass(frozen=True)
class TransferSection:
    # auto: for each pair of workers the best that both have
    transport: TransportChoice = field(
        default="auto", metadata=instead(nccl="torch_distributed", gloo="torch_distributed")
    )
    tcp_streams: int = field(default=4, metadata=bounds(1, 64))  # TCP connections of one link between machines
    tcp_max_bytes_per_s: int | None = field(default=None, metadata=bounds(1000))  # of one link; None: no limit
    transfer: TransferConfig = field(
        default_factory=TransferConfig,
        metadata=SAME_LEVEL
        | bounds_within(
            lease_s=0.1,
            progress_s=1,
            max_chunk_bytes=4096,
            max_pending_offers=1,
            max_queued_messages=1,
            max_new_links=1,
            used_ticket_s=1,
            max_used_tickets=1,
        ),
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for times that contradict each other."""
        transfer = self.transfer
        if transfer.progress_s < transfer.lease_s:
            raise ConfigError(
                f"kv_transfer.progress_s: {transfer.progress_s:g} must be at least kv_transfer.lease_s "
                f"({transfer.lease_s:g})"
            )


@dataclass(frozen=True)
class ClusterConfig:
    """Everything that `twostroke serve` and the Serve application are told."""

    model: ModelSection = field(default_factory=ModelSection)
    prefill: PrefillSection = field(default_factory=PrefillSection)
    decode: DecodeSection = field(default_factory=DecodeSection)
    router: RouterSection = field(default_factory=RouterSection)
    kv_transfer: TransferSection = field(default_factory=TransferSection)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    slo: SLOConfig = field(
        default_factory=SLOConfig,
        metadata=bounds_within(classes={"priority": -MOST_PRIORITY}, max_queue_s=_NOT_AT_ONCE_S),
    )
    auth: AuthConfig = field(
        default_factory=AuthConfig,
        metadata=bounds_within(**_KEYS_LEAST),
    )
    autoscaling: AutoscalingConfig = field(
        default_factory=AutoscalingConfig, metadata=bounds_within(interval_s=_LEAST_INTERVAL_S)
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for sections that contradict each other."""
        check_keys(self.auth.keys, self.slo)
        for role, workers in (("prefill", self.prefill.worker), ("decode", self.decode.worker)):
            _check_signs_of_life(role, workers.token_channel, self.router.token_channel)
        check_counts(self.autoscaling, self.counts, self.gpus_each)

    @property
    def counts(self) -> Mapping[Role, WorkerCounts]:
        """How many workers each role may have."""
        return {
            "prefill": worker_counts(self.autoscaling, "prefill", self.prefill.replicas),
            "decode": worker_counts(self.autoscaling, "decode", self.decode.replicas),
        }

    @property
    def gpus_each(self) -> Mapping[Role, float]:
        """What a worker of each role takes, all ranks together."""
        return {
            "prefill": self.prefill.resources.num_gpus * self.prefill.resources.tensor_parallel,
            "decode": self.decode.resources.num_gpus * self.decode.resources.tensor_parallel,
        }

    @property
    def has_prefill(self) -> bool:
        """Whether there are prefill workers, or may be; otherwise decode workers read all prompts themselves."""
        return self.counts["prefill"].most > 0

    @property
    def num_workers(self) -> int:
        """That there may be at most."""
        return sum(of_role.most for of_role in self.counts.values())

    @property
    def num_ranks(self) -> int:
        """Processes, at most, that run an engine or a part of one."""
        prefill = self.counts["prefill"].most * self.prefill.resources.tensor_parallel
        return prefill + self.counts["decode"].most * self.decode.resources.tensor_parallel

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where the workers compute. Raises ConfigError where that is not the same for all."""
        sections = [self.decode.resources, *([self.prefill.resources] if self.has_prefill else [])]
        with_gpu = [resources.num_gpus > 0 for resources in sections]
        if self.model.device == "cpu":
            return "cpu"
        if all(with_gpu):
            return "cuda"
        if any(with_gpu):
            raise ConfigError(
                "prefill.num_gpus and decode.num_gpus: give GPUs to both kinds of workers or to none, since KV does "
                "not travel between GPU and host memory"
            )
        if self.model.device == "cuda":
            raise ConfigError("model.device: cuda needs prefill.num_gpus and decode.num_gpus above 0")
        return "cpu"

    @property
    def default_block_size(self) -> int:
        """Tokens of a block where a worker has no size of its own."""
        if self.model.block_size is not None:
            return self.model.block_size
        return GPU_BLOCK_SIZE if self.device == "cuda" else CPU_BLOCK_SIZE

    @property
    def transport(self) -> TransportChoice:
        """How KV is to travel. Raises ConfigError where it can't between these workers, or encoded as they would."""
        chosen = self.kv_transfer.transport
        elsewhere = {"cpu": ("cuda_ipc",), "cuda": ("tcp", "shm")}[self.device]
        if chosen in elsewhere:
            others = ", ".join(name for name in get_args(TransportChoice) if name not in elsewhere)
            raise ConfigError(f"kv_transfer.transport: {chosen} can't reach a cache on {self.device}: use {others}")
        encoding = self.kv_transfer.transfer.encoding
        if chosen in ("shm", "cuda_ipc") and encoding != "raw":
            raise ConfigError(
                f"kv_transfer.encoding: {chosen} moves KV as it is stored, not as {encoding}: set encoding to raw, or "
                "transport to auto"
            )
        return chosen

    def threads(self, resources: WorkerResources) -> int:
        """Cores for the steps of one worker's rank: what is asked for, else an equal share of this machine's."""
        if resources.cores is not None:
            return len(parse_cores(resources.cores))
        return resources.threads or max(1, len(os.sched_getaffinity(0)) // self.num_ranks)


def read_config(raw: object, *, has_own_key: bool = False) -> ClusterConfig:
    """The configuration in `raw`, as YAML gives it. Raises ConfigError that begins with the setting at fault.

    `has_own_key`: it was not written by people alone, and a key of the server's own is among theirs.
    """
    config = read_settings(ClusterConfig, raw)
    try:
        if not has_own_key:
            _check_names(config.auth.keys)
    except ConfigError as error:
        raise ConfigError(f"auth.{error}") from error
    return config


class _KeysOnce(yaml.SafeLoader):
    """YAML's plain types; of a key that is given twice, YAML itself would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises ConfigError for a key that is given twice, with both lines."""
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    raise ConfigError(f"{key.value} is given twice, in lines {lines[name]} and {line}")
                lines[name] = line
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError for a file that is missing or is none, or has a key twice."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _KeysOnce)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as model, prefill, decode, router, slo")
    return raw


def _check_signs_of_life(role: str, worker: TokenServerConfig, router: TokenChannelConfig) -> None:
    """Raises ConfigError where one side of a token channel takes the other for lost between two signs of life."""
    if router.silence_s < 2 * worker.stats_interval_s:
        raise ConfigError(
            f"router.token_channel.silence_s: {router.silence_s:g} must be at least twice "
            f"{role}.token_channel.stats_interval_s ({worker.stats_interval_s:g}): lower that, or raise this"
        )
    if router.ping_s > worker.lease_s / 3:
        raise ConfigError(
            f"router.token_channel.ping_s: {router.ping_s:g} must be at most a third of "
            f"{role}.token_channel.lease_s ({worker.lease_s:g}): raise that, or lower this"
        )


def _check_names(keys: Sequence[KeyConfig]) -> None:
    """Raises ConfigError for the name that is the server's: its own requests could not be told apart in the log."""
    if any(key.name == OWN_KEY for key in keys):
        raise ConfigError(f"keys: the name {OWN_KEY} is that of the server's own key: choose another")


def check_keys(keys: Sequence[KeyConfig], slo: SLOConfig) -> None:
    """Raises ConfigError for a key of a class that there is not."""
    known = [one.name for one in slo.classes]
    for key in keys:
        if key.slo_class is not None and key.slo_class not in known:
            raise ConfigError(f"auth.keys: {key.name}'s slo_class {key.slo_class} is none of {', '.join(known)}")


def with_keys_of_file(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the keys of `auth.keys_file` beside its own. Raises ConfigError."""
    if config.auth.keys_file is None:
        return config
    path = Path(config.auth.keys_file)
    try:
        listed = read_settings(AuthConfig, load_yaml(path), least=_KEYS_LEAST)
        if listed.keys_file is not None:
            raise ConfigError("keys_file: there is no such setting in a file of keys")
        _check_names(listed.keys)
        auth = replace(config.auth, keys=(*config.auth.keys, *listed.keys), keys_file=None)
        check_keys(auth.keys, config.slo)
    except ConfigError as error:
        message = str(error)
        where = "" if message.startswith(str(path)) else f"{path}: "
        raise ConfigError(f"auth.keys_file: {where}{message}") from error
    if not auth.keys:
        raise ConfigError(
            f"auth.keys_file: {path}: has no keys, and so would let everybody in: delete auth.keys_file, or add `keys`"
        )
    return replace(config, auth=auth)


def kv_cache_size(resources: WorkerResources, device: Literal["cpu", "cuda"]) -> tuple[int | None, int | None]:
    """(bytes, blocks) of one worker's KV cache, one of them at most: on a GPU none is whatever fits."""
    if resources.num_blocks is not None:
        return None, resources.num_blocks
    gibibytes = resources.kv_cache_gib
    if gibibytes is None and device == "cpu":
        gibibytes = CPU_CACHE_GIB
    return None if gibibytes is None else math.floor(gibibytes * 2**30), None
