"""What the driver tells a worker's process, and hears of it: lines of JSON over a loopback socket.

Each order is answered by one report, when its deed is over: how often the fault has fired, so that a fault which found
nothing to harm is not counted as one.
"""

from typing import Literal

import msgspec

Harm = Literal["flip", "cut"]
Side = Literal["routers", "workers"]  # whom a worker is joined to by token channels, and by transfers of KV


class Arrived(msgspec.Struct, frozen=True):
    """A worker's first line: who it is."""

    role: str
    worker_id: str
    pid: int


class Partition(msgspec.Struct, frozen=True, tag=True):
    """Nothing gets through to one side or from there, and nobody is told. What was sent comes late, as TCP has it.

    Fires for each message and chunk that is held up.
    """

    side: Side
    seconds: float


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Close all connections with one side. Fires for each."""

    side: Side


class Tamper(msgspec.Struct, frozen=True, tag=True):
    """Send the next message of this type twice, or not at all."""

    message: str
    trick: Literal["repeat", "drop"]


class HarmLink(msgspec.Struct, frozen=True, tag=True):
    """Flip a bit of the next KV that leaves over TCP, or cut its connection in the middle of it."""

    harm: Harm


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Each chunk of KV leaves late, for a while. Fires for each."""

    seconds: float
    delay_s: float


class LoseEngine(msgspec.Struct, frozen=True, tag=True):
    """The engine is dead, as its worker would find it."""


Deed = Partition | Cut | Tamper | HarmLink | Slow | LoseEngine


class Order(msgspec.Struct, frozen=True):
    number: int
    deed: Deed


class Report(msgspec.Struct, frozen=True):
    """A deed is over; or, number 0, a chunk was refused here for its digest."""

    number: int
    fired: int
