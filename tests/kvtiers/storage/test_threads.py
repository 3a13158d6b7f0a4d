"""Blocking calls on threads: results and errors come back, and a call that hangs holds up nobody else."""

import asyncio
import subprocess
import sys
import threading

import pytest

from twostroke.kvtiers.storage.threads import BlockingCalls


class Gate:
    """A call that hangs until it is let go, and tells that it has begun."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self._begun = threading.Semaphore(0)
        self.most_at_once = 0
        self._lock = threading.Lock()
        self._now = 0

    def __call__(self) -> str:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        self._begun.release()
        assert self.may_end.wait(30)
        with self._lock:
            self._now -= 1
        return threading.current_thread().name

    async def begun(self, count: int = 1) -> None:
        """Return once so many further calls have begun."""
        for _ in range(count):
            assert await asyncio.to_thread(self._begun.acquire, timeout=30)


def own_threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{name}-")]


async def ended(name: str) -> None:
    """Return once no thread of these calls is left."""
    for thread in own_threads(name):
        await asyncio.to_thread(thread.join, 30)
    assert not own_threads(name)


async def test_a_call_returns_its_result_or_raises_its_error() -> None:
    calls = BlockingCalls("results", 2)
    assert await calls.run(lambda: 7) == 7
    with pytest.raises(OSError, match="the disk is gone"):
        await calls.run(lambda: (_ for _ in ()).throw(OSError("the disk is gone")))
    assert await calls.run(lambda: 8) == 8, "an error ends no thread"
    assert (calls.num_under_way, calls.is_full) == (0, False)
    calls.close()
    await ended("results")


async def test_calls_share_at_most_so_many_threads_started_as_they_are_needed() -> None:
    calls, gate = BlockingCalls("several", 3), Gate()
    assert not own_threads("several")
    await calls.run(lambda: None)
    await calls.run(lambda: None)
    assert len(own_threads("several")) == 1, "one after the other needs one"
    running = [asyncio.create_task(calls.run(gate)) for _ in range(5)]
    await gate.begun(3)
    assert (calls.num_under_way, calls.is_full) == (5, True)
    gate.may_end.set()
    names = await asyncio.gather(*running)
    assert (len(set(names)), gate.most_at_once, calls.is_full) == (3, 3, False)
    calls.close()
    await ended("several")


async def test_a_call_goes_on_though_its_waiter_is_cancelled_and_hands_its_thread_on() -> None:
    calls, gate = BlockingCalls("cancelled", 1), Gate()
    waiter = asyncio.create_task(calls.run(gate))
    await gate.begun()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (calls.num_under_way, calls.is_full) == (1, True), "the thread hangs all the same"
    following = asyncio.create_task(calls.run(lambda: 9))
    gate.may_end.set()
    assert await following == 9
    assert calls.num_under_way == 0
    calls.close()
    await ended("cancelled")


async def test_what_was_asked_before_the_end_is_done() -> None:
    calls, gate = BlockingCalls("closing", 1), Gate()
    running = [asyncio.create_task(calls.run(gate)) for _ in range(3)]
    await gate.begun()
    calls.close()
    gate.may_end.set()
    assert len(await asyncio.gather(*running)) == 3
    await ended("closing")


HANGS = """
import asyncio, threading
from twostroke.kvtiers.storage.threads import BlockingCalls

async def main():
    calls, has_begun = BlockingCalls("hang", 1), threading.Event()

    def hang():
        has_begun.set()
        threading.Event().wait()

    waiter = asyncio.create_task(calls.run(hang))
    await asyncio.to_thread(has_begun.wait)
    waiter.cancel()
    calls.close()

asyncio.run(main())
print("ended")
"""


def test_a_call_that_never_returns_keeps_no_process_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
