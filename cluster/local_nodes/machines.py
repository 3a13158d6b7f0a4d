"""What a node runs on: a stand-in for a machine, with an address and processes of its own, that can die at once."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Machine(Protocol):
    """Two kinds: in namespaces of its own (isolated.py), or a few processes on the loopback interface (loopback.py)."""

    @property
    def address(self) -> str:
        """Its IP address, which the other machines and this process reach."""

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Start a process there; what it says goes to the end of `log`. It ends with its machine, or with us."""

    def kill(self) -> None:
        """End all of its processes at once, as a power cut would. Returns when none is left. May be called again."""


class Machines(Protocol):
    """Where machines come from; a context manager that leaves none of them behind."""

    @property
    def has_own_ports(self) -> bool:
        """Whether each machine has all ports for itself, so that every one can have Serve's proxy on the same."""

    def add(self) -> Machine:
        """A new machine, with an address that none had before."""

    def __enter__(self) -> "Machines": ...

    def __exit__(self, *_: object) -> None: ...
