"""Workers as a router knows them, made of the numbers that they would tell."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, Peer
from twostroke.protocol.stats import QueuedWork, StepCosts, WorkerInfo, WorkerStats
from twostroke.router.routing.cheapest_path import Held
from twostroke.router.routing.in_flight import Load
from twostroke.router.routing.workers import AVAILABLE, UNWELCOME, Classes, KnownWorker, known_workers

LAYOUT = KVLayout("a model", "bfloat16", 2, 4, 8, 16)
OTHER_KIND = {"layout": msgspec.structs.replace(LAYOUT, model="other")}
COSTS = StepCosts(base_s=0.01, token_s=0.001, pair_s=0.0, row_s=0.002, context_s=0.0)
"""A prompt token takes 1 ms, a step at least 10 ms."""
IDLE = WorkerStats(free_blocks=100, total_blocks=100)
QUICK = 256e6
"""Bytes a second: of KV a million tokens, which have 2 layers x (K, V) x 4 heads x 8 x 2 bytes."""


def load(*, running: int = 0, waiting: int = 0, **changes: Any) -> WorkerStats:
    """A worker with so many requests that decode, and so many prompt tokens that wait."""
    queued = (QueuedWork("standard", 0, 0.0, waiting, 1),) if waiting else ()
    return msgspec.structs.replace(IDLE, num_running=running, queued=queued, **changes)


def info(name: str, **changes: Any) -> WorkerInfo:
    role = "prefill" if name[0] == "p" else "decode"
    base = WorkerInfo(role, Peer(name, 1), Address("h", 1), (Address("h", 2),), LAYOUT, 100, 10_000, 500, 32)
    return msgspec.structs.replace(base, **changes)


def peers(*names: str) -> set[Peer]:
    return {Peer(name, 1) for name in names}


class Workers:
    """Prefill workers p0, p1, ... and decode workers d0, d1, ... that have told these numbers.

    Those in `down` can't be reached; other keywords are changes to a worker's facts, by its name.
    """

    def __init__(
        self,
        prefill: Sequence[WorkerStats],
        decode: Sequence[WorkerStats],
        *,
        costs: StepCosts | None = COSTS,
        bytes_per_s: float = QUICK,
        down: Sequence[str] = (),
        **changes: Mapping[str, Any],
    ):
        names = [*(f"p{row}" for row in range(len(prefill))), *(f"d{row}" for row in range(len(decode)))]
        self.classes: Classes = {"standard": (0, 0.0)}
        self.known = dict(
            zip(names, known_workers([info(name, **changes.get(name, {})) for name in names]), strict=True)
        )
        for (name, one), stats in zip(self.known.items(), (*prefill, *decode), strict=True):
            tier = UNWELCOME if name in down else AVAILABLE
            one.update(stats, Load(), costs, self.classes, tier=tier, bytes_per_s=bytes_per_s)

    def __getitem__(self, name: str) -> KnownWorker:
        return self.known[name]

    def of(self, role: str, held: Mapping[str, int]) -> list[Held]:
        """Those of a role, where workers hold as many tokens of the prompt as `held` says by name."""
        return [(one, held.get(name, 0)) for name, one in self.known.items() if one.info.role == role]
