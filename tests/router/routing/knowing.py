"""Workers as a router knows them, made of the numbers that they would tell, and a chooser among them.

No channel leads to the workers: tests pass their numbers on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from twostroke.protocol.block_hash import chain_hashes, pack_hashes
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import BlocksHeld
from twostroke.protocol.requests import Address, GenerateRequest, Peer, SamplingParams
from twostroke.protocol.stats import QueuedWork, StepCosts, TierStats, WorkerInfo, WorkerStats
from twostroke.router.request_state import AttemptContext
from twostroke.router.routing.block_index import BlockIndex
from twostroke.router.routing.chooser import PathChooser, PathConfig
from twostroke.router.routing.workers import AVAILABLE, Classes, FleetView, KnownWorker, WorkerLoad, known_workers

LAYOUT = KVLayout("a model", "bfloat16", 2, 4, 8, 16)
OTHER_KIND = {"layout": msgspec.structs.replace(LAYOUT, model="other")}
COSTS = StepCosts(base_s=0.01, token_s=0.001, pair_s=0.0, row_s=0.002, context_s=0.0)
"""A prompt token takes 1 ms, a step at least 10 ms."""
IDLE = WorkerStats(free_blocks=100, total_blocks=100)
NOTHING: Mapping[str, int] = {}
TIERS = (TierStats("disk", num_bytes=1, read_s=0.005, read_token_s=0.0001),)
"""A token is read in a tenth of the time in which it is computed."""
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

    Other keywords are changes to a worker's facts, by its name.
    """

    def __init__(
        self,
        prefill: Sequence[WorkerStats],
        decode: Sequence[WorkerStats],
        *,
        costs: StepCosts | None = COSTS,
        bytes_per_s: float = QUICK,
        **changes: Mapping[str, Any],
    ):
        names = [*(f"p{row}" for row in range(len(prefill))), *(f"d{row}" for row in range(len(decode)))]
        self.classes: Classes = {"standard": (0, 0.0)}
        self.known = dict(
            zip(names, known_workers([info(name, **changes.get(name, {})) for name in names]), strict=True)
        )
        for one, stats in zip(self.known.values(), (*prefill, *decode), strict=True):
            one.update(stats, WorkerLoad(), costs, self.classes, tier=AVAILABLE, bytes_per_s=bytes_per_s)

    def __getitem__(self, name: str) -> KnownWorker:
        return self.known[name]

    def of(
        self, role: str, cached_tokens: Mapping[str, int], tier_tokens: Mapping[str, int] = NOTHING
    ) -> list[KnownWorker]:
        """Those of a role; all hold as many tokens of the prompt as these say by name, in caches and in tiers."""
        for name, one in self.known.items():
            one.cached_tokens = cached_tokens.get(name, 0)
            one.tier_tokens = tier_tokens.get(name, 0)
        return [one for one in self.known.values() if one.info.role == role]


PROMPT = tuple(range(400))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Rig:
    """p0, p1, d0, d1 have told their numbers, costs among them."""

    def __init__(self, **config):
        self.clock = Clock()
        self.infos = {name: info(name) for name in ("p0", "p1", "d0", "d1")}
        config = PathConfig(**config)
        self.view = FleetView(self.clock)
        self.blocks = self.tier_blocks = None
        if config.policy == "kv_aware":
            self.blocks, self.tier_blocks = (
                BlockIndex(clock=self.clock, max_blocks=config.index_blocks, expected_s=config.expected_s)
                for _ in range(2)
            )
        self.chooser = PathChooser(
            workers=lambda: list(self.infos.values()),
            follow=lambda workers: None,
            view=self.view,
            blocks=self.blocks,
            tier_blocks=self.tier_blocks,
            clock=self.clock,
            config=config,
        )
        for name in self.infos:
            self.tell(name)

    def tell(self, name, **numbers):
        stats = WorkerStats(**{"free_blocks": 100, "total_blocks": 100, "costs": COSTS} | numbers)
        self.view.on_stats(self.infos[name].peer, stats)

    def tell_blocks(self, name, token_ids, *, block_size=16, salt=b"", in_tiers=False):
        names = pack_hashes(chain_hashes(token_ids, block_size, salt))
        index = self.tier_blocks if in_tiers else self.blocks
        return index.heard(self.infos[name].peer, BlocksHeld(names, True, True, 0, in_tiers))

    def emit(self, path, event, sent=()):
        self.chooser.on_event(AttemptContext(path, request(), sent, None), event)

    def choose(self, token_ids=PROMPT, sent=(), **options):
        path = self.chooser.choose(request(token_ids), sent, **options)
        return tuple(info and info.peer.worker_id for info in (path.prefill, path.decode, path.source))

    def take(self, request, sent=(), failed=()):
        """The path chosen, and the hold on its workers."""
        path = self.chooser.choose(request, sent, failed)
        return path, self.chooser.hold(path, request, sent)


def request(token_ids=PROMPT, **changes):
    base = GenerateRequest("template", "", token_ids, len(token_ids), SamplingParams(), 50)
    return msgspec.structs.replace(base, **changes)
