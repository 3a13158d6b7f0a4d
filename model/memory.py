"""How much memory an engine may take."""

from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now without pushing others out; on CPUs the cgroup's limit counts too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_host_bytes(), *_cgroup_bytes())


def gibibytes(count: int) -> str:
    """For people: `1.50 GiB`, in MiB below one."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _cgroup_bytes() -> list[int]:
    """What the container's limit leaves, page cache counted as free; empty without a limit."""
    for limit, usage, stat in (
        ("memory.max", "memory.current", "memory.stat"),  # cgroup v2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),  # v1
    ):
        root = Path("/sys/fs/cgroup")
        try:
            most = (root / limit).read_text(encoding="ascii").strip()
            used = int((root / usage).read_text(encoding="ascii"))
            fields = dict(line.split() for line in (root / stat).read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue  # this host has no such cgroup file: no such limit
        if most == "max":
            return []
        return [max(0, int(most) - used + int(fields.get("inactive_file", fields.get("total_inactive_file", "0"))))]
    return []
