"""Every process that came out of this one, how to be sure that none is left, and how a signal ends a command.

Ray's head processes, workers and HAProxy start, restart and daemonise each other. As a subreaper, this process becomes
the parent of any whose own parent has ended, so that /proc's parent links lead to all of them. Linux only.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt the orphans among our descendants from now on. Raises OSError where the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def state_and_parent(pid: int) -> tuple[str, int]:
    """The kernel's letter for a process, `Z` for one that has ended, and its parent's id (0 for one that is gone)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "Z", 0
    # The command's name is in parentheses and may contain anything, parentheses too.
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)


def descendants(root: int | None = None) -> list[int]:
    """Ids of all processes below `root` (this process), those that have ended but were not waited for excluded."""
    children: dict[int, list[int]] = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        state, parent = state_and_parent(pid)
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    frontier = [os.getpid() if root is None else root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def end_descendants(patience_s: float) -> list[int]:
    """Ask all descendants to end, kill those that have not within `patience_s`; returns the ids of the killed."""
    _signal_all(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        _reap()
        if not descendants():
            return []
        time.sleep(0.05)
    killed: list[int] = []
    # A process may have made another one while we were killing it: look again until there are none.
    while left := descendants():
        killed += [pid for pid in left if pid not in killed]
        _signal_all(signal.SIGKILL)
        _reap()
        time.sleep(0.01)
    return killed


@contextmanager
def leaving_no_process(patience_s: float) -> Iterator[None]:
    """End all descendants behind the context, also where this process is asked to end. Raises OSError as
    `become_subreaper` does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    become_subreaper()
    try:
        yield
    finally:
        end_descendants(patience_s)


def _signal_all(number: signal.Signals) -> None:
    for pid in descendants():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has ended by itself


def _reap() -> None:
    """Wait for those that have ended, our adopted ones too."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # there are none at all
        if pid == 0:
            return


def interrupt_once() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt once; whoever sends more doesn't speed the ending up."""
    raised = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
