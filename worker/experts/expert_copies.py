"""The choice of experts that a worker's ranks hold copies of, so that the busiest rank has less to do. Pure; no torch.

An expert's tokens are divided alike among the ranks that hold it. Experts are copied greedily, the busiest rank's
heaviest first and to the rank with the least to do, as long as that makes the busiest ranks less busy (as
vLLM's and DeepSeek's balancers do, but that homes never move: what is not copied costs nothing to keep).
"""

from collections.abc import Sequence

from twostroke.protocol.messages import NOBODY, LayerCopies
from twostroke.worker.constants import LEAST_GAIN


def rank_loads(loads: Sequence[float], copies: LayerCopies) -> list[float]:
    """Return the load of each rank, given the load of each expert."""
    found = [0.0] * len(copies.slots)
    for load, holders in zip(loads, copies.holders(len(loads)), strict=True):
        for rank, _ in holders:
            found[rank] += load / len(holders)
    return found


def better_copies(loads: Sequence[float], now: LayerCopies) -> LayerCopies | None:
    """The copies that should take the place of those `now`; None: none that are better by LEAST_GAIN.

    loads: of each expert, in any unit. A copy that is still wanted stays in its slot.
    """
    planned = _planned(loads, now)
    ranks = len(now.slots)
    gained = max(rank_loads(loads, now)) - max(rank_loads(loads, planned))
    return planned if gained > LEAST_GAIN * sum(loads) / ranks else None


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
        if totals[busiest] * ranks <= (1 + LEAST_GAIN) * sum(totals):
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
