"""The KV transports, by their names in the configuration."""

import asyncio
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import DeviceStore, HostStore, KVStore, SharedStore, Transport
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import Reach

_JOIN_S = 5.0
_JOIN_ON_GPUS_S = 30.0  # NCCL may need seconds to connect, and a peer of an unforeseen layout has kernels to compile


@dataclass(frozen=True)
class Transports:
    """All transports of a rank, and the description that its peers get."""

    by_name: Mapping[str, Transport]
    reach: Reach

    async def close(self) -> None:
        """Close them all."""
        await asyncio.gather(*(transport.close() for transport in self.by_name.values()))


def make_transports(
    config: TransferConfig,
    store: KVStore,
    *,
    peers: Sequence[KVLayout] = (),
    join_timeout_s: float | None = None,
    staged_chunk_bytes: int | None = None,
) -> Transports:
    """Make the transport that the settings name for this store; for `auto` all possible ones, best first.

    `staged_chunk_bytes` is the largest chunk where a link needs memory of its own for it; None: the default. On a GPU,
    the kernels of links with workers of `peers`' layouts are compiled here, which may block for some seconds: no
    transfer's deadline runs meanwhile. Raises ConfigError, with a remedy, for a transport that this store can't use.
    """
    names = _automatic(store) if config.transport == "auto" else (config.transport,)
    if join_timeout_s is None:
        join_timeout_s = _JOIN_ON_GPUS_S if isinstance(store, DeviceStore) else _JOIN_S
    made = {name: _make(name, config, store, join_timeout_s, staged_chunk_bytes) for name in names}
    if isinstance(store, DeviceStore):
        from twostroke.kvtransfer.transports.device_units import warm_up_lanes

        warm_up_lanes(names, store, peers, config.encoding)
    return Transports(made, Reach(names, _machine(), _device(store), is_configured=config.transport != "auto"))


def _automatic(store: KVStore) -> tuple[str, ...]:
    if isinstance(store, DeviceStore):
        from twostroke.kvtransfer.transports.cuda_ipc import missing

        return ("cuda_ipc", "torch_distributed") if missing() is None else ("torch_distributed",)
    if isinstance(store, SharedStore):
        return ("shm", "tcp")
    # torch_distributed on a CPU is gloo, which is slower than tcp everywhere, and nixl no RDMA hardware has confirmed
    # yet: one has to ask for either.
    return ("tcp",)


def _make(
    name: str, config: TransferConfig, store: KVStore, join_timeout_s: float, staged_chunk_bytes: int | None
) -> Transport:
    """Make one transport, and import what only it needs. Raises ConfigError."""
    if name == "shm":
        if not isinstance(store, SharedStore):
            raise ConfigError("the KV cache is not in shared memory, which shm needs; set the transport to auto or tcp")
        from twostroke.kvtransfer.transports.shm import ShmTransport

        return ShmTransport(store, join_timeout_s=join_timeout_s)
    if name == "tcp":
        if not isinstance(store, HostStore) or isinstance(store, DeviceStore):
            raise ConfigError("the KV cache is not in host memory, which tcp needs; set the transport to auto")
        from twostroke.kvtransfer.transports.tcp import TcpTransport

        return TcpTransport(
            store,
            join_timeout_s=join_timeout_s,
            streams=config.tcp_streams,
            max_bytes_per_s=config.tcp_max_bytes_per_s,
        )
    if name == "cuda_ipc":
        if not isinstance(store, DeviceStore):
            raise ConfigError("the KV cache is not in a GPU's memory, which cuda_ipc needs; set the transport to auto")
        from twostroke.kvtransfer.transports.cuda_ipc import CudaIpcTransport, missing

        lacking = missing()
        if lacking is not None:
            raise ConfigError(f"cuda_ipc needs {lacking}, or set the transport to auto")
        return CudaIpcTransport(store, join_timeout_s=join_timeout_s)
    if name == "nixl":
        from twostroke.kvtransfer.transports import nixl

        lacking = nixl.missing()
        if lacking is not None:
            raise ConfigError(f"nixl needs {lacking}; or set the transport to auto")
        return nixl.NixlTransport(
            store, machine=_machine(), join_timeout_s=join_timeout_s, most_chunk_bytes=staged_chunk_bytes
        )
    from twostroke.kvtransfer.transports.torch_distributed import TorchDistributedTransport

    return TorchDistributedTransport(store, join_timeout_s=join_timeout_s, most_chunk_bytes=staged_chunk_bytes)


def _machine() -> str:
    """Return a name that is equal where two processes can share memory and reach each other's abstract sockets.

    Containers of one host share its boot id; their network namespaces, to which abstract sockets belong, differ.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux: no transport here needs to know
        return platform.node()


def _device(store: KVStore) -> str:
    if not isinstance(store, DeviceStore):
        return "cpu"
    import torch

    return str(torch.cuda.get_device_properties(torch.device(store.device)).uuid)
