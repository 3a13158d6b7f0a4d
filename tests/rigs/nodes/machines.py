"""Machines that a node runs on: stand-ins with an address and processes of their own, that can die at once.

An isolated machine has namespaces of its own: a network with an address on a bridge, and process ids. That needs root.
Nothing in it has a name that could be left behind: the bridge is in a network namespace that this process enters, and a
machine's namespaces are those of its first process, which ends when its standard input does. So however this process
ends, the kernel ends the machines' processes and removes the bridge and all interfaces.

A loopback machine is only a group of processes with an address of 127.0.0.0/8. That needs no rights. Ports and memory
are shared, so Serve's proxy can run on one of them only.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from twostroke.cluster.local.processes import descendants, state_and_parent


class Machine(ABC):
    """Two kinds: in namespaces of its own, or a few processes on the loopback interface."""

    def __init__(self, address: str):
        """`address`: its IP address, which the other machines and this process reach."""
        self.address = address
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Start a process there; what it says goes to the end of `log`. It ends with its machine, or with us."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self._inside(), *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a terminal's Ctrl-C is for us alone
            )
        self._started.append(process)
        return process

    @abstractmethod
    def _inside(self) -> list[str]:
        """The beginning of a command that has it run there."""

    def interrupt(self, process: "subprocess.Popen[bytes]") -> None:
        """Ask what was started there to end, by SIGTERM."""
        # `nsenter` is its parent, and would not pass the signal on.
        for pid in self._targets(process.pid):
            _send(pid, signal.SIGTERM)

    def _targets(self, pid: int) -> list[int]:
        return [pid]

    @abstractmethod
    def kill(self) -> None:
        """End all of its processes at once, as a power cut would. Returns when none is left. May be called again."""


class Machines(ABC):
    """Source of machines. It is a context manager that leaves none behind."""

    has_own_ports: bool
    """True where each machine has all ports for itself, so that each can have Serve's proxy on the same port."""

    def __init__(self) -> None:
        self._machines: list[Machine] = []

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.kill()

    def add(self) -> Machine:
        """A new machine, with an address that none had before. Raises OSError where the kernel refuses, or there are
        no addresses left."""
        number = len(self._machines) + 1
        if number > _MOST_MACHINES:
            raise OSError(f"no more than {_MOST_MACHINES} machines")
        self._machines.append(machine := self._make(number))
        return machine

    def replace(self, dead: Machine) -> Machine:
        """A new machine with the address of one that was killed. Raises OSError where the kernel refuses."""
        place = self._machines.index(dead)
        self._machines[place] = machine = self._make(place + 1)
        return machine

    @abstractmethod
    def _make(self, number: int) -> Machine: ...


_CLONE_NEWNET = 0x40000000
_OWN_NETWORK = "/proc/thread-self/ns/net"
# Locally administered. A machine in a dead one's place has its, so that nobody has to ask anew who has the address.
_MAC_PREFIX = "02:00:0a:4d:00:"
_BRIDGE_MAC = f"{_MAC_PREFIX}fe"
_BRIDGE = "nodes"
_PREFIX = "10.77.0."
_OWN_ADDRESS = f"{_PREFIX}254"
_MOST_MACHINES = 250
_PROGRAMS = ("ip", "unshare", "nsenter")


def why_not() -> str | None:
    """Return what is missing for such machines here, or None."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} can't be found (Debian: iproute2 and util-linux)"
    probe = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "ip", "link", "add", _BRIDGE, "type", "bridge"]
    tried = subprocess.run(probe, capture_output=True, text=True)
    if tried.returncode != 0:
        lines = tried.stderr.strip().splitlines() or [f"unshare ended with {tried.returncode}"]
        return f"network namespaces need root: {lines[-1]}"
    return None


class IsolatedMachine(Machine):
    """A machine in namespaces of its own."""

    def __init__(self, number: int):
        """Raises OSError where the kernel refuses."""
        super().__init__(f"{_PREFIX}{number}")
        # The pipe to it is closed with this process, and not inherited by others. Then `cat` ends, and with it, as
        # the first process of its process namespace, all that run there.
        self._unshare = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._unshare.stdout is not None  # asked for above
        try:
            if not self._unshare.stdout.readline():
                raise OSError(f"no namespaces for a machine: unshare ended with {self._unshare.wait()}")
            self._first = int(Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text())
            self._plug_in(number)
        except BaseException:
            self.kill()
            raise

    def _inside(self) -> list[str]:
        return self._entered("--pid", "--mount")

    def _targets(self, pid: int) -> list[int]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children]

    def kill(self) -> None:
        for pipe in (self._unshare.stdin, self._unshare.stdout):
            assert pipe is not None  # asked for above
            pipe.close()
        self._unshare.wait()  # for the first process, whose end the kernel holds back until the others have ended
        for process in self._started:
            process.wait()

    def unplug(self) -> None:
        """Nothing reaches the machine any more, nor comes from it, and its processes run on: as with a cut cable."""
        _run([*self._entered(), "ip", "link", "set", "eth0", "down"])

    def _plug_in(self, number: int) -> None:
        port = f"node{number}"
        while _has_link(port):  # of a machine before us, which the kernel is still taking down
            time.sleep(0.01)
        inner = ["peer", "name", "eth0", "address", f"{_MAC_PREFIX}{number:02x}", "netns", str(self._first)]
        _run(["ip", "link", "add", port, "type", "veth", *inner])
        _run(["ip", "link", "set", port, "master", _BRIDGE, "up"])
        inside = self._entered()
        _run([*inside, "ip", "link", "set", "lo", "up"])
        _run([*inside, "ip", "address", "add", f"{self.address}/24", "dev", "eth0"])
        _run([*inside, "ip", "link", "set", "eth0", "up"])

    def _entered(self, *kinds: str) -> list[str]:
        return ["nsenter", f"--target={self._first}", "--net", *kinds]


class IsolatedMachines(Machines):
    """Inside of the context this thread, and what it starts, are in the machines' network."""

    has_own_ports = True

    def __init__(self) -> None:
        super().__init__()
        self._leaving = ExitStack()

    def __enter__(self) -> "IsolatedMachines":
        outside = os.open(_OWN_NETWORK, os.O_RDONLY | os.O_CLOEXEC)
        self._leaving.callback(os.close, outside)
        _system_call("unshare", _CLONE_NEWNET)
        self._leaving.callback(_system_call, "setns", outside, _CLONE_NEWNET)
        try:
            _run(["ip", "link", "set", "lo", "up"])
            # With an address of its own: else the bridge has its lowest port's, and loses it with that machine, and the
            # others would send to the lost one until they ask anew, which may take a minute.
            _run(["ip", "link", "add", _BRIDGE, "address", _BRIDGE_MAC, "type", "bridge"])
            _run(["ip", "address", "add", f"{_OWN_ADDRESS}/24", "dev", _BRIDGE])
            _run(["ip", "link", "set", _BRIDGE, "up"])
        except BaseException:
            self._leaving.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._leaving:
            super().__exit__()

    def _make(self, number: int) -> Machine:
        return IsolatedMachine(number)


def _run(command: Sequence[str]) -> None:
    """Raises OSError with what the command said, where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _has_link(name: str) -> bool:
    """Return whether this thread's network has an interface of that name."""
    return any(name == one for _, one in socket.if_nameindex())


def _system_call(name: str, *arguments: int) -> None:
    """Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


_LOOPBACK_PREFIX = "127.0.77."


class LoopbackMachine(Machine):
    """A machine on the loopback interface. Its processes must stay below their parent, or end with it, as Ray's do."""

    def _inside(self) -> list[str]:
        return ["setpriv", "--pdeathsig", "TERM"]  # on which `ray start --block` ends what it has started

    def kill(self) -> None:
        stopped: list[int] = []
        for process in self._started:
            if process.poll() is None:
                stopped += _stopped_tree(process.pid)
        for pid in stopped:
            _send(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
        self._started.clear()
        while any(state_and_parent(pid)[0] != "Z" for pid in stopped):
            time.sleep(0.01)


class LoopbackMachines(Machines):
    """Machines on the loopback interface, one per address."""

    has_own_ports = False

    def _make(self, number: int) -> Machine:
        return LoopbackMachine(f"{_LOOPBACK_PREFIX}{number}")


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
