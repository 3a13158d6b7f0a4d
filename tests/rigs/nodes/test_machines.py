"""Machines of both kinds: what is on one, who reaches it, and that nothing is left of any, however all ends."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.nodes.machines import IsolatedMachine, IsolatedMachines, LoopbackMachines, Machine, why_not
from tests.rigs.processes import alive, eventually
from twostroke.cluster.local.processes import descendants

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ROOT = Path(__file__).parents[3]
LISTEN = "import socket; s = socket.create_server(('0.0.0.0', 80)); print('listens', flush=True); s.accept()"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 80), timeout=5)"


@pytest.fixture
def machines() -> Iterator[IsolatedMachines]:
    with IsolatedMachines() as machines:
        yield machines


def run(machine: Machine, log: Path, *command: str) -> "subprocess.Popen[bytes]":
    return machine.start(command, os.environ, log)


def test_machines_reach_each_other_on_the_same_port(machines: IsolatedMachines, tmp_path: Path) -> None:
    one, other = machines.add(), machines.add()
    for machine in (one, other):
        log = tmp_path / machine.address
        run(machine, log, sys.executable, "-c", LISTEN)
        eventually("it listens", lambda log=log: "listens" in log.read_text())
    there = run(one, tmp_path / "there", sys.executable, "-c", CONNECT, other.address)
    assert there.wait(10) == 0, (tmp_path / "there").read_text()
    subprocess.run([sys.executable, "-c", CONNECT, one.address], check=True, timeout=10)


def test_a_killed_machine_leaves_no_process(machines: IsolatedMachines, tmp_path: Path) -> None:
    others = descendants()
    machine = machines.add()
    # One that has left its parent, and hears no signal that it can refuse.
    daemon = "trap '' TERM HUP INT; (setsid sleep 1000 &) ; echo up; sleep 1000"
    started = run(machine, tmp_path / "log", "sh", "-c", daemon)
    eventually("it is up", lambda: "up" in (tmp_path / "log").read_text())
    ids = [pid for pid in descendants() if pid not in others]
    assert len(ids) == 6  # unshare and cat, nsenter and the shell, and two that sleep
    machine.kill()
    assert alive(ids) == {}
    assert started.wait(0) != 0
    machine.kill()


def test_a_machine_in_a_dead_ones_place_is_reached_by_those_who_knew_it(
    machines: IsolatedMachines, tmp_path: Path
) -> None:
    dead, other = machines.add(), machines.add()

    def is_reached(machine: Machine, log: Path) -> bool:
        run(machine, log, sys.executable, "-c", LISTEN)
        eventually("it listens", lambda: "listens" in log.read_text())
        there = run(other, tmp_path / "there", sys.executable, "-c", CONNECT, machine.address)
        return there.wait(10) == 0

    assert is_reached(dead, tmp_path / "dead")
    dead.kill()
    successor = machines.replace(dead)
    assert successor.address == dead.address
    assert is_reached(successor, tmp_path / "successor")


def test_what_is_told_to_end_may_do_it_in_its_own_way(machines: IsolatedMachines, tmp_path: Path) -> None:
    machine = machines.add()
    log = tmp_path / "log"
    process = run(machine, log, "sh", "-c", "trap 'echo ends; exit 7' TERM; echo up; while :; do sleep 0.01; done")
    eventually("it is up", lambda: "up" in log.read_text())
    machine.interrupt(process)
    assert process.wait(10) == 7
    assert "ends" in log.read_text()


def test_machines_that_come_and_go_leave_the_bridge_its_address(machines: IsolatedMachines) -> None:
    def address() -> str:
        (bridge,) = json.loads(subprocess.check_output(["ip", "-json", "link", "show", "type", "bridge"]))
        return str(bridge["address"])

    before = address()
    several = [machines.add() for _ in range(3)]
    assert address() == before
    for machine in several:
        machine.kill()
        assert address() == before


def test_nothing_reaches_an_unplugged_machine_whose_processes_run_on(
    machines: IsolatedMachines, tmp_path: Path
) -> None:
    machine = machines.add()
    running = run(machine, tmp_path / "log", sys.executable, "-c", LISTEN)
    eventually("it listens", lambda: "listens" in (tmp_path / "log").read_text())
    assert isinstance(machine, IsolatedMachine)
    machine.unplug()
    connect = CONNECT.replace("timeout=5", "timeout=0.2")
    done = subprocess.run([sys.executable, "-c", connect, machine.address], capture_output=True, timeout=10)
    assert done.returncode != 0
    assert running.poll() is None


def test_this_thread_is_back_in_its_own_network_afterwards() -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with IsolatedMachines() as machines:
        machines.add()
        assert os.readlink("/proc/thread-self/ns/net") != before
    assert os.readlink("/proc/thread-self/ns/net") == before


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("IsolatedMachines", 4),  # unshare and cat, nsenter and what sleeps
        ("LoopbackMachines", 1),
    ],
)
def test_nothing_is_left_when_the_owner_is_killed(kind: str, count: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        "import os, time\n"
        "from pathlib import Path\n"
        f"from tests.rigs.nodes.machines import {kind}\n"
        f"with {kind}() as machines:\n"
        f"    machines.add().start(['sh', '-c', 'echo up; exec sleep 1000'], os.environ, Path({str(log)!r}))\n"
        "    time.sleep(1000)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    eventually("the machine's process is up", lambda: log.exists() and "up" in log.read_text())
    theirs = descendants(owner.pid)
    assert len(theirs) == count
    owner.kill()
    owner.wait()
    eventually("all have ended", lambda: alive(theirs) == {})


def test_each_machine_has_an_address_of_this_one() -> None:
    with LoopbackMachines() as machines:
        assert [machines.add().address for _ in range(2)] == ["127.0.77.1", "127.0.77.2"]


def test_a_killed_machine_leaves_no_process_and_the_others_theirs(tmp_path: Path) -> None:
    with LoopbackMachines() as machines:
        one, other = machines.add(), machines.add()
        stays = other.start(["sleep", "1000"], os.environ, tmp_path / "other")
        log = tmp_path / "one"
        started = one.start(["sh", "-c", "trap '' TERM; (sleep 1000; true) & echo up; sleep 1000"], os.environ, log)
        eventually("it is up", lambda: "up" in log.read_text())
        ids = [started.pid, *descendants(started.pid)]
        one.kill()
        assert alive(ids) == {}
        assert stays.poll() is None
        one.kill()
    assert stays.poll() is not None
