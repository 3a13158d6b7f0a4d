"""Who else wants this machine's cores while a server is measured on it. Linux alone tells; elsewhere nobody is seen.

A thread's time on a core and its time in the queue for one are counted by the kernel (/proc/PID/task/TID/schedstat).
Both together, of all that is not ours and over the clock, are how many others are ready to run at a time. They get and
take cores as their priority says: a thread of nice n weighs 1.25^-n, and one of the idle class nothing.
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType

EVERY_S = 1.0
NICE = 1.25
"""How much more a thread weighs than one whose nice is larger by 1 (sched(7); kernel/sched/core.c)."""
PROC = Path("/proc")


def share(running: float, others: float, cores: int) -> float:
    """Of a core, that each of so many running threads gets beside `others` ready ones, all weighing alike."""
    return min(1.0, cores / max(running + others, 1e-9))


def wanted_s(process: Path) -> dict[int, float]:
    """By thread: seconds so far in which it ran, or was ready to. Those that end meanwhile are left out."""
    found: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for thread in (process / "task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                ran, waited, _ = (thread / "schedstat").read_text().split()
                found[int(thread.name)] = (int(ran) + int(waited)) / 1e9
    return found


def weight(thread: int) -> float:
    """Of a thread, against one of this machine's ordinary ones; 0 for the idle class."""
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(thread) == os.SCHED_IDLE:
            return 0.0
        return float(NICE ** -os.getpriority(os.PRIO_PROCESS, thread))
    return 0.0


class Neighbours:
    """A context manager, inside of which it looks now and then; `others` is the mean so far, in threads.

    Ours are this process and all that came from it.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._wanted: dict[int, float] = {}
        self._weights: dict[int, float] = {}
        self._sum = 0.0
        self._began = self._looked = 0.0
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look_on, name="neighbours", daemon=True)

    def __enter__(self) -> "Neighbours":
        self._began = time.monotonic()
        self._look()
        self._looking.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._looking.join()
        self._look()

    @property
    def others(self) -> float:
        return self._sum / max(self._looked - self._began, 1e-9)

    def _look_on(self) -> None:
        while not self._over.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        parents: dict[int, int] = {}
        for entry in self._proc.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        now: dict[int, float] = {}
        for process in parents:
            if not _comes_from(process, os.getpid(), parents):
                now |= wanted_s(self._proc / str(process))
        for thread, wanted in now.items():
            if thread not in self._weights:
                self._weights[thread] = weight(thread)
            if thread in self._wanted or self._looked:  # a new one wanted all that it has since the last look
                self._sum += self._weights[thread] * max(0.0, wanted - self._wanted.get(thread, 0.0))
        self._wanted, self._looked = now, time.monotonic()


def _comes_from(process: int, root: int, parents: dict[int, int]) -> bool:
    while process not in (root, 0) and process in parents:
        process = parents[process]
    return process == root
