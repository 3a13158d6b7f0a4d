"""Processes below a process, orphans too."""

import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.cluster.local.processes import descendants

ROOT = Path(__file__).resolve().parents[3]

# A child that leaves a grandchild behind; the grandchild pays no attention to SIGTERM if asked to.
SCRIPT = """
import subprocess, sys, time
from twostroke.cluster.local.processes import become_subreaper, descendants, end_descendants

become_subreaper()
stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" if {stubborn} else ""
grandchild = stubborn + "print('up', flush=True); import time; time.sleep(600)"
child = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', %r], stdout=subprocess.PIPE);"
    "p.stdout.readline(); print(p.pid, flush=True)"
) % grandchild
orphan = int(subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, check=True).stdout)
assert descendants() == [orphan], descendants()
print(end_descendants(0.3) == ([orphan] if {stubborn} else []), descendants() == [])
"""


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_orphan_is_found_and_ended_even_if_it_will_not(stubborn: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(stubborn=stubborn)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_child_is_below_us_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in descendants()
    assert child.pid not in descendants()
