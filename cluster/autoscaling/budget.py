"""Both roles share the GPUs. Where these don't suffice, the role that is further from its need gets the next one."""

from dataclasses import dataclass

from twostroke.cluster.autoscaling.config import RoleLimits

WORTH_MOVING = 1.2
"""A GPU changes roles only where the worse served role is then served by so much better: a restart costs something."""


@dataclass(frozen=True)
class Claim:
    """What a role has, wants and may have."""

    has: int
    needs: int  # what the load needs
    wants: int  # what it is to have if the GPUs suffice: not less than it has while it may not shrink
    limits: RoleLimits
    gpus_each: float


def share(prefill: Claim, decode: Claim, budget: float | None) -> tuple[int, int]:
    """(prefill, decode) workers within `budget` GPUs (workers where neither role has GPUs).

    Requests pass both roles one after the other, so what is served in time is the lesser of has / needs of the two:
    each GPU goes where that is least. The minima are kept, whatever they cost.
    """
    if budget is None or _cost(prefill, decode, prefill.wants, decode.wants) <= budget + 1e-9:
        return prefill.wants, decode.wants
    best = _filled(prefill, decode, budget)
    now = (_within(prefill, prefill.has), _within(decode, decode.has))
    if _cost(prefill, decode, *now) > budget + 1e-9:
        return best
    gives = best[0] < now[0] or best[1] < now[1]
    if gives and _served(prefill, decode, best) < WORTH_MOVING * _served(prefill, decode, now):
        return now
    return best


def _filled(prefill: Claim, decode: Claim, budget: float) -> tuple[int, int]:
    """From the minima up, one worker at a time for whoever is served worse, while the budget lasts."""
    p, d = prefill.limits.min, decode.limits.min
    if p == 0 and prefill.needs > 0 and _cost(prefill, decode, 1, d) <= budget + 1e-9:
        p = 1  # none at all would be served worst
    while True:
        may_p = p < min(prefill.limits.max, max(prefill.needs, p)) and (
            _cost(prefill, decode, p + 1, d) <= budget + 1e-9
        )
        may_d = d < min(decode.limits.max, max(decode.needs, d)) and (_cost(prefill, decode, p, d + 1) <= budget + 1e-9)
        if not may_p and not may_d:
            return p, d
        if may_p and (not may_d or p * decode.needs <= d * prefill.needs):
            p += 1
        else:
            d += 1


def _served(prefill: Claim, decode: Claim, workers: tuple[int, int]) -> float:
    return min(workers[0] / max(1, prefill.needs), workers[1] / max(1, decode.needs), 1.0)


def _within(claim: Claim, workers: int) -> int:
    return min(max(workers, claim.limits.min), claim.limits.max)


def _cost(prefill: Claim, decode: Claim, p: int, d: int) -> float:
    if prefill.gpus_each <= 0 and decode.gpus_each <= 0:
        return float(p + d)
    return p * prefill.gpus_each + d * decode.gpus_each
