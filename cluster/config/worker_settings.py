"""The part of the configuration that a worker gets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from twostroke.cluster.config.config import ClusterConfig
from twostroke.cluster.config.process_logs import LoggingConfig
from twostroke.cluster.config.sections import (
    DecodeSection,
    ModelSection,
    PrefillSection,
    WorkerResources,
    parse_cores,
)
from twostroke.kvtiers.config import TiersConfig
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import StagingNeed, staging_need
from twostroke.model.parallel.form import ParallelForm
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import RankCut, parts_fit

if TYPE_CHECKING:
    from twostroke.model.engine_config import EngineConfig


class PeerShape(NamedTuple):
    """Properties of peers that determine the rank pairs with a worker."""

    cut: RankCut
    block_size: int  # tokens


def check_parts(config: ClusterConfig) -> None:
    """Check that both roles' ranks share blocks in parts that can be exchanged. Raises ConfigError."""
    if not config.has_prefill:
        return
    (block, other), (ranks, of_other) = (
        [config.block_size(each) for each in config.roles.values()],
        [each.parallel.context_ranks for each in config.roles.values()],
    )
    if not parts_fit((block, other), (ranks, of_other)):
        raise ConfigError(
            f"context_parallel: blocks of {block} tokens that {ranks} ranks of a prefill worker share, and of {other} "
            f"that {of_other} of a decode worker do, can't be exchanged: give both roles the same block_size"
        )


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker of either role. They travel from the process that deploys to the worker's ranks."""

    model: ModelSection
    resources: WorkerResources
    max_step_tokens: int
    max_batch: int
    block_size: int  # tokens
    device: Literal["cpu", "cuda"]
    threads: int
    transfer: TransferConfig
    tiers: TiersConfig = field(default_factory=TiersConfig)
    has_mtp: bool = False  # the model's MTP head is loaded
    swap_bytes: int = 0  # of host memory, on each rank
    announces_layers: bool = False  # in every step
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    host_ranks: int = 1  # of all workers, which may share one host's memory
    peers: tuple["PeerShape", ...] = ()  # of the workers that KV may go to or come from
    num_links: int = 0  # of each rank with those, at most, in both directions

    @classmethod
    def of(cls, config: ClusterConfig, section: PrefillSection | DecodeSection) -> "WorkerSettings":
        roles: list[PrefillSection | DecodeSection] = (
            [config.decode, config.prefill] if config.has_prefill else [config.decode]
        )
        check_parts(config)
        return cls(
            model=config.model_section(section),
            resources=section.part(WorkerResources),
            max_step_tokens=section.max_step_tokens,
            max_batch=section.max_batch,
            block_size=config.block_size(section),
            device=config.device,
            threads=config.threads(section),
            host_ranks=config.num_ranks,
            peers=tuple(PeerShape(each.parallel.cut, config.block_size(each)) for each in roles),
            num_links=2
            * sum(
                max(0, config.counts[role].most - (each is section)) * section.parallel.most_peers(each.parallel)
                for role, each in config.roles.items()
            ),
            transfer=config.transfer,
            tiers=config.tiers,
            has_mtp=config.has_mtp,
            swap_bytes=int(section.swap_gib * 2**30) if isinstance(section, DecodeSection) else 0,
            announces_layers=isinstance(section, PrefillSection),
            logging=config.logging,
        )

    @property
    def parallel(self) -> ParallelForm:
        """The division of the model among the worker's ranks."""
        return self.resources.parallel

    @property
    def lends_cores(self) -> bool:
        """Return whether the worker lends its cores to others of its machine and borrows theirs."""
        return self.device == "cpu" and self.resources.lends_cores

    @property
    def staging(self) -> StagingNeed:
        """Return the memory that staging links take of each rank's GPU."""
        stages = self.device == "cuda" and self.transfer.transport in ("auto", "torch_distributed", "nixl")
        return staging_need(self.num_links if stages else 0, self.transfer.max_chunk_bytes)

    @property
    def link_bytes(self) -> int:
        """Memory of each rank's GPU that links take: for staging, and for a communicator each where all go over NCCL.

        Where the transport is `auto` only those between hosts do, and of these the settings know nothing: what
        `gpu_memory_utilization` leaves is there for them.
        """
        from twostroke.model.costs.sizes import COMMUNICATOR_BYTES

        goes_over_nccl = self.device == "cuda" and self.transfer.transport == "torch_distributed"
        return self.staging.total_bytes + (self.num_links * COMMUNICATOR_BYTES if goes_over_nccl else 0)

    def engine_config(self, folder: Path, gpu: int = 0, core_table: Path | None = None) -> "EngineConfig":
        """Return the engine's configuration for a rank. `gpu` is the rank's number among the visible GPUs.

        `core_table` is for workers that lend cores.
        """
        from twostroke.model.costs.sizes import StepBounds
        from twostroke.model.engine_config import EngineConfig

        gibibytes = self.resources.kv_cache_gib
        return EngineConfig(
            model_dir=folder,
            has_mtp=self.has_mtp,
            device=self.device,
            gpu=gpu,
            dtype=self.model.dtype,
            kv_cache_dtype=self.model.kv_cache_dtype,
            quantization=self.model.quantization,
            parallel=self.parallel,
            block_size=self.block_size,
            kv_cache_bytes=None if gibibytes is None else int(gibibytes * 2**30),
            num_blocks=self.resources.num_blocks,
            host_ranks=self.host_ranks,
            swap_bytes=self.swap_bytes,
            staging_bytes=self.link_bytes,
            gpu_memory_share=self.resources.gpu_memory_share,
            prefill_kernel=self.resources.prefill_kernel,
            bounds=StepBounds(self.max_step_tokens, self.max_batch),
            announces_layers=self.announces_layers,
            threads=self.threads,
            cores=None if self.resources.cores is None else parse_cores(self.resources.cores),
            core_table=core_table if self.lends_cores else None,
            max_context=self.model.max_context,
        )
