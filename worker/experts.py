"""Experts of a worker's ranks: their recent load, and the copies that make the busiest rank less busy. No torch.

An expert's tokens are divided alike among the ranks that hold it. Experts are copied greedily, the busiest rank's
heaviest first and to the rank with the least to do, as long as that makes the busiest ranks less busy (as
vLLM's and DeepSeek's balancers do, but that homes never move: what is not copied costs nothing to keep).

From time to time, layer by layer, recent choices show whether other copies would be better. Then slots of experts that
leave are unused from one step on; weights of other experts are copied into them piece by piece, some bytes before each
step; and all ranks use them from the step after the last piece on. Nothing reads a slot while it is written, and all
ranks change at the same step, since they do all this in the order of the steps.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.protocol.clock import Clock
from twostroke.protocol.messages import NOBODY, ArrangeExperts, ExpertMove, LayerCopies
from twostroke.worker.constants import EXPERT_EXAMINE_S, EXPERT_MEMORY_S, MIN_CHOICES, MIN_GAIN

ReadHits = Callable[[], np.ndarray[Any, np.dtype[np.int64]]]
"""[layers, experts]: how often each was chosen so far; zeros where a layer has none."""


class ExpertLoad:
    """The choices of one worker's tokens, the older the less."""

    def __init__(self, read: ReadHits, clock: Clock):
        self._read = read
        self._clock = clock
        self._told_at = clock()
        self._hits = read()
        self._recent = np.zeros(self._hits.shape)

    @property
    def num_layers(self) -> int:
        """Layers of the model, including those without experts."""
        return len(self._recent)

    def recent(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Recent choices of each expert: [layers, experts]."""
        now, hits = self._clock(), self._read()
        self._recent = self._recent * math.exp((self._told_at - now) / EXPERT_MEMORY_S) + (hits - self._hits)
        self._told_at, self._hits = now, hits
        return self._recent

    def skews(self) -> tuple[float, ...]:
        """Return for each layer how often its hottest expert was chosen, over the mean of its experts.

        1 where all were chosen alike, experts / top_k where all tokens chose the same; 0 without choices or experts.
        """
        recent = self.recent()
        means = recent.mean(axis=1)
        return tuple((recent.max(axis=1) / np.where(means > 0, means, 1.0)).tolist())


def rank_loads(loads: Sequence[float], copies: LayerCopies) -> list[float]:
    """Return the load of each rank, given the load of each expert."""
    found = [0.0] * len(copies.slots)
    for load, holders in zip(loads, copies.holders(len(loads)), strict=True):
        for rank, _ in holders:
            found[rank] += load / len(holders)
    return found


def better_copies(loads: Sequence[float], now: LayerCopies) -> LayerCopies | None:
    """The copies that should take the place of those `now`; None: none that are better by MIN_GAIN.

    loads: of each expert, in any unit. A copy that is still wanted stays in its slot.
    """
    planned = _planned(loads, now)
    ranks = len(now.slots)
    gained = max(rank_loads(loads, now)) - max(rank_loads(loads, planned))
    return planned if gained > MIN_GAIN * sum(loads) / ranks else None


def _planned(loads: Sequence[float], now: LayerCopies) -> LayerCopies:
    ranks, room = len(now.slots), [len(slots) for slots in now.slots]
    holders = [
        [rank for rank, _ in each] for each in LayerCopies(now.layer, ((),) * ranks).holders(len(loads))
    ]  # homes
    held: list[list[int]] = [list(now.own_experts(rank, len(loads))) for rank in range(ranks)]
    copied: list[list[int]] = [[] for _ in range(ranks)]
    totals = [sum(loads[expert] for expert in experts) for experts in held]

    def found() -> tuple[int, int] | None:
        """An expert, and a rank that should hold it, too."""
        busiest = max(range(ranks), key=totals.__getitem__)
        if totals[busiest] * ranks <= (1 + MIN_GAIN) * sum(totals):
            return None
        before = sorted(totals, reverse=True)
        for expert in sorted(held[busiest], key=lambda one: -loads[one] / len(holders[one])):
            open_ranks = [
                rank for rank in range(ranks) if len(copied[rank]) < room[rank] and rank not in holders[expert]
            ]
            if loads[expert] <= 0 or not open_ranks:
                continue
            target = min(open_ranks, key=lambda rank: (totals[rank], expert not in now.slots[rank]))
            if sorted(_with_copy(expert, target), reverse=True) < before:
                return expert, target
        return None

    def _with_copy(expert: int, target: int) -> list[float]:
        after, count = [*totals], len(holders[expert])
        for rank in holders[expert]:
            after[rank] -= loads[expert] / count / (count + 1)
        after[target] += loads[expert] / (count + 1)
        return after

    while (copy := found()) is not None:
        expert, target = copy
        totals = _with_copy(expert, target)
        holders[expert].append(target)
        held[target].append(expert)
        copied[target].append(expert)
    return LayerCopies(now.layer, tuple(map(_in_slots, copied, now.slots)))


def _in_slots(experts: Sequence[int], now: tuple[int, ...]) -> tuple[int, ...]:
    """Those that are there stay where they are."""
    newcomers = iter([expert for expert in experts if expert not in now])
    return tuple(expert if expert in experts else next(newcomers, NOBODY) for expert in now)


@dataclass(frozen=True)
class Room:
    """Memory of ranks for copies, and the bytes that may move before one step."""

    ranks: int
    slots: int  # of each rank in each layer
    expert_bytes: int  # of one expert, as it is held
    step_bytes: int

    def __post_init__(self) -> None:
        if min(self.ranks, self.slots, self.expert_bytes, self.step_bytes) < 1:
            raise ValueError(f"{self} is no room for copies")


class ExpertBalance:
    """Balances the experts of one worker; rank 0 calls `next` before each step."""

    def __init__(self, load: ExpertLoad, room: Room, clock: Clock):
        self._load = load
        self._room = room
        self._clock = clock
        nobody = ((NOBODY,) * room.slots,) * room.ranks
        self._used = [LayerCopies(layer, nobody) for layer in range(load.num_layers)]
        self._next_layer = 0
        self._examined_at = clock()
        self._orders: deque[LayerCopies | ExpertMove] = deque()

    @property
    def num_copies(self) -> int:
        """Copies that steps use, in all layers."""
        return sum(expert != NOBODY for copies in self._used for slots in copies.slots for expert in slots)

    def imbalances(self) -> tuple[float, ...]:
        """Return for each layer the recent rows of the busiest rank over the mean of all, with today's copies.

        0 for layers without rows.
        """
        found = []
        for loads, copies in zip(self._load.recent().tolist(), self._used, strict=True):
            of_ranks = rank_loads(loads, copies)
            found.append(max(of_ranks) * len(of_ranks) / sum(of_ranks) if sum(of_ranks) > 0 else 0.0)
        return tuple(found)

    def next(self) -> ArrangeExperts | None:
        """Return the moves that all ranks make before the step that is about to begin; None: none."""
        if not self._orders:
            self._examine_one_layer()
        copies: list[LayerCopies] = []
        moves: list[ExpertMove] = []
        left = self._room.step_bytes
        while self._orders:
            order = self._orders[0]
            if isinstance(order, LayerCopies):
                if any(move.layer == order.layer for move in moves):
                    break  # used from the step behind the moves on
                copies.append(order)
                self._used[order.layer] = order
                self._orders.popleft()
                continue
            if not left:
                break
            piece, rest = _cut(order, left)
            moves.append(piece)
            left -= piece.num_bytes
            self._orders.popleft()
            if rest is not None:
                self._orders.appendleft(rest)
        return ArrangeExperts(tuple(copies), tuple(moves)) if copies or moves else None

    def _examine_one_layer(self) -> None:
        if self._next_layer == 0 and self._clock() < self._examined_at + EXPERT_EXAMINE_S:
            return
        if self._next_layer == 0:
            self._examined_at = self._clock()
        layer, loads = self._next_layer, self._load.recent()[self._next_layer].tolist()
        self._next_layer = (layer + 1) % len(self._used)
        if sum(loads) < MIN_CHOICES * len(loads) or not any(loads):
            return
        planned = better_copies(loads, self._used[layer])
        if planned is not None:
            self._orders.extend(_orders_to(self._used[layer], planned, len(loads), self._room.expert_bytes))


def _orders_to(now: LayerCopies, planned: LayerCopies, number: int, size: int) -> list[LayerCopies | ExpertMove]:
    """Use no slot that changes, fill those, use all."""
    kept = tuple(
        tuple(old if old == new else NOBODY for old, new in zip(*slots, strict=True))
        for slots in zip(now.slots, planned.slots, strict=True)
    )
    homes = LayerCopies(now.layer, ((),) * len(now.slots)).holders(number)
    moves = [
        ExpertMove(now.layer, *homes[expert][0], rank, len(now.own_experts(rank, number)) + place, 0, size)
        for rank, slots in enumerate(planned.slots)
        for place, expert in enumerate(slots)
        if expert != NOBODY and expert != kept[rank][place]
    ]
    orders: list[LayerCopies | ExpertMove] = [*moves, planned]
    return orders if kept == now.slots else [LayerCopies(now.layer, kept), *orders]


def _cut(move: ExpertMove, most: int) -> tuple[ExpertMove, ExpertMove | None]:
    """Its first bytes, as many as may go now, and what is left."""

    def part(first: int, size: int) -> ExpertMove:
        where = move.layer, move.source, move.source_slot, move.target, move.target_slot
        return ExpertMove(*where, first, size)

    if move.num_bytes <= most:
        return move, None
    return part(move.first_byte, most), part(move.first_byte + most, move.num_bytes - most)
