"""The parts of one rank of a worker, loaded in its own process. A single rank is the whole worker."""

import asyncio
import hashlib
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from twostroke.cluster.config.model_folder import resolve_model_folder
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.kvtiers.config import check_machine, check_objects
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Address, Peer

if TYPE_CHECKING:
    from twostroke.kvtransfer.link import KVStore
    from twostroke.kvtransfer.receiver import KVReceiver
    from twostroke.kvtransfer.sender import KVSender
    from twostroke.kvtransfer.transports import Transports
    from twostroke.model.load import LoadedEngine
    from twostroke.model.parallel.tensor_parallel import RankPlace

_log = logging.getLogger(__name__)


class RankOrder(msgspec.Struct, frozen=True):
    """Settings of a rank's process."""

    worker: Peer
    rank: int
    leader: Address  # where rank 0 waits for its connection
    rendezvous: Address  # where the group forms
    host: str  # where other nodes reach it: it listens for KV there, and for ranks of other stages
    secret: bytes
    settings: WorkerSettings


SWITCH_S = 1e-4
"""The longest that a thread of a GPU's rank keeps the interpreter from the others: the event loop, the engine's thread
and the one that waits for the GPU take turns in each step. Python's own 5 ms are as long as such a step. On CPUs steps
are longer, and computed without the interpreter: there more turns only cost."""


SPIN_COUNT = 10_000
"""Looks of a thread of a CPU's team for work before it sleeps: 0.1 to 0.5 ms, longer than between two kernels.
GNU's own 300,000 hold a core for up to 16 ms after each step, and a borrowed one until the borrower's step ends."""


def limit_spinning() -> None:
    """Have OpenMP's threads sleep soon, unless the environment says otherwise. It counts before torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


@dataclass(frozen=True)
class RankParts:
    """An engine with its cache, and both sides of KV transfer on the transports it has."""

    loaded: "LoadedEngine"
    store: "KVStore"  # the engine's cache, as transfers see it
    transports: "Transports"
    sender: "KVSender"
    receiver: "KVReceiver"

    async def close(self) -> None:
        """Let go of the links, leave the other ranks, end the engine's thread after the step under way, free the cache.

        Sender and receiver are to be closed beforehand.
        """
        await self.transports.close()
        await asyncio.to_thread(close_engine, self.loaded)


async def load_rank(
    settings: WorkerSettings, peer: Peer, network: Network, secret: bytes, place: "RankPlace | None" = None
) -> RankParts:
    """Load the model and make the cache, on the GPU of those in sight that has the rank's number in its stage.

    Raises ConfigError with one line that a user can act on. A cancelled call leaves a thread behind that still loads.
    """
    from twostroke.kvtransfer.receiver import KVReceiver
    from twostroke.kvtransfer.sender import KVSender
    from twostroke.kvtransfer.transports import make_transports
    from twostroke.model.load import load_engine

    if settings.device == "cuda":
        sys.setswitchinterval(SWITCH_S)
    for warning in await asyncio.to_thread(check_machine, settings.tiers):  # before the model takes its time to load
        _log.warning(warning)
    gpu = 0 if place is None else place.rank % settings.parallel.tensor_ranks
    folder = resolve_model_folder(settings.model.path, revision=settings.model.revision)
    config = settings.engine_config(folder, gpu, core_table_path(secret))
    # The event loop answers Serve's health checks meanwhile, and hears of other ranks' ends.
    loaded = await asyncio.to_thread(load_engine, config, place)
    store: KVStore = loaded.kv_cache
    try:
        if not store.layout.has_plain_rows and settings.transfer.encoding != "raw":
            raise ConfigError(
                f"kv_transfer.encoding: {settings.transfer.encoding} is for keys and values of one width, and the "
                "model has layers with a state or with wider ones: leave it at raw"
            )
        check_objects(settings.tiers, store.layout.token_bytes)
        transports = await asyncio.to_thread(
            make_transports,
            settings.transfer,
            store,
            peers=[
                msgspec.structs.replace(
                    store.layout.over(cut),
                    # Both roles' blocks have room for the model's states.
                    block_size=loaded.model_config.fitting_block_size(size, loaded.kv_cache.tensors[0].itemsize),
                )
                for cut, size in settings.peers
            ],
            staged_chunk_bytes=settings.staging.chunk_bytes if settings.device == "cuda" else None,
        )
    except BaseException:
        await asyncio.to_thread(close_engine, loaded)
        raise
    return RankParts(
        loaded,
        store,
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


def core_table_path(secret: bytes) -> Path:
    """Return the path of the table by which the workers of one server on one host lend each other cores."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    name = hashlib.sha256(b"core lending" + secret).hexdigest()[:16]
    return Path(shared, f"twostroke-cores-{os.getuid()}", name)


def close_engine(loaded: "LoadedEngine") -> None:
    """End the engine and free its cache; blocks until the step under way has ended."""
    loaded.parallel.leave()
    loaded.engine.close()
    loaded.kv_cache.close()
