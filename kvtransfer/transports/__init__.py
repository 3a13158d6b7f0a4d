"""Ways for KV to travel, by the names they have in the configuration."""

from kvtransfer.link import Transport
from kvtransfer.store import KVStore
from kvtransfer.transports.tcp import TcpTransport
from protocol.errors import ConfigError

TRANSPORT_NAMES = ("tcp", "torch_distributed")


def make_transport(name: str, store: KVStore, *, join_timeout_s: float = 10.0) -> Transport:
    """The transport of this name for `store`. Raises ConfigError for a name there is none of.

    torch is imported only where it is asked for.
    """
    if name == "tcp":
        return TcpTransport(store, join_timeout_s=join_timeout_s)
    if name == "torch_distributed":
        from kvtransfer.transports.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport(store, join_timeout_s=join_timeout_s)
    raise ConfigError(f"kv_transfer.transport: there is no transport {name!r}; known are {', '.join(TRANSPORT_NAMES)}")
