"""How much memory an engine may take."""

from pathlib import Path, PurePosixPath

import torch


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now without pushing others out; on CPUs the cgroup's limit counts too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_host_bytes(), *_cgroup_bytes()])


def gibibytes(count: int) -> str:
    """For people: `1.50 GiB`, in MiB below one."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _cgroup_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What each limit on this process leaves, page cache counted as free; empty without a limit."""
    found = (_left(root / folder, *names) for folder, names in _limited_folders(own))
    return [left for left in found if left is not None]


def _limited_folders(own: Path) -> list[tuple[PurePosixPath, tuple[str, str]]]:
    """Where limits on this process may be, relative to the hierarchy's root, and the files of limit and usage there.

    Its own group's and those around it: a service's limit is not at the root. In a container its own group is the root,
    whatever path the host knows it by.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found: set[tuple[PurePosixPath, tuple[str, str]]] = set()
    for line in ("0::/", "0:memory:/", *lines):
        _, controllers, path = line.split(":", 2)
        group = PurePosixPath(path.lstrip("/"))
        if not controllers:
            found |= {(folder, ("memory.max", "memory.current")) for folder in (group, *group.parents)}
        elif "memory" in controllers.split(","):  # of cgroup v1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found |= {("memory" / folder, names) for folder in (group, *group.parents)}
    return sorted(found)


def _left(folder: Path, limit: str, usage: str) -> int | None:
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / usage).read_text(encoding="ascii"))
        fields = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None  # this host has no such file: no such limit
    if most == "max":
        return None
    return max(0, int(most) - used + int(fields.get("inactive_file", fields.get("total_inactive_file", "0"))))
