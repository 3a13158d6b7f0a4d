"""The sections of the configuration that the cluster itself reads, each with what its parts' own configs may be.

Imports no torch: the router's process reads them too.

Numbers of cores as Linux' tools write them: `0-3,8`.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from twostroke.cluster.config.settings import SAME_LEVEL, bounds, bounds_within, instead
from twostroke.cluster.deployments.placement import Placement
from twostroke.decode_worker.config import DecodeConfig
from twostroke.kvtransfer.config import TransferConfig
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.errors import ConfigError
from twostroke.router.channels.worker_channel import TokenChannelConfig
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.observe.tracing import TracingConfig


def parse_cores(text: str) -> tuple[int, ...]:
    """Ascending. Raises ConfigError for what is no list."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f"cores: {text!r} is no list of cores like '0-3,8'")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < 4096:
            raise ConfigError(f"cores: {part.strip()} is no range of cores")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


BUNDLED_MODEL = "bundled"

CPU_CACHE_GIB = 0.25
"""Of one worker's KV cache, where nothing is said and no GPU's memory sets a limit."""

NOT_AT_ONCE_S = 0.001
"""What a time must at least be that is waited for again and again."""

TransportChoice = Literal["auto", "tcp", "shm", "torch_distributed", "cuda_ipc"]

_WORKER_CHANNEL = {"stats_interval_s": 0.01, "lease_s": 0.1, "max_unsent_bytes": 1}


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
            pull_wait_s=NOT_AT_ONCE_S,
            min_pull_tokens=1,
            max_step_s=NOT_AT_ONCE_S,
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
            router_wait_s=NOT_AT_ONCE_S,
            pull_wait_s=NOT_AT_ONCE_S,
            min_pull_tokens=1,
            swap_gib=0,
            max_step_s=NOT_AT_ONCE_S,
            token_channel=_WORKER_CHANNEL,
        ),
    )


@dataclass(frozen=True)
class RouterSection:
    replicas: int = field(default=1, metadata=bounds(1, 256))
    placement: Placement = field(default_factory=Placement, metadata=SAME_LEVEL)
    max_body_mib: float = field(default=8.0, metadata=bounds(0.001, 1024))
    max_choices_in_flight: int = field(default=4096, metadata=bounds(1))  # of one replica; more are refused
    strict: bool = False  # requests with unknown fields are refused, not served without them
    drain_grace_s: float = field(default=20.0, metadata=bounds(0, 3600))  # then others go on with a leaving worker's
    stream_grace_s: float = field(default=60.0, metadata=bounds(0, 86400))  # of a leaving router, whose streams end
    drain_notice_s: float = field(default=0.0, metadata=bounds(0, 600))  # not ready, and still serving, before it ends
    pipeline: PipelineConfig = field(
        default_factory=PipelineConfig,
        metadata=SAME_LEVEL
        | bounds_within(
            retry_poll_s=NOT_AT_ONCE_S,
            prefill_failed_repeat_s=NOT_AT_ONCE_S,
            pull_min_tokens=1,
            index_blocks=1,
            expected_s=NOT_AT_ONCE_S,
        ),
    )
    token_channel: TokenChannelConfig = field(
        default_factory=TokenChannelConfig,
        metadata=bounds_within(
            ping_s=NOT_AT_ONCE_S,
            silence_s=NOT_AT_ONCE_S,
            connect_s=NOT_AT_ONCE_S,
            backoff_first_s=NOT_AT_ONCE_S,
            backoff_most_s=NOT_AT_ONCE_S,
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


def kv_cache_size(resources: WorkerResources, device: Literal["cpu", "cuda"]) -> tuple[int | None, int | None]:
    """(bytes, blocks) of one worker's KV cache, one of them at most: on a GPU none is whatever fits."""
    if resources.num_blocks is not None:
        return None, resources.num_blocks
    gibibytes = resources.kv_cache_gib
    if gibibytes is None and device == "cpu":
        gibibytes = CPU_CACHE_GIB
    return None if gibibytes is None else math.floor(gibibytes * 2**30), None
