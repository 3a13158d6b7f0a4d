"""Cores of a machine's idle workers, lent to its busy ones.

A machine's cores are shared out among its workers, and work comes in bursts: while prompts are read no worker decodes,
or the other way round, and a part of the cores would stand still. So each worker tells in a file in shared memory until
when it computes, and takes, for a step or a layer, an equal part of the cores of those that do not.

The file has a row for each worker: how many cores are its own, and the time (CLOCK_MONOTONIC, ns) until which it needs
them. A worker holds a lock on its row as long as it lives, so the kernel frees the rows of dead ones. Nobody waits for
anybody: who reads a row a moment too early shares a core with its owner for a step, or a layer.

Threads of a step change none of its bits: docs/engine.md says which kernels see to it.
"""

import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

MOST_WORKERS = 256  # of a machine; further ones neither lend nor borrow
STEP_NS = 1_000_000_000  # a step or a layer that takes longer may see its cores lent; so is who died within one
PAUSE_NS = 50_000_000  # between two steps of a worker that has more to do

_log = logging.getLogger(__name__)
_CORES, _UNTIL = 0, 1  # columns
_ROW_BYTES = 16


def default_path() -> Path:
    """Of all workers of this user on this machine, whichever server they belong to: the cores are the same."""
    return Path(f"/dev/shm/twostroke-cores-{os.getuid()}")


class CoreLending:
    """One worker's row. `begin` and `end` belong to the engine's thread."""

    def __init__(self, cores: int, path: Path | None = None, clock: Callable[[], int] = time.monotonic_ns):
        """For a worker with `cores` of its own, which is loading until its first `end`.

        Raises OSError where there is no shared memory to write to.
        """
        self._own = cores
        self._clock = clock
        self._usable = len(os.sched_getaffinity(0))
        self._file = os.open(path or default_path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(self._file).st_uid != os.getuid():
                raise PermissionError(f"{path or default_path()} belongs to somebody else")
            os.ftruncate(self._file, MOST_WORKERS * _ROW_BYTES)
            memory = mmap.mmap(self._file, MOST_WORKERS * _ROW_BYTES)
            self._rows = np.frombuffer(memory, np.int64).reshape(MOST_WORKERS, 2)
            self._row = self._claim()
        except BaseException:
            os.close(self._file)
            raise
        self._rows[self._row] = cores, np.iinfo(np.int64).max

    def begin(self) -> int:
        """A step, or a layer of it, begins: on how many cores, its worker's own and lent ones."""
        now = self._clock()
        self._rows[self._row, _UNTIL] = now + STEP_NS
        is_idle = self._rows[:, _UNTIL] < now
        lent = int(self._rows[is_idle, _CORES].sum())
        if not lent:
            return self._own
        borrowers = int(np.count_nonzero(self._rows[~is_idle, _CORES]))
        return max(self._own, min(self._own + lent // borrowers, self._usable))

    def end(self) -> None:
        """The step has ended; another one may follow."""
        self._rows[self._row, _UNTIL] = self._clock() + PAUSE_NS

    def close(self) -> None:
        """Neither lend nor borrow any more."""
        self._rows[self._row] = 0
        os.close(self._file)  # and with it the lock; the memory is unmapped once nobody holds the array

    def _claim(self) -> int:
        """The first free row, locked. Rows of the dead are emptied, or their cores would be lent twice."""
        ours: int | None = None
        for row in range(MOST_WORKERS):
            if not self._lock(row, fcntl.F_WRLCK):
                continue
            self._rows[row] = 0
            if ours is None:
                ours = row
            else:
                self._lock(row, fcntl.F_UNLCK)
        if ours is None:
            raise OSError(f"{MOST_WORKERS} workers share this machine's cores already")
        return ours

    def _lock(self, row: int, kind: int) -> bool:
        """Lock or unlock a row for this open file, without waiting; False: another one holds it."""
        # struct flock: type, whence, start, length, process
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, row * _ROW_BYTES, _ROW_BYTES, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except BlockingIOError:
            return False
        return True


def lend_cores(cores: int) -> CoreLending | None:
    """None, and a line in the log, where a worker can't take part: it keeps to its own cores."""
    try:
        return CoreLending(cores)
    except OSError as error:
        _log.warning("steps keep to %d cores of their own, since idle workers' can't be lent: %s", cores, error)
        return None
