"""Meaning of a seed: workers, transfers and faults. Pure; the same seed gives the same plan.

Times are virtual seconds, on a scale of their own: a lease is 0.3 s, a message takes half a millisecond.
"""

import random
from dataclasses import dataclass, replace
from itertools import pairwise

LEASE_S = 0.3
PROGRESS_S = 0.6
WAIT_FOR_ROOM_S = 3 * PROGRESS_S

LINK_FAULTS = ("flip a bit", "lose bytes", "repeat bytes", "swap bytes", "stall bytes", "rot a link", "cut a link")
NETWORK_FAULTS = ("cut a connection", "part", "slow messages")
PROCESS_FAULTS = ("stop shortly", "stop for leases", "crash", "crash and restart")
PEER_FAULTS = (
    "drop messages",
    "repeat messages",
    "swap messages",
    "alter messages",
    "lie in messages",
)
"""Messages that are lost, repeated, out of order or wrong inside a connection: TCP and the MAC leave that to a process
that misbehaves."""

_WEIGHTS = {"alter messages": 3.0, "lie in messages": 3.0}  # of those with many faces
FAULTS = (*LINK_FAULTS, *NETWORK_FAULTS, *PROCESS_FAULTS, *PEER_FAULTS)

SOURCE_ACTS = ("send", "abort", "never open", "decline", "open twice", "fall silent", "open stale", "flood")
TARGET_ACTS = (
    "expect",
    "wait for the offer",
    "wait for room",
    "abort",
    "cancel",
    "never expect",
    "refuse",
    "expect twice",
    "expect stale",
    "other size",
)


PASSING = (*NETWORK_FAULTS, "stop shortly", "stop for leases", "crash and restart")
"""Faults that leave nothing behind: transfers that begin some time after must arrive. (An idle link that was cut is not
noticed before its next transfer, which fails.)"""


@dataclass(frozen=True)
class WorkerPlan:
    """One worker; its ranks share everything but their layers and KV heads."""

    block_size: int
    tp_size: int
    pp_size: int
    max_chunk_bytes: int
    context_ranks: int = 1
    shares_units: bool = False


@dataclass(frozen=True)
class TransferPlan:
    """One transfer, and what either side does with it."""

    number: int
    at_s: float  # the ticket is minted then
    source: int  # workers' numbers
    target: int
    num_tokens: int
    num_ready_tokens: int  # in the source's cache already
    num_skip_tokens: int  # in the target's cache already
    steps: tuple[int, ...]  # of the prompt's computation: tokens that are ready after each
    layer_s: float  # time of a layer in a step
    has_token: bool  # a prompt's transfer ends with a first token, a pulled prefix's with none
    is_forged: bool  # a third worker tries to send on a ticket that it has made itself
    source_delay_s: float
    source_act: str
    source_act_after_s: float
    target_delay_s: float
    target_act: str
    target_act_after_s: float
    room_s: float  # until the target has blocks, once the offer is there; 0 but where it is to wait for room
    hold_s: float  # the target reads what it got for so long before it lets go of it

    def compute_s(self, num_layers: int) -> float:
        """Return the seconds that the source computes."""
        return len(self.steps) * num_layers * self.layer_s


@dataclass(frozen=True)
class FaultPlan:
    """Something that goes wrong. `which` picks what it hits."""

    kind: str
    at_s: float
    which: int
    times: int  # how often in a row, where that makes sense


@dataclass(frozen=True)
class Plan:
    """One simulated run."""

    seed: int
    num_layers: int
    num_kv_heads: int
    kinds: int
    workers: tuple[WorkerPlan, ...]
    transfers: tuple[TransferPlan, ...]
    faults: tuple[FaultPlan, ...]
    links_from: tuple[str, ...]  # transports of all workers
    link_bytes_per_s: float
    window_bytes: int

    @property
    def is_calm(self) -> bool:
        """Nothing goes wrong, so every transfer that both sides want must arrive."""
        return not self.faults and not self._has_flood

    @property
    def recovers(self) -> bool:
        """All is well again some time after the last fault."""
        return not self._has_flood and all(fault.kind in PASSING for fault in self.faults)

    @property
    def _has_flood(self) -> bool:
        """A source opens so many transfers that others' offers may be refused, and rightly so."""
        return any(transfer.source_act == "flood" for transfer in self.transfers)

    @property
    def is_harmless(self) -> bool:
        """Return whether faults are only slow, so that every transfer that both sides want must arrive."""
        return not self._has_flood and all(fault.kind == "slow messages" for fault in self.faults)


def make_plan(seed: int) -> Plan:
    """The plan of `seed`."""
    draw = random.Random(seed)
    num_layers = draw.choice((1, 2, 2, 3))
    heads = draw.choice((1, 2, 2, 4))
    sizes = draw.choice(((4, 4), (2, 2), (2, 4), (4, 2), (3, 2), (6, 4), (1, 3)))
    ranks = draw.choice(((1, 1), (1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 2))) if heads > 1 else (1, 1)
    ranks = (min(ranks[0], heads), min(ranks[1], heads))
    num_workers = draw.choice((2, 2, 2, 3))
    chunk_bytes = draw.choice((1, 24, 48, 96, 65536))
    stages = draw.choice(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3)))
    stages = (min(stages[0], num_layers), min(stages[1], num_layers))
    kinds, shares = 2, (False, False)
    if seed % 5 == 4:  # latents, of which a side's ranks may each have a part of the tokens
        of_latents = random.Random(f"latents of {seed}")
        kinds, heads, sizes = 1, 1, of_latents.choice(((4, 4), (6, 6), (4, 8)))
        ranks = of_latents.choice(((1, 2), (2, 1), (2, 2)))
        shares = of_latents.choice(
            ((True, False), (False, True), (True, True)) if sizes[0] == sizes[1] else ((True, False),)
        )
    workers = tuple(
        WorkerPlan(
            sizes[number % 2],
            ranks[number % 2],
            stages[number % 2],
            chunk_bytes,
            ranks[number % 2] if shares[number % 2] else 1,
            shares_units=kinds == 1,
        )
        for number in range(num_workers)
    )
    faulty = draw.random() < 0.8
    num_transfers = draw.choice((1, 1, 2, 2, 3)) if max(ranks) == 1 else 1
    transfers = tuple(_make_transfer(draw, number, workers, num_layers) for number in range(num_transfers))
    faults = tuple(_make_fault(draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))) if faulty else ()
    if faults and all(fault.kind in PASSING for fault in faults) and draw.random() < 0.5:
        late = _make_transfer(draw, num_transfers, workers, num_layers)
        late = replace(late, at_s=1.6, source=0, target=1, source_act="send", target_act="expect", num_skip_tokens=0)
        transfers = (*transfers, late)
    return Plan(
        seed=seed,
        num_layers=num_layers,
        num_kv_heads=heads,
        kinds=kinds,
        workers=workers,
        transfers=transfers,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        links_from=draw.choice((("memory",), ("memory",), ("memory_pull", "memory"), ("memory_pull",))),
        link_bytes_per_s=draw.choice((1e4, 1e5, 1e6)),
        window_bytes=draw.choice((32, 65536)),
    )


def _make_transfer(draw: random.Random, number: int, workers: tuple[WorkerPlan, ...], num_layers: int) -> TransferPlan:
    source, target = draw.sample(range(len(workers)), 2) if draw.random() < 0.3 else (0, 1)
    num_tokens = draw.randint(1, 14)
    ready = min(num_tokens, draw.choice((0, 0, 1, 2)) * workers[source].block_size)
    skip = min(num_tokens, draw.choice((0, 0, 0, 1, 2, 9)) * workers[target].block_size)
    has_token = draw.random() < 0.8
    if not has_token:
        ready = num_tokens
    steps = sorted({num_tokens, *(draw.randint(ready, num_tokens) for _ in range(draw.choice((0, 1, 2))))})
    steps = [step for step in steps if step > ready]
    layer_s = draw.choice((0.0, 0.001, 0.001, 0.005, 0.005))
    unit = max(workers[source].block_size, workers[target].block_size)
    if workers[source].shares_units or workers[target].shares_units:  # each rank pair has every so-manyth
        unit *= max(workers[source].tp_size, workers[target].tp_size)
    has_news = all(after - before >= unit for before, after in pairwise((ready, *steps)))  # full units in every step
    if skip == 0 and len(steps) > 1 and draw.random() < 0.3 and has_news:
        # A long prompt: its chunks come steadily, for longer than a silence may be.
        layer_s = 0.6 * PROGRESS_S / num_layers
    is_plain = draw.random() < 0.6  # both sides want it, and go on with it to its end
    target_act = "expect" if is_plain or draw.random() < 0.4 else draw.choice(TARGET_ACTS[1:])
    return TransferPlan(
        number=number,
        at_s=draw.choice((0.0, 0.0, 0.02, 0.2)) * draw.random() * number,
        source=source,
        target=target,
        num_tokens=num_tokens,
        num_ready_tokens=ready,
        num_skip_tokens=skip,
        steps=tuple(steps),
        layer_s=layer_s,
        has_token=has_token,
        is_forged=len(workers) > 2 and draw.random() < 0.3,
        source_delay_s=draw.choice((0.0, 0.0, 0.01, 0.3)) * draw.random(),
        source_act="send" if is_plain or draw.random() < 0.4 else draw.choice(SOURCE_ACTS[1:]),
        source_act_after_s=draw.choice((0.001, 0.01, 0.05)) * draw.random(),
        target_delay_s=draw.choice((0.0, 0.0, 0.01, 0.3)) * draw.random(),
        target_act=target_act,
        target_act_after_s=draw.choice((0.001, 0.01, 0.05)) * draw.random(),
        room_s=WAIT_FOR_ROOM_S if target_act == "wait for room" else 0.0,
        hold_s=draw.choice((0.0, 0.002, 0.02, 0.4)),
    )


def _make_fault(draw: random.Random) -> FaultPlan:
    return FaultPlan(
        kind=draw.choices(FAULTS, [_WEIGHTS.get(kind, 1.0) for kind in FAULTS])[0],
        at_s=draw.choice((0.0, 0.002, 0.01, 0.03, 0.1)) * draw.random(),
        which=draw.randrange(1 << 30),
        times=draw.choice((1, 1, 1, 2, 4)),
    )
