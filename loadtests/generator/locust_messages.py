"""What the head of a run and the processes that send say to each other.

The head sends `prepare` and, when all have answered `prepared`, `begin` with one instant for all. Each second it gets a
report from everybody, the last when the share is over. All of it is msgpack within Locust's own messages.
"""

import msgspec

from twostroke.loadtests.generator.live import Second
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import GeneratorHealth

PREPARE, PREPARED, BEGIN, REPORT = (f"twostroke_{word}" for word in ("prepare", "prepared", "begin", "report"))


class PrepareOrder(msgspec.Struct, frozen=True):
    """What one process is to send."""

    plan: Plan
    worker: int
    num_workers: int
    is_twostroke: bool  # the server


class Prepared(msgspec.Struct, frozen=True):
    worker: int
    error: str | None = None


class Report(msgspec.Struct, frozen=True):
    """What happened since the last."""

    worker: int
    elapsed_s: float
    seconds: dict[int, Second]  # of the run
    health: GeneratorHealth
    over: bool = False
    error: str | None = None
