"""What every worker of the cluster is made of, loaded in the worker's own process: rank 0, and whoever it leads.

torch is imported inside the function: the processes that only deploy or route load this module too.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.ranks.led_ranks import LedRanks, StartRanks
from twostroke.cluster.ranks.rank_parts import RankParts, load_rank
from twostroke.protocol.errors import ConfigError, WorkerLost
from twostroke.protocol.frames import MAX_PAYLOAD_BYTES
from twostroke.protocol.messages import most_step_bytes
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer

if TYPE_CHECKING:
    from twostroke.kvtransfer.link import KVStore
    from twostroke.kvtransfer.sides import ReceivingSide, SendingSide
    from twostroke.model.step import Engine
    from twostroke.worker.block_pool import BlockPool
    from twostroke.worker.worker import Equipment


@dataclass(frozen=True)
class WorkerParts:
    """An engine with its cache, its block accounting, and both sides of KV transfer, over all ranks."""

    engine: "Engine"
    store: "KVStore"  # rank 0's cache
    pool: "BlockPool"
    sender: "SendingSide"
    receiver: "ReceivingSide"
    max_context: int  # tokens
    rank: RankParts  # rank 0's
    led: LedRanks | None  # None: there are no others

    def equipment(self, peer: Peer, network: Network) -> "Equipment":
        """What a worker is made of."""
        from twostroke.worker.worker import Equipment

        return Equipment(
            peer=peer,
            engine=self.engine,
            store=self.store,
            pool=self.pool,
            network=network,
            sender=self.sender,
            receiver=self.receiver,
            clock=time.monotonic,
            max_context=self.max_context,
        )

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason, once a rank is lost: the worker can't go on."""
        if self.led is not None:
            self.led.connections.lost.add_done_callback(lambda lost: on_lost(lost.result()))

    async def close(self) -> None:
        """End the other ranks, the links and the engine, after the step under way, and free the cache.

        Sender and receiver are the worker's to close, beforehand.
        """
        if self.led is not None:
            await self.led.close()
        await self.rank.close()


async def load_parts(
    settings: WorkerSettings,
    peer: Peer,
    network: Network,
    secret: bytes,
    *,
    host: str,
    start_ranks: StartRanks,
    gpu: int = 0,
) -> WorkerParts:
    """Load the model and make the cache, on all ranks. They listen for KV on `host`.

    Raises ConfigError with one line that a user can act on, and WorkerLost where another rank fails.
    """
    from twostroke.worker.block_pool import BlockPool

    if settings.tensor_parallel == 1:
        rank = await load_rank(settings, peer, network, secret, gpu=gpu)
        loaded = rank.loaded
        pool = BlockPool(loaded.num_blocks, settings.block_size)
        return WorkerParts(
            loaded.engine, rank.store, pool, rank.sender, rank.receiver, loaded.max_context, rank, led=None
        )
    led = await LedRanks.start(settings, peer, network, secret, host=host, start_ranks=start_ranks)
    try:
        return await _lead(settings, peer, network, secret, led, gpu)
    except BaseException:
        await led.close()
        raise


async def _lead(
    settings: WorkerSettings, peer: Peer, network: Network, secret: bytes, led: LedRanks, gpu: int
) -> WorkerParts:
    from twostroke.kvtransfer.ranks import RankedReceiver, RankedSender
    from twostroke.model.parallel.ranked_engine import TensorParallelEngine
    from twostroke.worker.block_pool import BlockPool

    ranks = led.connections
    rank = await _load_rank_0(settings, peer, network, secret, led, gpu)
    try:
        addresses = await ranks.loaded()
        swap_space = rank.loaded.swap_space
        check_step_size(settings, rank.loaded.max_context, 0 if swap_space is None else swap_space.num_blocks)
    except BaseException:
        await led.close()
        await rank.close()
        raise
    loaded = rank.loaded
    return WorkerParts(
        TensorParallelEngine(loaded.engine, ranks),
        rank.store,
        BlockPool(loaded.num_blocks, settings.block_size),
        RankedSender(rank.sender, ranks, time.monotonic),
        RankedReceiver(rank.receiver, addresses, ranks, time.monotonic),
        loaded.max_context,
        rank,
        led,
    )


def check_step_size(settings: WorkerSettings, max_context: int, host_blocks: int) -> None:
    """Raises ConfigError where a step might be too long to tell the ranks in one message. `max_context` in tokens."""
    size = most_step_bytes(
        max_tokens=settings.max_step_tokens,
        max_sequences=settings.max_batch,
        blocks_of_one=-(-max_context // settings.block_size),
        host_blocks=host_blocks,
    )
    if size > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"max_batch: steps of {settings.max_batch} requests with {max_context} tokens in blocks of "
            f"{settings.block_size} can take {size} bytes to tell the tensor-parallel ranks, over {MAX_PAYLOAD_BYTES}: "
            "lower max_batch, max_context or swap_gib, or raise block_size"
        )


async def _load_rank_0(
    settings: WorkerSettings, peer: Peer, network: Network, secret: bytes, led: LedRanks, gpu: int
) -> RankParts:
    """Raises ConfigError, and WorkerLost as soon as another rank is lost. No thread is left behind that loads."""
    ranks = led.connections
    loading = asyncio.create_task(load_rank(settings, peer, network, secret, led.place, gpu), name="load rank 0")
    try:
        await asyncio.wait((loading, ranks.lost), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            await led.close()  # which ends what the loading thread waits for
            await asyncio.wait({loading})
        return loading.result()
    except RuntimeError as error:  # torch's own word for ranks that don't come, or are lost
        raise WorkerLost(f"the worker can't start: {ranks.loss or error}") from error
    except asyncio.CancelledError:
        await led.close()
        await asyncio.wait({loading})
        if loading.exception() is None:
            await loading.result().close()
        raise
