"""Memory that an engine may take, and what weights and the largest step leave of it for the KV cache.

On a GPU the step is measured (model/load.py). On CPUs the cache has an explicit size, and the step is estimated:
the largest one would take seconds there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from twostroke.model.costs.sizes import CUDA_CONTEXT_BYTES
from twostroke.protocol.errors import ConfigError


@dataclass(frozen=True)
class GpuMemory:
    """A GPU as one worker finds it, with its weights loaded and its largest step run once. Bytes."""

    total: int
    free: int  # of the whole device now, the step's memory given back
    share: float  # of the total that this worker may use
    weights: int  # with all else that torch keeps for this worker
    peak_step: int  # what the largest step took beyond that
    graphs: int = 0  # what captured steps will keep, which no other step can use
    staging: int = 0  # what links will take for KV on its way
    communicators: int = 0  # what NCCL has taken for the engine's ranks, beside torch


def cache_bytes_on_gpu(memory: GpuMemory) -> int:
    """Return the bytes that remain for the KV cache. Raises ConfigError, with the arithmetic, where none do."""
    allowed = int(memory.total * memory.share)
    ahead = memory.peak_step + memory.graphs + memory.staging
    outside = CUDA_CONTEXT_BYTES + memory.communicators
    own = allowed - memory.weights - ahead - outside
    # Other processes may hold more of the device than we leave them.
    left = min(own, memory.free - ahead)
    if left <= 0:
        raise ConfigError(
            f"too little memory on cuda: {memory.share:.2f} of {gibibytes(memory.total)} = {gibibytes(allowed)} for "
            f"this worker, of which weights take {gibibytes(memory.weights)}, the largest step "
            f"{gibibytes(memory.peak_step)}, graphs {gibibytes(memory.graphs)}, KV on its way "
            f"{gibibytes(memory.staging)} and CUDA itself {gibibytes(outside)}, and of the GPU "
            f"{gibibytes(memory.free)} are free: nothing is left for the KV cache; raise gpu_memory_utilization, lower "
            "max_step_tokens, quantise, or take a smaller model"
        )
    return left


HOST_SHARE = 0.1
FULL_CONTEXTS = 4
MIN_HOST_CACHE = 2**28


def cache_bytes_on_host(free: int, ranks: int, *, needed: int, full_context: int) -> int:
    """Return the default bytes of one rank's KV cache on a CPU: its part of a tenth of the `free` memory, and at least
    four full contexts if there is room for them.

    `ranks` share the host. Room is half of what its equal part of the memory has left beside what the rank has
    `needed` for weights and steps. Where that is next to nothing, a small cache lets `check_memory` name the whole sum.
    """
    wanted = max(int(free * HOST_SHARE) // ranks, FULL_CONTEXTS * full_context)
    return min(wanted, max((free // ranks - needed) // 2, MIN_HOST_CACHE))


def check_memory(device: str, *, weights: int, cache: int, step: int, free: int) -> None:
    """Raises ConfigError, with the arithmetic, where `free` bytes are too few."""
    needed = weights + cache + step
    if needed > free:
        raise ConfigError(
            f"too little memory on {device}: weights {gibibytes(weights)} + KV cache {gibibytes(cache)} + largest step "
            f"{gibibytes(step)} = {gibibytes(needed)}, but only {gibibytes(free)} are free: "
            "use a smaller KV cache, quantisation, or a smaller model"
        )


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that the workers of one role take of a host, in bytes of one worker with all its ranks."""

    role: str
    replicas: int
    weights: int
    cache: int
    step: int
    swap: int
    processes: int
    tiers: int = 0  # host memory of KV tiers

    @property
    def total(self) -> int:
        """Bytes of one worker."""
        return self.weights + self.cache + self.step + self.swap + self.processes + self.tiers

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "KV cache": self.cache,
            "largest step": self.step,
            "swap": self.swap,
            "KV tiers": self.tiers,
            "processes": self.processes,
        }
        listed = ", ".join(f"{name} {gibibytes(size)}" for name, size in parts.items() if size)
        return f"{self.replicas} {self.role} of {gibibytes(self.total)} ({listed})"


def check_memory_of_all(needs: Sequence[MemoryNeed], rest: int, free: int) -> None:
    """Raises ConfigError, with the arithmetic, where all workers and `rest` take more than `free` bytes."""
    needed = rest + sum(need.replicas * need.total for need in needs)
    if needed > free:
        raise ConfigError(
            f"too little memory: {' + '.join(map(str, needs))} + Ray and routers {gibibytes(rest)} = "
            f"{gibibytes(needed)}, but only {gibibytes(free)} are free: lower kv_cache_gib, max_step_tokens, swap_gib, "
            "kv_cache.tiers.host_bytes or replicas, set model.quantization, or take a smaller model"
        )


def describe_cache(num_blocks: int, block_size: int, block_bytes: int, requests: float, max_context: int) -> str:
    """Describe a cache's capacity in one line. `requests` is the number of full contexts that fit."""
    return (
        f"KV cache {gibibytes(num_blocks * block_bytes)}: {num_blocks} blocks of {block_size} tokens, room for "
        f"{requests:.1f} requests of the full context of {max_context} tokens"
    )


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now without pushing others out; on CPUs the cgroup's limit counts too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_host_bytes(), *_cgroup_bytes()])


def gibibytes(count: int) -> str:
    """Format bytes as `1.50 GiB`, in MiB below one."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _cgroup_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the bytes that each cgroup limit on this process leaves, page cache counted as free; empty without a
    limit."""
    found = (_left(root / folder, *names) for folder, names in _limited_folders(own))
    return [left for left in found if left is not None]


def _limited_folders(own: Path) -> list[tuple[PurePosixPath, tuple[str, str]]]:
    """Return the folders that may limit this process, relative to the hierarchy's root, with their files of limit and
    usage.

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
        return None  # this host lacks the file: there is no limit
    if most == "max":
        return None
    return max(0, int(most) - used + int(fields.get("inactive_file", fields.get("total_inactive_file", "0"))))
