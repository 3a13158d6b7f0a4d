"""The KV transports, by their names in the configuration, and the choice of the one that a pair of ranks uses."""

import asyncio
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import DeviceStore, HostStore, KVStore, SharedStore, Transport
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import Encoding, KVLayout
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
        from twostroke.kvtransfer.transports.device_units import warm_up_pairs

        warm_up_pairs(names, store, peers, config.encoding)
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
            store, machine=_machine(), join_timeout_s=join_timeout_s, max_chunk_bytes=staged_chunk_bytes
        )
    from twostroke.kvtransfer.transports.torch_distributed import TorchDistributedTransport

    return TorchDistributedTransport(store, join_timeout_s=join_timeout_s, max_chunk_bytes=staged_chunk_bytes)


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


_ON_GPUS = ("cuda_ipc", "torch_distributed", "tcp")  # best first
_ELSEWHERE = ("shm", "tcp", "torch_distributed")
_SAME_MACHINE = ("cuda_ipc", "shm")  # the target reads the source's memory: as it is stored
_WHY = {
    "cuda_ipc": "both workers run on the same machine, and the target reads the source's GPU memory",
    "shm": "both workers run on the same machine, and their caches are in shared memory",
    "tcp": "it joins any two workers, and is the fastest that does",
    "nixl": "the target reads what the source has packed, over RDMA between machines",
}
_NOT_OFFERED = {
    "cuda_ipc": "its GPU memory can't be shared",
    "shm": "its cache is not in shared memory",
    "tcp": "its cache is not in host memory",
    "torch_distributed": "on CPUs kv_transfer.transport has to ask for it",
    "nixl": "kv_transfer.transport has to ask for it",
}
_SETTING = "kv_transfer.transport"


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """A transport for a pair, and why it was chosen."""

    transport: str
    why: str  # in words for people
    missing: tuple[str, ...]  # for each better transport that could join the two: what it would need


def choose_transport(source: Reach, target: Reach, encoding: Encoding, without: Sequence[str] = ()) -> TransportChoice:
    """Return the best transport that both ends have; one in `without` only where there is no other.

    Raises ConfigError where they have none in common, with both sides' lists.
    """
    order = _order(source, target)
    obstacles = {name: _obstacle(name, source, target, encoding) for name in order}
    usable = [name for name in order if obstacles[name] is None]
    if not usable:
        raise ConfigError(_nothing_in_common(source, target, [text for text in obstacles.values() if text is not None]))
    chosen = next((name for name in usable if name not in without), usable[0])
    better = [name for name in order[: order.index(chosen)] if not _is_too_far(name, source, target)]
    missing = [obstacles[name] or f"{name}: a link by it broke or could not be joined" for name in better]
    return TransportChoice(chosen, _why(chosen, source, target), tuple(missing))


def _is_too_far(name: str, source: Reach, target: Reach) -> bool:
    return name in _SAME_MACHINE and source.machine != target.machine


def _order(source: Reach, target: Reach) -> list[str]:
    """Return all possible transports, best first; unknown ones last, in the target's order."""
    known = _ON_GPUS if "cpu" not in (source.device, target.device) else _ELSEWHERE
    others = dict.fromkeys((*target.transports, *source.transports))
    return [*known, *(name for name in others if name not in {*_ON_GPUS, *_ELSEWHERE})]


def _obstacle(name: str, source: Reach, target: Reach, encoding: Encoding) -> str | None:
    """Return why this pair can't use a transport, as a sentence; None where it can."""
    if _is_too_far(name, source, target):
        return f"{name}: the workers run on different machines ({source.machine} and {target.machine})"
    if name in ("torch_distributed", "nixl") and (source.device == "cpu") != (target.device == "cpu"):
        return f"{name}: one worker is on a CPU and the other on a GPU"
    reasons = _not_offered(name, source, target)
    if name in _SAME_MACHINE and encoding != "raw":
        reasons.append(
            f"it moves KV as it is stored, and this pair's is encoded as {encoding}: set kv_transfer.encoding to raw"
        )
    return f"{name}: {'; '.join(reasons)}" if reasons else None


def _not_offered(name: str, source: Reach, target: Reach) -> list[str]:
    """Return the sides that do not offer a transport: those whose setting leaves it out, and those that can't."""
    lacking = [
        (side, reach.is_configured)
        for side, reach in (("source", source), ("target", target))
        if name not in reach.transports
    ]
    reasons: list[str] = []
    if by_setting := [side for side, is_configured in lacking if is_configured]:
        # What auto offers: gloo it does not, and no transport but these reaches both kinds of memory.
        would_help = name in (_ON_GPUS[:2] if source.device != "cpu" else _ELSEWHERE[:2])
        reasons.append(f"{_whose(by_setting)}{_SETTING} leaves it out{': set auto' if would_help else ''}")
    if unable := [side for side, is_configured in lacking if not is_configured]:
        who = "neither worker offers it" if len(unable) == 2 else f"the {unable[0]} does not offer it"
        reasons.append(f"{who} ({_NOT_OFFERED.get(name, 'it is none of its transports')})")
    return reasons


def _whose(sides: Sequence[str]) -> str:
    """Name the sides whose setting it is, where it is not that of both."""
    return f"the {sides[0]}'s " if len(sides) == 1 else ""


def _why(name: str, source: Reach, target: Reach) -> str:
    if asking := [side for side, reach in (("source", source), ("target", target)) if reach.is_configured]:
        return f"{name}: {_whose(asking)}{_SETTING} asks for it"
    if name == "torch_distributed":
        return f"{name}: {'gloo' if source.device == 'cpu' else 'NCCL'} joins any two workers on such devices"
    if name == "tcp" and source.machine != target.machine:
        return "tcp: the workers run on different machines, and it is the fastest that joins them"
    return f"{name}: {_WHY.get(name, 'both workers offer it')}"


def _nothing_in_common(source: Reach, target: Reach, obstacles: list[str]) -> str:
    offers = [", ".join(reach.transports) or "none" for reach in (source, target)]
    return (
        f"no KV transport joins the two workers: the source offers {offers[0]}, the target {offers[1]} "
        f"({'; '.join(obstacles)})"
    )
