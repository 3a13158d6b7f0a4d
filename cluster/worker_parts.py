"""What every worker of the cluster is made of, loaded in the worker's own process.

torch is imported inside the function: the processes that only deploy or route load this module too.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster.config import ClusterConfig, ModelSection, WorkerResources, kv_cache_size
from cluster.model_folder import resolve_model_folder
from kvtransfer.config import TransferConfig
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from kvtransfer.link import Transport
    from kvtransfer.store import KVStore
    from model.block_pool import BlockPool
    from model.load import EngineConfig, LoadedEngine


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker of either role is told. Travels from the process that deploys to the worker's."""

    model: ModelSection
    resources: WorkerResources
    device: Literal["cpu", "cuda"]
    threads: int
    transport: Literal["auto", "tcp", "torch_distributed"]
    transfer: TransferConfig

    @classmethod
    def of(cls, config: ClusterConfig, resources: WorkerResources) -> "WorkerSettings":
        transfer = config.kv_transfer
        return cls(
            config.model, resources, config.device, config.threads(resources), transfer.transport, transfer.transfer
        )

    def engine_config(self, folder: Path) -> "EngineConfig":
        """What the engine is told."""
        from model.load import EngineConfig

        kv_cache_bytes, num_blocks = kv_cache_size(self.resources)
        return EngineConfig(
            model_dir=folder,
            device=self.device,
            dtype=self.model.dtype,
            block_size=self.model.block_size,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks=num_blocks,
            threads=self.threads,
            max_context=self.model.max_context,
        )


@dataclass(frozen=True)
class WorkerParts:
    """An engine with its cache, its block accounting, and the transport that moves blocks."""

    loaded: "LoadedEngine"
    store: "KVStore"  # the engine's cache, as transfers see it
    pool: "BlockPool"
    transport: "Transport"

    async def close(self) -> None:
        """Let go of the links, and end the engine's thread after the step under way."""
        await self.transport.close()
        await asyncio.to_thread(self.loaded.engine.close)


async def load_parts(settings: WorkerSettings) -> WorkerParts:
    """Load the model and make the cache. Raises ConfigError with one line that a user can act on."""
    from kvtransfer.transports import make_transport
    from model.block_pool import BlockPool
    from model.load import load_engine

    transport = settings.transport
    if transport == "auto":
        transport = "torch_distributed" if settings.device == "cuda" else "tcp"
    elif transport == "tcp" and settings.device == "cuda":
        raise ConfigError("kv_transfer.transport: tcp moves host memory only; on cuda use torch_distributed")
    config = settings.engine_config(resolve_model_folder(settings.model.path))
    # Serve's health checks are answered on the event loop meanwhile.
    loaded = await asyncio.to_thread(load_engine, config)
    store: KVStore = loaded.kv_cache
    if settings.device == "cuda":
        from kvtransfer.transports.staging import CudaStore

        store = CudaStore(loaded.kv_cache)
    return WorkerParts(
        loaded,
        store,
        BlockPool(loaded.num_blocks, settings.model.block_size),
        make_transport(transport, store),
    )
