"""Machines that are only processes: they die as a whole, and with their owner."""

import os
import subprocess
import sys
from pathlib import Path

from tests.rigs.processes import alive, eventually
from twostroke.cluster.local.processes import descendants
from twostroke.tools.nodes.machines import LoopbackMachines

ROOT = Path(__file__).parents[3]


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


def test_its_processes_are_told_to_end_when_the_owner_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, time\n"
        "from pathlib import Path\n"
        "from twostroke.tools.nodes.machines import LoopbackMachines\n"
        "with LoopbackMachines() as machines:\n"
        f"    machines.add().start(['sleep', '1000'], os.environ, Path({str(tmp_path / 'log')!r}))\n"
        "    print('up', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        eventually("it runs", lambda: bool(descendants(owner.pid)))
        theirs = descendants(owner.pid)
        owner.kill()
    eventually("it has ended", lambda: alive(theirs) == {})
