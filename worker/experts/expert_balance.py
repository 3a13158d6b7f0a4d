"""Moves copies of hot experts among a worker's ranks while it serves: what rank 0 tells all of them between steps.

From time to time, layer by layer, recent choices show whether other copies would be better (expert_copies.py). Then
slots of experts that leave are unused from one step on; weights of other experts are copied into them piece by piece,
some bytes before each step; and all ranks use them from the step after the last piece on. Nothing reads a slot
while it is written, and all ranks change at the same step, since they do all this in the order of the steps.
"""

from collections import deque
from dataclasses import dataclass

from twostroke.protocol.clock import Clock
from twostroke.protocol.messages import NOBODY, ArrangeExperts, ExpertMove, LayerCopies
from twostroke.worker.constants import EXPERT_EXAMINE_S, LEAST_CHOICES
from twostroke.worker.experts.expert_copies import better_copies, rank_loads
from twostroke.worker.experts.expert_load import ExpertLoad


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
        if sum(loads) < LEAST_CHOICES * len(loads) or not any(loads):
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
