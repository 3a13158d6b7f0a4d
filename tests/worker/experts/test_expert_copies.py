"""Copies of hot experts, planned and moved between ranks that are lists of words."""

import random

import numpy as np
import pytest

from twostroke.protocol.messages import NOBODY, ArrangeExperts, ExpertMove, LayerCopies
from twostroke.worker.experts import (
    MIN_GAIN,
    ExpertBalance,
    ExpertLoad,
    Room,
    better_copies,
    rank_loads,
)


def nothing(ranks: int, slots: int, layer: int = 0) -> LayerCopies:
    return LayerCopies(layer, ((NOBODY,) * slots,) * ranks)


def check(copies: LayerCopies, number: int, slots: int) -> None:
    """Each expert is at home, and at most once anywhere; no rank has more than its slots."""
    assert all(len(each) == slots for each in copies.slots)
    for expert, holders in enumerate(copies.holders(number)):
        ranks = [rank for rank, _ in holders]
        assert expert in copies.own_experts(ranks[0], number)
        assert len(set(ranks)) == len(ranks)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_the_loads_no_rank_gets_busier_and_plans_come_to_rest(seed: int) -> None:
    generator = random.Random(seed)
    ranks, slots = generator.choice((2, 4, 8)), generator.randint(1, 3)
    number = generator.randint(ranks, 40)
    copies = nothing(ranks, slots)
    for _ in range(3):
        loads = [generator.random() ** generator.choice((1, 8)) for _ in range(number)]
        before = max(rank_loads(loads, copies))
        planned = better_copies(loads, copies)
        if planned is not None:
            check(planned, number, slots)
            assert max(rank_loads(loads, planned)) < before - MIN_GAIN * sum(loads) / ranks
            assert better_copies(loads, planned) is None, "the same loads ask for nothing more"
            for old, new in zip(copies.slots, planned.slots, strict=True):
                for place, expert in enumerate(old):
                    assert expert == NOBODY or expert not in new or new[place] == expert, "nobody moves without need"
            copies = planned


def test_a_hot_experts_tokens_are_shared_out_and_even_loads_are_left_alone() -> None:
    now = nothing(4, 1)
    assert better_copies([1.0] * 8, now) is None
    planned = better_copies([40.0, 1, 1, 1, 1, 1, 1, 1], now)
    assert planned is not None
    assert sorted(expert for slots in planned.slots for expert in slots) == [NOBODY, 0, 0, 0]
    assert max(rank_loads([40.0, 1, 1, 1, 1, 1, 1, 1], planned)) == 12.0


class Ranks:
    """The slots of each rank, byte by byte the expert's number, and what steps read of them."""

    def __init__(self, balance: ExpertBalance, number: int, room: Room, layers: int):
        self.balance = balance
        self.number, self.room = number, room
        self.used = [nothing(room.ranks, room.slots, layer) for layer in range(layers)]
        self.slots = {
            (layer, rank, slot): [expert] * room.expert_bytes
            for layer, copies in enumerate(self.used)
            for expert, [(rank, slot)] in enumerate(copies.holders(number))
        }
        self.orders: list[ArrangeExperts] = []

    def step(self) -> None:
        order = self.balance.next()
        if order is not None:
            self.orders.append(order)
            for copies in order.copies:
                self.used[copies.layer] = copies
            assert sum(move.num_bytes for move in order.moves) <= self.room.step_bytes
            for move in order.moves:
                self.move(move)
        for layer, copies in enumerate(self.used):
            check(copies, self.number, self.room.slots)
            for expert, holders in enumerate(copies.holders(self.number)):
                for rank, slot in holders:
                    assert self.slots[layer, rank, slot] == [expert] * self.room.expert_bytes

    def move(self, move: ExpertMove) -> None:
        read = {place for copies in (self.used[move.layer],) for each in copies.holders(self.number) for place in each}
        assert (move.target, move.target_slot) not in read, "a slot is written that steps read"
        source = self.slots[move.layer, move.source, move.source_slot]
        target = self.slots.setdefault((move.layer, move.target, move.target_slot), [NOBODY] * self.room.expert_bytes)
        target[move.first_byte : move.first_byte + move.num_bytes] = source[move.first_byte :][: move.num_bytes]


@pytest.mark.parametrize("seed", range(30))
def test_no_step_uses_a_slot_before_its_last_piece_has_arrived(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.worker.experts.EXPERT_EXAMINE_S", 5.0)
    generator = np.random.default_rng(seed)
    number, layers, now = 12, 2, 0.0
    room = Room(ranks=4, slots=2, expert_bytes=10, step_bytes=int(generator.integers(1, 25)))
    hits = np.zeros((layers, number), np.int64)
    balance = ExpertBalance(ExpertLoad(lambda: hits.copy(), lambda: now), room, lambda: now)
    ranks = Ranks(balance, number, room, layers)
    imbalances: list[float] = []
    for change in range(4):
        hot = generator.permutation(number)[:2]
        for _ in range(150):
            now += 1.0
            hits[0] += generator.integers(0, 3, number)
            hits[0, hot] += 30
            if change == 3:  # copies that are there may be in the way of others: they are dropped first
                hits[0] += 40
            ranks.step()
        imbalances.append(max(balance.imbalances()))
    assert ranks.orders
    assert balance.num_copies == sum(expert != NOBODY for expert in np.ravel([used.slots for used in ranks.used]))
    assert imbalances[0] < 2.5, "two experts of twelve take nearly all: 2 to 4 without copies"
    assert all(copies.layer == 0 for order in ranks.orders for copies in order.copies), "the other has no rows"
