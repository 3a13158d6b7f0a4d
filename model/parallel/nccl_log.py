"""NCCL's log lines about the networks of its connections: only its log tells that it fell back to sockets.

`NCCL_DEBUG=INFO` has a line for each channel of a connection between processes (NVIDIA's guide to NCCL, "Environment
Variables", has the variables; the lines are those of NCCL 2.19 to 2.28):

    host:53:271 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
    host:53:271 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA

Not confirmed on hardware.
"""

import os
import re
import threading
from collections import Counter

SOCKETS = "Socket"

_DEBUG, _SUBSYSTEMS, _FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
_OURS = "/proc/"
_CHANNEL = re.compile(r"NCCL INFO Channel \d+.*? via NET/([^/\s][^/\n]*)/\d+")


class NcclLog:
    """NCCL's lines about its network, kept in memory; one for a process, since NCCL has one log for each."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._beginning = threading.Lock()

    def begin(self) -> None:
        """Have NCCL write here from its first group on, unless the environment already asks for a log."""
        with self._beginning:
            asked = os.environ.get(_FILE, "") if _DEBUG in os.environ or _FILE in os.environ else _OURS
            # A parent's, which this process has inherited, is as good as none.
            if self._descriptor is None and asked.startswith(_OURS):
                self._descriptor = os.memfd_create("nccl-log", os.MFD_CLOEXEC)
                os.environ[_DEBUG], os.environ[_FILE] = "INFO", f"{_OURS}{os.getpid()}/fd/{self._descriptor}"
                os.environ.setdefault(_SUBSYSTEMS, "NET")

    @property
    def num_bytes(self) -> int:
        """Bytes written so far; 0 where nothing is written here."""
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    def networks_since(self, start: int) -> Counter[str]:
        """`networks` of what was written behind the first `start` bytes."""
        if self._descriptor is None:
            return Counter()
        return networks(os.pread(self._descriptor, self.num_bytes - start, start).decode(errors="replace"))


NCCL_LOG = NcclLog()


def networks(log: str) -> Counter[str]:
    """Over which networks channels go, by NCCL's names: Socket, IB, AWS Libfabric. None within a host (P2P, SHM)."""
    return Counter(_CHANNEL.findall(log))
