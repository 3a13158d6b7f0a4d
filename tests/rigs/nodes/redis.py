"""A Redis on a machine of its own, where a Ray head keeps what it knows; Debian's, installed or out of `.tools/`."""

import os
import secrets
import shutil
import time
from pathlib import Path

from tests.rigs.nodes.machines import Machine
from twostroke.protocol.errors import ConfigError

PORT = 6379
START_S = 20.0
_TOOLS = Path(__file__).resolve().parents[3] / ".tools"  # of a checkout in which `make tools` ran
_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
_READY = "Ready to accept connections"


class Redis:
    """Started once, on one machine, with which it ends. Keeps nothing on a disk."""

    def __init__(self) -> None:
        """Raises ConfigError where there is no redis-server."""
        program = shutil.which("redis-server", path=os.pathsep.join([os.environ["PATH"], f"{_TOOLS}/usr/bin"]))
        if program is None:
            raise ConfigError(
                "redis-server can't be found: `make tools` fetches it into a checkout; Debian: redis-server"
            )
        self._program = program
        self.password = secrets.token_hex(16)
        self.address = ""  # HOST:PORT, once it was started

    def start(self, machine: Machine, folder: Path) -> None:
        """Returns once it takes connections. Raises OSError with what it said where it does not."""
        log = folder / "redis.log"
        libraries = os.pathsep.join(str(_TOOLS / name) for name in _LIBRARIES)
        command = [self._program, "--bind", machine.address, "--port", str(PORT), "--requirepass", self.password]
        command += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
        process = machine.start(command, os.environ | {"LD_LIBRARY_PATH": libraries}, log)
        deadline = time.monotonic() + START_S
        while _READY not in (text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"Redis does not start: {text}")
            time.sleep(0.02)
        self.address = f"{machine.address}:{PORT}"
