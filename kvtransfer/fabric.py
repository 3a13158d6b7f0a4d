"""RDMA ports of this machine, and why RDMA may not be used: from what Linux reports. No device is touched."""

import fcntl
import re
import resource
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
"""Folder of InfiniBand, RoCE and EFA devices. Documentation/ABI/stable/sysfs-class-infiniband has its formats."""

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IF_NAME_BYTES = 15  # IFNAMSIZ, without its zero
_IF_ADDRESS = slice(20, 24)  # of struct ifreq: the name, family and port come before


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of one device."""

    device: str  # `mlx5_0`
    port: int
    is_active: bool
    gbit_s: float  # 0: the device doesn't say

    @property
    def name(self) -> str:
        """Name in the form of UCX_NET_DEVICES."""
        return f"{self.device}:{self.port}"


def rdma_ports(root: Path = INFINIBAND) -> tuple[RdmaPort, ...]:
    """Return the ports of all devices, by name; none without RDMA hardware, or where the container can't see it."""
    found = []
    for folder in sorted(root.glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", _read(folder / "rate"))
        found.append(
            RdmaPort(
                folder.parts[-3],
                int(folder.name),
                is_active=_read(folder / "state").endswith("ACTIVE"),
                gbit_s=float(rate[1]) if rate is not None else 0.0,
            )
        )
    return tuple(found)


def interface_at(address: str) -> str | None:
    """Return the network interface whose first IPv4 address this is; None where there is none."""
    try:
        wanted = socket.inet_aton(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_IF_NAME_BYTES])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # one without an address
                continue
            if answer[_IF_ADDRESS] == wanted:
                return name
    return None


def rdma_obstacle(ports: Sequence[RdmaPort], locked_bytes: int | None = None) -> str:
    """Return why RDMA may not be used here, in words. `locked_bytes` is what a process may lock; None: look it up."""
    active = [f"{port.name} ({port.gbit_s:g} Gb/s)" if port.gbit_s else port.name for port in ports if port.is_active]
    if not ports:
        return "this host shows no RDMA device in /sys/class/infiniband"
    if not active:
        return f"no port of {', '.join(port.name for port in ports)} is active"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked_bytes is None else locked_bytes
    if limit != resource.RLIM_INFINITY:
        return (
            f"{', '.join(active)} would do, but this process may lock {limit // 1024} KiB of memory alone: "
            "set its limit (ulimit -l, LimitMEMLOCK, docker's --ulimit memlock=-1) to unlimited"
        )
    return (
        f"{', '.join(active)} would do: look for libibverbs, /dev/infiniband in this container, NCCL_IB_* and NCCL_NET "
        "in its environment, and on EFA the aws-ofi-nccl plugin"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # a device that went, or a file that this driver has not
        return ""
