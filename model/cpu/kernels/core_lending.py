"""Cores that the workers of one server on one host lend each other while they have nothing to compute.

A host's cores are divided among its workers, and work comes in bursts: while prompts come in, decode workers may idle,
and later prefill workers do. So each worker has a row in a table in shared memory: how many cores it owns, and whether
it computes. A worker that computes uses its own cores and an equal share of those of idle workers. Nobody waits and
nobody asks: an owner marks its row, and borrowers see that between two kernels and go on with fewer threads.

The number of threads changes no bit of a result (tests/model/cpu/test_core_lending.py).

A worker holds a lock on its row as long as it lives, so the kernel frees the rows of workers that were killed.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from twostroke.model.cpu.kernels.launch import Kernel, as_integers, compiled

MAX_WORKERS = 64
"""Rows of the table. Further workers of the host keep to their own cores."""
CHECK_S = 1.0
"""Seconds between two looks for workers that have died."""

_log = logging.getLogger(__name__)
_CORES, _IS_BUSY = 0, 1
"""Columns of a row; a row without cores is free."""
_ROW_BYTES = 16
_TABLE_BYTES = MAX_WORKERS * _ROW_BYTES
_TABLE, _ROW, _HOST_CORES, _NUM_THREADS = range(4)
"""Words for `num_threads`: address of the table, the worker's own row, the host's cores, and the result."""


@compiled
def num_threads(words):
    """The threads that a worker may use now: its own cores, and its share of the idle workers' cores."""
    table, own = as_integers(words[0]), words[1]
    idle, busy, borrowers, before = 0, 0, 0, 0
    for row in range(MAX_WORKERS):
        cores = table[2 * row]
        if row == own or (cores > 0 and table[2 * row + 1] != 0):
            busy += cores
            borrowers += 1
            if row < own:
                before += 1
        else:
            idle += cores
    # Workers may own more cores together than there are: three workers of one core on a host of two.
    lent = max(0, min(idle, words[2] - busy))
    share = lent // borrowers
    if before < lent % borrowers:  # the first rows get what can't be divided
        share += 1
    return max(1, table[2 * own] + share)


@Kernel
def _write_num_threads(words):
    words[3] = num_threads(words)


class CoreLending:
    """One worker's row, used on the engine's thread."""

    def __init__(self, cores: int, path: Path, clock: Callable[[], float] = time.monotonic):
        """Join the workers of the table at `path`, with `cores` of its own; busy until the first `end`.

        Raises OSError where that is impossible.
        """
        self._clock = clock
        self._checked_at = clock()
        self._path = path
        _make_private(path.parent)
        for other in path.parent.iterdir():
            if other != path:
                _remove_unused(other)
        self._file, self._row = _claim_row(path)
        self._table = np.frombuffer(mmap.mmap(self._file, _TABLE_BYTES), np.int64).reshape(MAX_WORKERS, 2)
        self._table[self._row, _IS_BUSY] = 1
        self._table[self._row, _CORES] = cores
        host_cores = len(os.sched_getaffinity(0))
        self._words = np.array([self._table.ctypes.data, self._row, host_cores, 0], np.int64)

    @property
    def address(self) -> int:
        """Address of the words for `num_threads`."""
        return self._words.ctypes.data

    def num_threads(self) -> int:
        """Return how many threads a kernel that starts now may use."""
        _write_num_threads.run_team(self.address, 1)
        return int(self._words[_NUM_THREADS])

    def begin(self) -> None:
        """Take the worker's own cores back: it has something to compute."""
        self._table[self._row, _IS_BUSY] = 1
        if (now := self._clock()) - self._checked_at >= CHECK_S:
            self._checked_at = now
            self._free_dead_rows()

    def end(self) -> None:
        """Lend the worker's cores: it has nothing to compute."""
        self._table[self._row, _IS_BUSY] = 0

    def close(self) -> None:
        """Leave the table."""
        self._table[self._row] = 0
        _lock(self._file, fcntl.F_UNLCK, self._row)  # the mapping keeps the open file
        os.close(self._file)
        _remove_unused(self._path)

    def _free_dead_rows(self) -> None:
        """Empty the rows of workers that ended without doing so, or their cores would be lent twice."""
        for row in np.flatnonzero(self._table[:, _CORES]):
            if row != self._row and _lock(self._file, fcntl.F_WRLCK, int(row)):
                self._table[row] = 0
                _lock(self._file, fcntl.F_UNLCK, int(row))


def lend_cores(cores: int, path: Path) -> CoreLending | None:
    """Join the table at `path`; None, and a line in the log, where that is impossible."""
    try:
        return CoreLending(cores, path)
    except (OSError, AttributeError) as error:  # AttributeError: a system without locks of open files
        _log.warning("steps keep to their own %d cores, since idle workers' can't be lent: %s", cores, error)
        return None


def _make_private(folder: Path) -> None:
    """Make a folder that belongs to this user alone. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write there")


def _claim_row(path: Path) -> tuple[int, int]:
    """Return the open file of the table at `path`, and the number of a row that is locked for it. Raises OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _TABLE_BYTES)
            row = next((row for row in range(MAX_WORKERS) if _lock(file, fcntl.F_WRLCK, row)), None)
            if row is None:
                raise OSError(f"{MAX_WORKERS} workers share the table {path} already")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(file)):
                    return file, row
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # somebody has removed it meanwhile


def _remove_unused(path: Path) -> None:
    """Remove a table of which no worker has a row."""
    with contextlib.suppress(OSError):  # somebody else has removed it
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _lock(file, fcntl.F_WRLCK, 0, MAX_WORKERS):
                os.unlink(path)
        finally:
            os.close(file)


def _lock(file: int, kind: int, row: int, rows: int = 1) -> bool:
    """Lock or unlock rows for an open file, without waiting; False: another worker holds one of them."""
    # struct flock: type, whence, start, length, process
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, row * _ROW_BYTES, rows * _ROW_BYTES, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True
