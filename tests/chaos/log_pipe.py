"""The pipe that the server's replicas log into, and its collector, which can stall."""

import array
import asyncio
import fcntl
import os
import termios
from pathlib import Path
from typing import IO

LOG_PIPE_VARIABLE = "TWOSTROKE_CHAOS_LOG_PIPE"
"""Environment variable of the server's processes: the pipe's path."""
PIPE_BYTES = 4096
"""Size of the pipe: few lines fill it, so that a collector that stalls is felt at once."""
LINE_BYTES = 256
"""Bytes of a short line. A pipe without room for so many is full."""


class LogPipe:
    """A named pipe, and a collector that writes to a file what comes through it, on the running event loop."""

    def __init__(self, path: Path, output: IO[bytes]):
        os.mkfifo(path, 0o600)
        # Open for both, the pipe is never at its end, and a process that opens it does not wait.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._output = output

    def collect(self) -> None:
        """Read what comes from now on."""
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def stall(self) -> None:
        """Read nothing from now on."""
        asyncio.get_running_loop().remove_reader(self._descriptor)

    def is_full(self) -> bool:
        """Return whether some process has logged since, and each further one has to wait.

        Fills the pipe with blank lines behind the first line that nobody reads.
        """
        waiting = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, waiting)
        if not waiting[0]:
            return False
        try:
            os.write(self._descriptor, b" " * (LINE_BYTES - 1) + b"\n")
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        """Stop reading. Processes that still write get an error."""
        self.stall()
        os.close(self._descriptor)

    def _read(self) -> None:
        self._output.write(os.read(self._descriptor, PIPE_BYTES))
