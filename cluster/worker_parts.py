"""What every worker of the cluster is made of, loaded in the worker's own process.

torch is imported inside the function: the processes that only deploy or route load this module too.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster.config import (
    ClusterConfig,
    DecodeSection,
    ModelSection,
    PrefillSection,
    TransportChoice,
    WorkerResources,
    kv_cache_size,
)
from cluster.model_folder import resolve_model_folder
from kvtransfer.config import TransferConfig
from protocol.errors import ConfigError
from protocol.network import Network
from protocol.tickets import Peer

if TYPE_CHECKING:
    from kvtransfer.receiver import KVReceiver
    from kvtransfer.sender import KVSender
    from kvtransfer.store import KVStore
    from kvtransfer.transports import Transports
    from model.block_pool import BlockPool
    from model.load import EngineConfig, LoadedEngine


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker of either role is told. Travels from the process that deploys to the worker's."""

    model: ModelSection
    resources: WorkerResources
    max_step_tokens: int
    max_batch: int
    block_size: int  # tokens
    device: Literal["cpu", "cuda"]
    threads: int
    transport: TransportChoice
    tcp_streams: int
    tcp_max_bytes_per_s: int | None
    transfer: TransferConfig

    @classmethod
    def of(cls, config: ClusterConfig, section: PrefillSection | DecodeSection) -> "WorkerSettings":
        return cls(
            model=config.model,
            resources=section.resources,
            max_step_tokens=section.worker.max_step_tokens,
            max_batch=section.worker.max_batch,
            block_size=section.block_size or config.model.block_size,
            device=config.device,
            threads=config.threads(section.resources),
            transport=config.transport,
            tcp_streams=config.kv_transfer.tcp_streams,
            tcp_max_bytes_per_s=config.kv_transfer.tcp_max_bytes_per_s,
            transfer=config.kv_transfer.transfer,
        )

    def engine_config(self, folder: Path) -> "EngineConfig":
        """What the engine is told."""
        from model.load import EngineConfig
        from model.memory_plan import StepBounds

        kv_cache_bytes, num_blocks = kv_cache_size(self.resources, self.device)
        return EngineConfig(
            model_dir=folder,
            device=self.device,
            dtype=self.model.dtype,
            block_size=self.block_size,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks=num_blocks,
            gpu_memory_share=self.resources.gpu_memory_share,
            bounds=StepBounds(self.max_step_tokens, self.max_batch),
            threads=self.threads,
            max_context=self.model.max_context,
        )


@dataclass(frozen=True)
class WorkerParts:
    """An engine with its cache, its block accounting, and both sides of KV transfer on the transports it has."""

    loaded: "LoadedEngine"
    store: "KVStore"  # the engine's cache, as transfers see it
    pool: "BlockPool"
    transports: "Transports"
    sender: "KVSender"
    receiver: "KVReceiver"

    async def close(self) -> None:
        """Let go of the links, end the engine's thread after the step under way, and free the cache.

        Sender and receiver are the worker's to close, beforehand.
        """
        await self.transports.close()
        await asyncio.to_thread(self.loaded.engine.close)
        self.loaded.kv_cache.close()


async def load_parts(settings: WorkerSettings, peer: Peer, network: Network, secret: bytes) -> WorkerParts:
    """Load the model and make the cache. Raises ConfigError with one line that a user can act on."""
    from kvtransfer.receiver import KVReceiver
    from kvtransfer.sender import KVSender
    from kvtransfer.transports import make_transports
    from model.block_pool import BlockPool
    from model.load import load_engine

    config = settings.engine_config(resolve_model_folder(settings.model.path))
    # Serve's health checks are answered on the event loop meanwhile.
    loaded = await asyncio.to_thread(load_engine, config)
    store: KVStore = loaded.kv_cache
    try:
        transports = await asyncio.to_thread(
            make_transports,
            settings.transport,
            store,
            tcp_streams=settings.tcp_streams,
            tcp_max_bytes_per_s=settings.tcp_max_bytes_per_s,
        )
    except ConfigError:
        await asyncio.to_thread(loaded.engine.close)
        loaded.kv_cache.close()
        raise
    return WorkerParts(
        loaded,
        store,
        BlockPool(loaded.num_blocks, settings.block_size),
        transports,
        KVSender(
            peer=peer,
            store=store,
            network=network,
            transports=transports,
            config=settings.transfer,
            clock=time.monotonic,
        ),
        KVReceiver(
            peer=peer,
            store=store,
            network=network,
            transports=transports,
            config=settings.transfer,
            clock=time.monotonic,
            secret=secret,
        ),
    )
