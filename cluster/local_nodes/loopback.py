"""Machines that are only processes: each has an address of 127.0.0.0/8, and shares all else. Needs no rights.

Ports are shared, so Serve's proxy can run on one of them only; and so is memory, which workers would use between them.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from twostroke.cluster.descendants import descendants
from twostroke.cluster.local_nodes.machines import Machine

_PREFIX = "127.0.77."


class LoopbackMachine:
    """Implements Machine. What its processes start must stay below them, or end with them, as Ray's do."""

    def __init__(self, address: str):
        self._address = address
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return self._address

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """As Machine.start."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],  # on which `ray start --block` ends what it has started
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """As Machine.kill."""
        stopped: list[int] = []
        for process in self._processes:
            if process.poll() is None:
                stopped += _stopped_tree(process.pid)
        for pid in stopped:
            _send(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()
        while any(_runs(pid) for pid in stopped):
            time.sleep(0.01)


class LoopbackMachines:
    """Implements Machines."""

    has_own_ports = False

    def __init__(self) -> None:
        self._machines: list[LoopbackMachine] = []

    def __enter__(self) -> "LoopbackMachines":
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.kill()

    def add(self) -> Machine:
        """As Machines.add."""
        machine = LoopbackMachine(f"{_PREFIX}{len(self._machines) + 1}")
        self._machines.append(machine)
        return machine


def _stopped_tree(root: int) -> list[int]:
    """A process and all below it, stopped first: killed one by one, a parent could leave us a child that none has."""
    stopped: list[int] = []
    while new := [pid for pid in (root, *descendants(root)) if pid not in stopped]:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        stopped += new
    return stopped


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
