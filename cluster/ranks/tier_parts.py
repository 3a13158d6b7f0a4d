"""A worker's KV tiers, made of its settings in the process of its rank 0 (kvtiers/)."""

import logging
import time
from typing import TYPE_CHECKING

from twostroke.kvtiers.config import TiersConfig, check_machine, check_objects
from twostroke.kvtransfer.config import TransferConfig
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import ONE_RANK, incompatibility
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer

if TYPE_CHECKING:
    from twostroke.cluster.ranks.rank_parts import RankParts
    from twostroke.kvtiers.kv_tiers import KVTiers

_log = logging.getLogger(__name__)

READ_THREADS = 4
"""Objects that are read at a time from one storage, each on a thread of its own."""
SHARED_READ_S = 0.02
"""Seconds that a shared storage takes to answer, before it has been asked."""


def make_tiers(
    config: TiersConfig, rank: "RankParts", peer: Peer, network: Network, secret: bytes, transfer: TransferConfig
) -> "KVTiers | None":
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
    for warning in check_machine(config):
        _log.warning(warning)
    check_objects(config, layout.token_bytes)
    store = make_host_cache(layout, num_blocks=config.memory_bytes // (layout.block_bytes * layout.groups.num_tensors))
    transports = make_transports("auto", store)
    own = Peer(f"{peer.worker_id}/tiers", peer.epoch)
    parts = {
        "peer": own,
        "store": store,
        "network": network,
        "transports": transports,
        "config": transfer,
        "clock": time.monotonic,
    }
    return KVTiers(
        identity=KVIdentity(layout, loaded.weights or "", str(loaded.dtype).removeprefix("torch.")),
        object_tokens=config.object_tokens,
        host=HostTier(store),
        storage=_storage(config, layout),
        sender=KVSender(**parts),
        receiver=KVReceiver(**parts, secret=secret),
        secret=secret,
        clock=time.monotonic,
        write_share=config.write_share,
        read_wait_s=config.read_wait_s,
    )
