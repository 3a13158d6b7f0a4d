"""Processes as tests see them from outside, and waiting for what they bring about."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

SETTLE_S = 15.0
POLL_S = 0.02


def process_state(pid: int) -> str:
    """The kernel's letter for a process (`T` is stopped); empty for one that has ended, though nobody waited for it."""
    state = _stat(pid)[1]
    return "" if state in "ZX" else state


def alive(pids: list[int]) -> dict[int, str]:
    """Those that still run, with their names; zombies that nobody has waited for left out."""
    return {pid: _stat(pid)[0] for pid in pids if process_state(pid)}


def eventually(what: str, condition: Callable[[], bool], within_s: float = SETTLE_S) -> None:
    """Wait for something that other processes bring about, and fail where it doesn't come."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(POLL_S)


async def comes(condition: Callable[[], bool], within_s: float) -> bool:
    """Return whether a condition comes true that other processes or tasks bring about."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


def _stat(pid: int) -> tuple[str, str]:
    """(name, state); both empty for a process that is gone."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    except OSError:
        return "", ""
    return f"{name})", rest.split()[0]
