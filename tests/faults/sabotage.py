"""Faults within a transport, where neither its callers nor the wire reach.

In the buffers of gloo and NIXL, in a copy under way, in what the kernel is asked for. Each puts itself between a
transport and what it calls, in this process, and passes a point of `injection`.
"""

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

from tests.faults.injection import Fault, Faults
from tests.rigs.delegate import Delegate
from twostroke.kvtransfer.transports import nixl, shm
from twostroke.kvtransfer.transports import torch_distributed as group_link
from twostroke.kvtransfer.transports.host_units import count_units, split_segments

_MEBIBYTE = 1024 * 1024


def install(faults: Faults) -> None:
    """Let the faults `pack` (gloo, nixl), `during copy` (shm, nixl), `pass pool` and `map pool` (shm) happen in this
    process."""
    _install_in_gloo(faults)
    _install_in_nixl(faults)
    _install_in_copies(faults)
    shm.send_pool = _under_limits(faults, "pass pool", shm.send_pool)
    shm.receive_pool = _under_limits(faults, "map pool", shm.receive_pool)


def _install_in_gloo(faults: Faults) -> None:
    make = group_link.process_group

    class DamagingGroup(Delegate):
        """A process group that may flip a bit of what was packed and sealed."""

        def send(self, tensors: Any, rank: int, tag: int) -> Any:
            fault = faults.due("pack")
            if fault is not None:
                tensors[0][tensors[0].numel() // 2] ^= 1
                faults.fired(fault)
            return self._inner.send(tensors, rank, tag)

    group_link.process_group = lambda *arguments: DamagingGroup(make(*arguments))


def _install_in_nixl(faults: Faults) -> None:
    """Flip a bit of what was packed and sealed; halt between the read and the word that tells the source of it."""
    announce, read = nixl.NixlSource._announce, nixl.NixlTarget._read

    def damaging(source: nixl.NixlSource, index: int, packed: Any) -> None:
        fault = faults.due("pack")
        if fault is not None:
            packed[packed.numel() // 2] ^= 1
            faults.fired(fault)
        announce(source, index, packed)

    def halting(target: nixl.NixlTarget, *arguments: Any) -> None:
        read(target, *arguments)
        fault = faults.due("during copy")
        if fault is not None and fault.action == "wait":
            faults.wait_blocking()

    nixl.NixlSource._announce = damaging  # type: ignore[method-assign]
    nixl.NixlTarget._read = halting  # type: ignore[method-assign]


def _install_in_copies(faults: Faults) -> None:
    """Let a copy halt in its middle."""
    real = shm.ShmTarget._copy

    def copy(target: shm.ShmTarget, units: Any, theirs: Any, ours: Any, digest: Any) -> None:
        starts = (0, count_units(ours) // 2)
        halves = list(zip(split_segments(theirs, starts), split_segments(ours, starts), strict=True))
        real(target, units, *halves[0], digest)
        fault = faults.due("during copy")
        if fault is not None and fault.action == "wait":
            faults.wait_blocking()
        real(target, units, *halves[1], digest)

    shm.ShmTarget._copy = copy  # type: ignore[method-assign]


def _under_limits(faults: Faults, at: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def limited(*arguments: Any) -> Any:
        with _refusal(faults.due(at)):
            return call(*arguments)

    return limited


@contextlib.contextmanager
def _refusal(fault: Fault | None) -> Iterator[None]:
    """Let the kernel refuse what is asked of it meanwhile, for real where there is a limit for it."""
    if fault is None:
        yield
    elif fault.action == "EMFILE":
        with _limit(resource.RLIMIT_NOFILE, _lowest_free_descriptor()):
            yield
    elif fault.action == "ENOMEM":  # with room for anything smaller than a cache
        with _limit(resource.RLIMIT_AS, _virtual_bytes() + 8 * _MEBIBYTE):
            yield
    else:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _limit(which: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def _lowest_free_descriptor() -> int:
    free = os.dup(0)
    os.close(free)
    return free


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
