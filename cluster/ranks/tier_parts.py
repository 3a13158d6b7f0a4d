"""A worker's KV tiers, made of its settings in the process of its rank 0 (kvtiers/)."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from twostroke.kvtiers.config import SETTING, TiersConfig, read_key
from twostroke.kvtransfer.config import TransferConfig
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import ONE_RANK, incompatibility
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer

if TYPE_CHECKING:
    from twostroke.cluster.ranks.rank_parts import RankParts
    from twostroke.kvtiers.kv_tiers import KVTiers
    from twostroke.kvtiers.objects import ObjectCipher
    from twostroke.kvtiers.storage.blobs import BlobStore
    from twostroke.kvtiers.storage.files import FileBlobs
    from twostroke.kvtiers.storage_tier import StorageTier
    from twostroke.kvtransfer.transports import Transports
    from twostroke.protocol.kv_layout import KVLayout

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
    transports = make_transports("auto", store)
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
        storage=storage_of(config, layout),
        sender=KVSender(**parts),
        receiver=KVReceiver(**parts, secret=secret),
        secret=secret,
        clock=time.monotonic,
        write_share=config.write_share,
        read_wait_s=config.read_wait_s,
    )
    return TierParts(tiers, transports)


def storage_of(config: TiersConfig, layout: "KVLayout") -> "list[StorageTier]":
    """Return the tiers behind the host's, in the order in which they are looked up. May block for OPEN_S.

    Raises ConfigError, but for a key or a directory that does not answer by then.
    """
    from twostroke.kvtiers.storage.bucket import BucketBlobs
    from twostroke.kvtiers.storage.quota import QuotaBlobs
    from twostroke.kvtiers.storage.threads import BlockingCalls, OpeningBlobs, on_thread
    from twostroke.kvtiers.storage_tier import StorageTier
    from twostroke.kvtiers.tier_index import TierIndex

    cipher = on_thread("read-key", lambda: _cipher(config))
    opening: list[OpeningBlobs[Any]] = []

    def opened(name: str, store: Callable[[], StoreT]) -> OpeningBlobs[StoreT]:
        def open_with_key() -> StoreT:
            cipher.result()
            return store()

        blobs = OpeningBlobs(name, on_thread(f"open-{name}", open_with_key))
        opening.append(blobs)
        return blobs

    def tier(name: str, blobs: OpeningBlobs[Any], **more: Any) -> StorageTier:
        reads, writes = BlockingCalls(f"read-{name}", READ_THREADS), BlockingCalls(f"write-{name}", 1)
        more["is_open"] = lambda: blobs.opened is not None
        return StorageTier(name, blobs, layout, reads, writes, time.monotonic, cipher.result, **more)

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
