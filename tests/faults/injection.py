"""Faults inside a worker's process, put into what a worker is given anyway: its network and its transports.

A fault is armed for a point that a worker passes, by the parent's command, and fires once when the worker passes it.
Points are messages (`before send Offer`, `after send Grant`, `received Commit`), a link's calls (`before send`,
`after send`, `before receive`, `after receive`; `during send`, `during receive`: once some bytes have moved), and those
within a transport (sabotage.py).
"""

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tests.faults.pattern_store import PatternStore

Refusal = Literal["EMFILE", "ENOMEM", "ENOSPC"]  # the kernel's
Action = Literal["freeze", "wait", "drop", "repeat", "flip", "cut", "slow", "truncate", "swap", "stale epoch"] | Refusal
_DEED_FIRST = ("flip", "cut")  # whoever hears of it may count on it

LIMIT_S = 30.0
"""Seconds to wait for what never comes in a good run."""


@dataclass
class Fault:
    """A fault at a point of a transfer; `skip` passages before it are let through, then `times` are not."""

    at: str
    action: Action
    transfer_id: str | None = None  # hexadecimal; None: whichever comes
    skip: int = 0
    times: int = 1
    num_bytes: int = 0  # for `during ...`: fires once so many have moved; until then, what is sent is paced


@dataclass
class Faults:
    """Those that are armed in this process."""

    report: Callable[..., None]
    store: PatternStore
    armed: list[Fault] = field(default_factory=list)
    via_port: int | None = None  # of a proxy that the next link is joined through
    flipped: tuple[int, int] = (0, 0)  # layer and block
    _let_go: asyncio.Event = field(default_factory=asyncio.Event)  # these two end an action `wait`
    _let_thread_go: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # links have threads

    def due(self, at: str, transfer_id: bytes | None = None) -> Fault | None:
        """The fault that fires here and now, if any. Reported, unless its deed comes first: then the caller does so."""
        fault = self._take(at, transfer_id)
        if fault is not None and fault.action not in _DEED_FIRST and fault.at not in ("during send", "during receive"):
            self.fired(fault)
        return fault

    def _take(self, at: str, transfer_id: bytes | None) -> Fault | None:
        with self._lock:
            for fault in self.armed:
                if fault.at != at or (transfer_id is not None and fault.transfer_id not in (None, transfer_id.hex())):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    return None
                fault.times -= 1
                if not fault.times:
                    self.armed.remove(fault)
                if fault.action == "wait":  # before anybody can hear of it
                    self._let_go.clear()
                    self._let_thread_go.clear()
                return fault
        return None

    def fired(self, fault: Fault) -> None:
        self.report(event="fired", at=fault.at, action=fault.action)
        if fault.action == "freeze":
            freeze()

    async def passed(self, at: str) -> Fault | None:
        """Return the fault as `due` does, at points where the event loop may wait."""
        fault = self.due(at)
        if fault is not None and fault.action == "wait":
            await self._let_go.wait()
        return fault

    def resume(self) -> None:
        """Let whatever waits go on."""
        self._let_go.set()
        self._let_thread_go.set()

    def wait_blocking(self) -> None:
        """Hold a link's thread until the parent lets it go on."""
        if not self._let_thread_go.wait(LIMIT_S):
            raise TimeoutError("nobody let this fault go on")


def freeze() -> None:
    """Stop this whole process, right here, until somebody continues it or kills it."""
    # Sent to this thread, so that it does not run on while the kernel looks for one to deliver the signal to.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
