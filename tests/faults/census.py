"""Resources that a process holds now: descriptors, threads, tasks, mappings. Where nothing leaks, they come back to
what they were."""

import asyncio
import gc
import os
import re
import threading
from collections import Counter


def take_census() -> dict[str, dict[str, int]]:
    """Counts by kind. Of the process that calls it, on its event loop."""
    gc.collect()
    return {
        "descriptors": _counted(_descriptor_kinds()),
        "threads": _counted(_thread_kinds()),
        "tasks": _counted(task.get_coro().__qualname__ for task in asyncio.all_tasks()),  # type: ignore[union-attr]
        "shared mappings": _counted(_memfd_mappings()),
    }


def _counted(kinds: "list[str]") -> dict[str, int]:
    return dict(sorted(Counter(kinds).items()))


def socket_inodes() -> dict[int, int]:
    """{inode: descriptor} of this process's sockets."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor of the listing itself, or one that was closed meanwhile
            continue
        if match:
            sockets[int(match[1])] = int(name)
    return sockets


def _descriptor_kinds() -> list[str]:
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        kinds.append(re.sub(r":\[\d+\]$|(?<=^/dev/shm/ucx_shm_posix_)\w+", "", target))  # UCX draws the names
    return kinds


def _thread_kinds() -> list[str]:
    """Python's threads by their names, the others (gloo's, for example) by their number.

    asyncio's pool for blocking calls is left out: it grows as it likes, up to its limit.
    """
    named = [re.sub(r"\d+", "#", thread.name) for thread in threading.enumerate()]
    unnamed = len(os.listdir("/proc/self/task")) - len(named)
    return [name for name in named if not name.startswith("asyncio_")] + ["not Python's"] * unnamed


def _memfd_mappings() -> list[str]:
    with open("/proc/self/maps") as lines:
        return [line.split(maxsplit=5)[5].strip() for line in lines if "memfd:" in line]
