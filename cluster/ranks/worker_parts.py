"""The parts of every worker of the cluster, loaded in the worker's own process: rank 0, its ranks and its tiers.

torch is imported inside the functions, because processes that only deploy load this module too.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from twostroke.cluster.config.model_folder import resolve_model_folder
from twostroke.cluster.config.process_logs import num_dropped_lines
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.ranks.led_ranks import LedRanks, StageRanks
from twostroke.cluster.ranks.rank_parts import RankParts, limit_spinning, load_rank
from twostroke.kvtiers.config import SETTING, TiersConfig, read_key
from twostroke.kvtransfer.config import TransferConfig
from twostroke.protocol.errors import ConfigError, WorkerLost
from twostroke.protocol.kv_layout import ONE_RANK, incompatibility
from twostroke.protocol.messages import most_step_bytes
from twostroke.protocol.network import MAX_PAYLOAD_BYTES, Network
from twostroke.protocol.requests import Peer

if TYPE_CHECKING:
    import torch

    from twostroke.cluster.ranks.rank_parts import RankParts
    from twostroke.kvtiers.kv_tiers import KVTiers
    from twostroke.kvtiers.objects import ObjectCipher
    from twostroke.kvtiers.storage.blobs import BlobStore
    from twostroke.kvtiers.storage.files import FileBlobs
    from twostroke.kvtiers.storage_tier import StorageTier
    from twostroke.kvtransfer.ranks import ReceivingSide, SendingSide
    from twostroke.kvtransfer.transports import Transports
    from twostroke.model.load import LoadedEngine
    from twostroke.model.step import Engine
    from twostroke.protocol.grammars import Vocabulary
    from twostroke.protocol.kv_layout import KVLayout
    from twostroke.worker.deps import WorkerDeps
    from twostroke.worker.experts import ExpertBalance


StoreT = TypeVar("StoreT", bound="BlobStore")

READ_THREADS = 4
"""Objects that are read at a time from one storage, each on a thread of its own."""
SHARED_READ_S = 0.02
"""Seconds that a shared storage takes to answer, before it has been asked."""
OPEN_S = 5.0
"""Seconds for which a worker's start waits for the key and the directories; one that answers later joins then."""


@dataclass(frozen=True)
class TierParts:
    """A worker's tiers, and what they stand on."""

    tiers: "KVTiers"
    transports: "Transports"

    async def close(self) -> None:
        """End the links. The tiers are the worker's to close, beforehand."""
        await self.transports.close()


def make_tiers(
    config: TiersConfig, rank: "RankParts", peer: Peer, network: Network, secret: bytes, transfer: TransferConfig
) -> TierParts | None:
    """Return the tiers of a worker whose rank 0 this is; None where none are configured. May block for seconds.

    Raises ConfigError, which names the setting.
    """
    if not config.is_on:
        return None
    from twostroke.kvtiers.host_tier import HostTier
    from twostroke.kvtiers.identity import KVIdentity
    from twostroke.kvtiers.kv_tiers import KVTiers
    from twostroke.kvtransfer.receiver import KVReceiver
    from twostroke.kvtransfer.sender import KVSender
    from twostroke.kvtransfer.transports import make_transports
    from twostroke.model.cache.kv_cache import DeviceKVCache, make_host_cache

    loaded = rank.loaded
    if isinstance(loaded.kv_cache, DeviceKVCache):
        raise ConfigError("kv_cache.tiers: KV in a GPU's memory can't be moved to tiers yet: leave them out")
    layout = rank.store.layout.over(ONE_RANK)
    reason = incompatibility(layout, rank.store.layout)
    if reason is not None:
        raise ConfigError(f"kv_cache.tiers: objects are of one rank, which this model's can't be cut into: {reason}")
    store = make_host_cache(layout, num_blocks=config.memory_bytes // (layout.block_bytes * layout.groups.num_tensors))
    transports = make_transports(TransferConfig(), store)
    parts: dict[str, Any] = {
        "peer": Peer(f"{peer.worker_id}/tiers", peer.epoch),
        "store": store,
        "network": network,
        "transports": transports,
        "config": transfer,
        "clock": time.monotonic,
    }
    tiers = KVTiers(
        identity=KVIdentity(layout, loaded.weights or "", loaded.dtype, config.object_tokens),
        host=HostTier(store),
        storage=make_storage_tiers(config, layout),
        sender=KVSender(**parts),
        receiver=KVReceiver(**parts, secret=secret),
        secret=secret,
        clock=time.monotonic,
        write_share=config.write_share,
        read_wait_s=config.read_wait_s,
    )
    return TierParts(tiers, transports)


def make_storage_tiers(config: TiersConfig, layout: "KVLayout") -> "list[StorageTier]":
    """Return the tiers behind the host's, in the order in which they are looked up. May block for OPEN_S.

    Raises ConfigError, but for a key or a directory that does not answer by then.
    """
    from twostroke.kvtiers.storage.bucket import BucketBlobs
    from twostroke.kvtiers.storage.quota import QuotaBlobs
    from twostroke.kvtiers.storage.threads import BlockingCalls, OpeningStore, on_thread
    from twostroke.kvtiers.storage_tier import StorageTier
    from twostroke.kvtiers.tier_index import TierIndex

    cipher = on_thread("read-key", lambda: _cipher(config))
    opening: list[OpeningStore[Any]] = []

    def opened(name: str, store: Callable[[], StoreT]) -> OpeningStore[StoreT]:
        def open_with_key() -> StoreT:
            cipher.result()
            return store()

        opening.append(one := OpeningStore(name, on_thread(f"open-{name}", open_with_key)))
        return one

    def tier(name: str, one: OpeningStore[Any], **more: Any) -> StorageTier:
        reads, writes = BlockingCalls(f"read-{name}", READ_THREADS), BlockingCalls(f"write-{name}", 1)
        more["is_open"] = lambda: one.opened is not None
        return StorageTier(name, one.store, layout, reads, writes, time.monotonic, cipher.result, **more)

    tiers: list[StorageTier] = []
    if config.disk.path is not None:
        evicted: deque[str] = deque()
        path, quota = config.disk.path, config.disk.bytes
        disk = opened("disk", lambda: QuotaBlobs(_files("disk.path", path), quota, on_evicted=evicted.append))
        tiers.append(
            tier(
                "disk",
                disk,
                index=TierIndex(),
                evicted=evicted,
                num_bytes=lambda: 0 if disk.opened is None else disk.opened.num_bytes,
                max_bytes=quota,
                num_evicted=lambda: 0 if disk.opened is None else disk.opened.num_evicted,
            )
        )
    if config.shared.path is not None:
        place = config.shared.path
        tiers.append(tier("shared", opened("shared", lambda: _files("shared.path", place)), read_s=SHARED_READ_S))
    if config.shared.url is not None:
        bucket = BucketBlobs(config.shared.url, endpoint=config.shared.endpoint)
        tiers.append(tier("shared", opened("shared", lambda: bucket), read_s=SHARED_READ_S))
    ends_at = time.monotonic() + OPEN_S
    for one in opening:
        one.wait(max(0.0, ends_at - time.monotonic()))
    return tiers


def _cipher(config: TiersConfig) -> "ObjectCipher | None":
    """Return the cipher of the key's file; None without one. Raises ConfigError."""
    from twostroke.kvtiers.objects import ObjectCipher

    return None if config.key_file is None else ObjectCipher(read_key(config.key_file))


def _files(setting: str, path: str) -> "FileBlobs":
    """Return the directory's objects; make the directory where its parent exists. Raises ConfigError."""
    from twostroke.kvtiers.storage.files import FileBlobs

    files = FileBlobs(Path(path), sync=True)
    try:
        files.root.mkdir(0o700, exist_ok=True)
        files.prepare()
    except OSError as error:
        raise ConfigError(f"{SETTING}.{setting}: {path} can't be used: {error.strerror}: {error.filename}") from error
    return files


@dataclass(frozen=True)
class WorkerParts:
    """An engine with its cache, its block accounting, and both sides of KV transfer, over all ranks."""

    deps: "WorkerDeps"
    rank: RankParts  # rank 0's
    led: LedRanks | None = None  # None: there are no others
    tiers: TierParts | None = None  # None: there are none

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
        if self.tiers is not None:
            await self.tiers.close()
        await self.rank.close()


def _shared_machine(settings: WorkerSettings, host: str, device: "torch.device") -> str:
    """Return a name of the CPU or GPU that the worker shares with others; empty for a GPU of its own."""
    if device.type == "cpu":
        return host
    if settings.resources.gpus >= 1:
        return ""
    import torch

    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


async def load_parts(
    settings: WorkerSettings,
    peer: Peer,
    network: Network,
    secret: bytes,
    *,
    host: str,
    stages: Sequence[StageRanks] | None = None,
) -> WorkerParts:
    """Load the model and make the cache, on all ranks. They listen for KV on `host`, where other nodes reach this one.

    `stages` start the ranks of all stages but the first; None: all ranks are processes of this machine.

    Raises ConfigError with one line that a user can act on, and WorkerLost where another rank fails.
    """
    limit_spinning()
    from twostroke.model.cuda.gpu_use import watch_gpu
    from twostroke.model.parallel.experts import StagesHits
    from twostroke.protocol.grammars import Grammars
    from twostroke.worker.deps import WorkerDeps
    from twostroke.worker.scheduling.block_pool import BlockPool

    tier_parts: TierParts | None = None
    balance: ExpertBalance | None = None
    stages_hits: StagesHits | None = None

    def equipped(rank: RankParts, engine: "Engine", sender: "SendingSide", receiver: "ReceivingSide") -> "WorkerDeps":
        return WorkerDeps(
            peer=peer,
            engine=engine,
            store=rank.store,
            pool=BlockPool(
                rank.loaded.num_blocks, rank.store.layout.block_size, rank.store.layout.groups, time.monotonic
            ),
            network=network,
            sender=sender,
            receiver=receiver,
            clock=time.monotonic,
            max_context=rank.loaded.max_context,
            weights=rank.loaded.weights,
            expert_share=rank.loaded.model_config.expert_share,
            expert_hits=None if (hits := stages_hits or rank.loaded.expert_hits) is None else hits.read,
            expert_balance=balance,
            grammars=Grammars(lambda: make_vocabulary(settings, rank.loaded.model_config.vocab_size)),
            vocab_size=rank.loaded.model_config.vocab_size,
            work=rank.loaded.work(),
            limits=rank.loaded.limits.times(settings.parallel.num_ranks),
            gpu_use=watch_gpu(device := rank.loaded.kv_cache.tensors[0].device),
            dropped_log_lines=num_dropped_lines,
            machine=_shared_machine(settings, host, device),
            tiers=None if tier_parts is None else tier_parts.tiers,
        )

    if settings.parallel.num_ranks == 1:
        rank = await load_rank(settings, peer, network, secret)
        tier_parts = await _with_tiers(settings, rank, peer, network, secret)
        return WorkerParts(equipped(rank, rank.loaded.engine, rank.sender, rank.receiver), rank, tiers=tier_parts)

    from twostroke.kvtransfer.ranks import RankedReceiver, RankedSender
    from twostroke.model.parallel.ranked_engine import Rebalancing, TensorParallelEngine

    led = await LedRanks.start(settings, peer, network, secret, host=host, stages=stages)
    ranks = led.connections
    loading = asyncio.create_task(load_rank(settings, peer, network, secret, led.place), name="load rank 0")
    try:
        await asyncio.wait((loading, ranks.lost), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            await led.close()  # which ends what the loading thread waits for
            await asyncio.wait({loading})
        rank = loading.result()
        addresses = await ranks.loaded()
        if settings.device == "cpu":
            led.has_formed()
        swap_space = rank.loaded.swap_space
        rows = -(-rank.loaded.max_context // rank.store.layout.block_size)
        check_step_size(
            settings,
            rank.loaded.max_context,
            rows * rank.store.layout.groups.count,
            0 if swap_space is None else swap_space.num_blocks,
        )
    except BaseException as error:
        await led.close()
        await asyncio.wait({loading})  # no thread is left behind that loads
        if loading.exception() is None:
            await loading.result().close()
        if isinstance(error, RuntimeError):  # torch's own word for ranks that don't come, or are lost
            raise WorkerLost(f"the worker can't start: {ranks.loss or error}") from error
        raise
    tier_parts = await _with_tiers(settings, rank, peer, network, secret, led)
    if settings.parallel.has_stages and (experts := rank.loaded.model_config.num_experts):
        stages_hits = StagesHits(rank.loaded.expert_hits, ranks.expert_hits, rank.store.layout, experts)
    balance = expert_balance(rank.loaded, settings.parallel.tensor_ranks)
    rebalancing = None if balance is None else Rebalancing(balance.next, rank.loaded.engine.arrange_experts)
    engine = TensorParallelEngine(rank.loaded.engine, ranks, rebalancing)
    sender = RankedSender(rank.sender, ranks, time.monotonic)
    receiver = RankedReceiver(rank.receiver, addresses, ranks, time.monotonic)
    return WorkerParts(equipped(rank, engine, sender, receiver), rank, led, tier_parts)


async def _with_tiers(
    settings: WorkerSettings,
    rank: RankParts,
    peer: Peer,
    network: Network,
    secret: bytes,
    led: LedRanks | None = None,
) -> TierParts | None:
    """Return the worker's tiers, if it has any; close its ranks where they can't be made. Raises ConfigError."""
    try:
        return await asyncio.to_thread(make_tiers, settings.tiers, rank, peer, network, secret, settings.transfer)
    except BaseException:
        if led is not None:
            await led.close()
        await rank.close()
        raise


def expert_balance(loaded: "LoadedEngine", ranks: int) -> "ExpertBalance | None":
    """Return what moves copies of experts among the ranks; None where they have no room for any."""
    from twostroke.model.parallel.experts import STEP_BYTES
    from twostroke.worker.experts import ExpertBalance, ExpertLoad, Room

    slots = loaded.expert_slots
    if slots is None or loaded.expert_hits is None:
        return None
    room = Room(ranks, slots.number, slots.expert_bytes, STEP_BYTES[slots.device.type])
    return ExpertBalance(ExpertLoad(loaded.expert_hits.read, time.monotonic), room, time.monotonic)


def make_vocabulary(settings: WorkerSettings, size: int) -> "Vocabulary":
    """The tokens of a model of which logits have `size`: reads the tokenizer. Raises ConfigError."""
    from twostroke.router.text.output_format import NONE
    from twostroke.router.text.tokenizer import TextTokenizer

    folder = resolve_model_folder(settings.model.path, revision=settings.model.revision)
    tokenizer = TextTokenizer.load(folder, chat_template="", response_template=NONE)
    return msgspec.structs.replace(tokenizer.vocabulary, size=size)


def check_step_size(settings: WorkerSettings, max_context: int, blocks_of_one: int, host_blocks: int) -> None:
    """Check that one message can tell the ranks the longest step. Raises ConfigError.

    `max_context` in tokens; `blocks_of_one` is how long a block table can get.
    """
    size = most_step_bytes(
        max_tokens=settings.max_step_tokens,
        max_sequences=settings.max_batch,
        blocks_of_one=blocks_of_one,
        host_blocks=host_blocks,
    )
    if size > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"max_batch: steps of {settings.max_batch} requests with {max_context} tokens in blocks of "
            f"{settings.block_size} can take {size} bytes to tell its ranks, over {MAX_PAYLOAD_BYTES}: "
            "lower max_batch, max_context or swap_gib, or raise block_size"
        )
