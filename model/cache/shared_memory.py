"""Memory that other processes of this machine can read, where it lies: a memfd, mapped MAP_SHARED.

A memfd has no name, so a killed process leaves nothing behind, and no mount limits it: the 64 MB that containers get
for /dev/shm don't count, the cgroup's memory limit does. It can neither shrink nor grow, so whoever has mapped it can't
meet a SIGBUS, and nobody but its maker ever writes into it.
"""

import contextlib
import errno
import fcntl
import mmap
import os

import torch

from twostroke.model.cache.memory import available_bytes
from twostroke.protocol.errors import TwostrokeError

_PIECE_BYTES = 64 * 1024 * 1024  # allocated at a time: a signal undoes the piece under way
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1, not among fcntl's names
_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EOVERFLOW}


class NoSharedMemory(TwostrokeError):
    """This process can't have a memfd, of whatever size. The message says why."""


class NoRoom(TwostrokeError):
    """There is less memory than asked for."""


class SharedMemory:
    """A memfd of zeros, all of its pages there from the start, and a writable mapping of it."""

    def __init__(self, num_bytes: int):
        """Raises NoRoom or NoSharedMemory."""
        if num_bytes > available_bytes(torch.device("cpu")):
            raise NoRoom("not so much is free")  # to try would wake the kernel's out-of-memory killer
        with contextlib.ExitStack() as undo:
            try:
                self._fd = os.memfd_create("kv-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, self._fd)
                os.ftruncate(self._fd, num_bytes)
                # Not when they are first written: that would be a SIGBUS for us or, worse, for a reader.
                for start in range(0, num_bytes, _PIECE_BYTES):
                    os.posix_fallocate(self._fd, start, min(_PIECE_BYTES, num_bytes - start))
                memory = mmap.mmap(self._fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                undo.callback(memory.close)
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            except (OSError, AttributeError) as error:  # the latter where Python was built for a system without memfds
                if isinstance(error, OSError) and error.errno in _NO_ROOM:
                    raise NoRoom(str(error)) from error
                raise NoSharedMemory(f"no memfd can be set up: {error}") from error
            with contextlib.suppress(OSError):  # an older kernel; readers are given read-only descriptors anyway
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
            undo.pop_all()
        self._memory: mmap.mmap | None = memory
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def fd(self) -> int:
        """Of the memfd; it stays this object's. Raises ValueError once closed."""
        if self._memory is None:
            raise ValueError("the shared memory is closed")
        return self._fd

    @property
    def memory(self) -> mmap.mmap:
        """The mapping, to make views of. Raises ValueError once closed."""
        if self._memory is None:
            raise ValueError("the shared memory is closed")
        return self._memory

    def close(self) -> None:
        """Let go of the memory. It goes with its last view: views that still live stay good."""
        if self._memory is not None:
            self._memory = None
            os.close(self._fd)

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None:
            self.close()
