"""Instructions that processes have executed, as the processor counts them.

CPU time grows by half and more while neighbours use the same caches, memory and clock; the number of instructions
hardly changes. So it tells on a busy machine, too, whether the code has become more expensive. Linux only.
"""

import contextlib
import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTE_BYTES = 128
_HARDWARE, _INSTRUCTIONS = 0, 1
_FLAGS_AT, _INHERIT, _WITHOUT_HYPERVISOR = 40, 1 << 1, 1 << 6


@contextlib.contextmanager
def counting(groups: Mapping[str, Iterable[int]]) -> Iterator["Instructions | None"]:
    """Count for groups of process ids from now on. None where this machine, or its kernel, lets nobody count."""
    opened: dict[str, list[int]] = {}
    try:
        for group, pids in groups.items():
            opened[group] = []
            for pid in pids:
                for thread in _threads(pid):
                    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                        opened[group].append(_open(thread))
        yield Instructions(opened)
    except _NotCounted:
        yield None
    finally:
        for counters in opened.values():
            for counter in counters:
                os.close(counter)


class Instructions:
    """Counters of groups of threads, and of whatever threads those begin; the kernel's work for them is included."""

    def __init__(self, counters: dict[str, list[int]]):
        self._counters = counters

    def so_far(self) -> dict[str, int]:
        """Of each group, since counting began."""
        return {
            group: sum(struct.unpack("Q", os.read(counter, 8))[0] for counter in counters)
            for group, counters in self._counters.items()
        }


class _NotCounted(Exception):
    """There is no such counter here, or it is not for us."""


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _open(thread: int) -> int:
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        raise _NotCounted
    attributes = bytearray(_ATTRIBUTE_BYTES)
    struct.pack_into("IIQ", attributes, 0, _HARDWARE, _ATTRIBUTE_BYTES, _INSTRUCTIONS)
    struct.pack_into("Q", attributes, _FLAGS_AT, _INHERIT | _WITHOUT_HYPERVISOR)
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    buffer = (ctypes.c_char * _ATTRIBUTE_BYTES).from_buffer(attributes)
    counter = library.syscall(ctypes.c_long(number), buffer, thread, -1, -1, ctypes.c_ulong(0))
    if counter >= 0:
        return int(counter)
    if ctypes.get_errno() == errno.ESRCH:
        raise ProcessLookupError
    raise _NotCounted
