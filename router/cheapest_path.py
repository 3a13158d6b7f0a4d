"""The path with the least predicted time, by what every worker has cached and has to do. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.kv_layout import incompatibility
from protocol.stats import WorkerInfo
from protocol.tickets import Peer
from router.estimate import Estimate
from router.path_costs import Need, PrefillCosts, alone_costs, decode_costs, prefill_costs, transfer_s
from router.policy import NoPath, Path
from router.worker_table import AVAILABLE, DRAINING, EJECTED, UNWELCOME, Floats, Ints, WorkerTable

_EQUAL = 0.05
"""Costs within this part of the least count as equal, and load decides: fitted costs are no better than that."""

Mask = NDArray[np.bool_]
"""By a table's rows. Where None stands for one, all of them are meant: most fleets are of one kind and well."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Decode workers of one kind, and the prefill workers whose KV they take."""

    decode: Mask | None
    prefill: Mask | None


@dataclass(frozen=True, slots=True)
class Workers:
    """All that paths are made of."""

    prefill: WorkerTable
    decode: WorkerTable
    pairings: tuple[Pairing, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """How many tokens of a prompt's beginning each worker has, by its row."""

    prefill: Floats
    decode: Floats


@dataclass(frozen=True, slots=True)
class _Source:
    info: WorkerInfo
    tokens: float


def pair_up(prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo]) -> tuple[Pairing, ...]:
    """Who can send KV to whom; decode workers that take none are in no pair."""
    kinds = dict.fromkeys(info.layout for info in decode)
    senders = dict.fromkeys(info.layout for info in prefill)
    pairings: list[Pairing] = []
    for kind in kinds:
        able = {layout for layout in senders if incompatibility(layout, kind) is None}
        pairings.append(
            Pairing(
                _mask(info.layout == kind and bool(info.transfer_addresses) for info in decode),
                _mask(info.layout in able for info in prefill),
            )
        )
    return tuple(pairings)


def cheapest_path(
    workers: Workers,
    need: Need,
    held: Held,
    *,
    failed: Collection[Peer] = (),
    ejected: Collection[Peer] = (),
    decodes_alone: bool = True,
    turn: int = 0,
) -> Path:
    """The pair of workers, or the decode worker alone, that is through with the request first; with its estimate.

    Prefill workers in `failed` or `ejected` are never taken, decode workers in them only for want of others, draining
    ones never. Where not `decodes_alone`, a decode worker computes a prompt only where there is no pair. Of equals,
    each `turn` takes another. Raises NoPath where no decode worker is left.
    """
    prefill, decode = workers.prefill, workers.decode
    decode_tier = _tiers(decode, failed, ejected)
    able = _able_to_decode(decode, decode_tier, need)
    decoding = decode_costs(decode, need)
    best: Path | None = None
    best_s = np.inf
    if len(prefill):
        prefill_tier = _tiers(prefill, failed, ejected)
        able_prefill = _able_to_prefill(prefill, prefill_tier, need)
        source = _source(workers, need, held, prefill_tier, decode_tier)
        reading = prefill_costs(prefill, need, held.prefill, _offered(source, prefill))
        reading_s = reading.total_s
        for pairing in workers.pairings:
            first, second = _both(able_prefill, pairing.prefill), _both(able, pairing.decode)
            if not _anybody(first) or not _anybody(second):
                continue
            p = _pick(reading_s, first, reading.new_tokens, turn)
            pull_s, prefill_s, new_tokens = _reading(reading, p)
            sending_s = transfer_s(
                decode,
                need,
                held.decode,
                hidden_s=prefill_s,
                last_tokens=min(new_tokens, float(prefill.step_tokens[p])),
            )
            # Fewer requests come before a shorter transfer, which is part of a second.
            d = _pick(sending_s + decoding.total_s, second, decode.requests + np.minimum(sending_s, 0.9), turn)
            total_s = float(reading_s[p] + sending_s[d] + decoding.total_s[d])
            if total_s < best_s:
                best_s = total_s
                estimate = Estimate(
                    queue_s=float(reading.queue_s[p]),
                    pull_s=pull_s,
                    prefill_s=prefill_s,
                    transfer_s=float(sending_s[d]),
                    decode_slot_s=float(decoding.slot_s[d]),
                    step_s=float(decoding.step_s[d]),
                )
                pulled = source.info if source is not None and pull_s > 0 else None
                best = Path(prefill.infos[p], decode.infos[d], pulled, estimate, int(new_tokens))
    if best is not None and not decodes_alone:
        return best
    reading_alone = alone_costs(decode, need, held.decode)
    alone_s = reading_alone.total_s + decoding.total_s
    d = _pick(alone_s, able, decode.requests, turn)
    if best is not None and best_s <= alone_s[d]:
        return best
    estimate = Estimate(
        queue_s=float(reading_alone.queue_s[d]),
        pull_s=0.0,
        prefill_s=float(reading_alone.prefill_s[d]),
        transfer_s=0.0,
        decode_slot_s=float(decoding.slot_s[d]),
        step_s=float(decoding.step_s[d]),
    )
    new_tokens = need.num_tokens - min(int(held.decode[d]), need.num_tokens - 1)
    return Path(None, decode.infos[d], None, estimate, new_tokens)


def _tiers(table: WorkerTable, failed: Collection[Peer], ejected: Collection[Peer]) -> Ints:
    if not failed and not ejected:
        return table.tier
    tiers = table.tier.copy()
    for peers, tier in ((ejected, EJECTED), (failed, UNWELCOME)):
        for peer in peers:
            row = table.rows.get(peer)
            if row is not None:
                tiers[row] = max(tiers[row], tier)
    return tiers


def _able_to_decode(table: WorkerTable, tiers: Ints, need: Need) -> Mask | None:
    """The least objectionable. Raises NoPath."""
    if tiers is table.tier and table.all_available and 0 < need.num_tokens <= table.least_context:
        return None
    able = (table.max_context >= need.num_tokens) & (tiers < DRAINING)
    if not able.any():
        raise NoPath("no decode worker is available; try again shortly")
    best: Mask = able & (tiers == tiers[able].min())
    return best


def _able_to_prefill(table: WorkerTable, tiers: Ints, need: Need) -> Mask | None:
    if tiers is table.tier and table.all_available and need.num_tokens <= table.least_context:
        return None
    able: Mask = (table.max_context >= need.num_tokens) & (tiers == AVAILABLE)
    return able


def _mask(rows: Iterable[bool]) -> Mask | None:
    mask = np.array(list(rows), bool)
    return None if mask.all() else mask


def _both(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _anybody(mask: Mask | None) -> bool:
    return mask is None or bool(mask.any())


def _source(workers: Workers, need: Need, held: Held, prefill_tier: Ints, decode_tier: Ints) -> _Source | None:
    """Whoever has most of the prompt, of either role, and of those the one with the fewest requests."""
    if need.min_pull_tokens is None:
        return None
    best: tuple[float, float, WorkerInfo] | None = None
    for table, tokens, tiers in (
        (workers.prefill, held.prefill, prefill_tier),
        (workers.decode, held.decode, decode_tier),
    ):
        if not (tiers is table.tier and table.all_available):
            tokens = np.where(tiers == AVAILABLE, tokens, 0.0)
        most = tokens[tokens.argmax()] if len(tokens) else 0.0
        if most < need.min_pull_tokens:
            continue
        (rows,) = (tokens == most).nonzero()
        row = rows[table.requests[rows].argmin()]
        found = (-float(most), float(table.requests[row]), table.infos[row])
        if best is None or found[:2] < best[:2]:
            best = found
    return None if best is None else _Source(best[2], -best[0])


def _reading(costs: PrefillCosts, row: int) -> tuple[float, float, float]:
    """Seconds of pulling and of computing, and how many tokens are computed, on one worker."""
    pull = costs.pull
    if pull is not None and pull.is_cheaper[row]:
        return float(pull.pull_s[row]), float(pull.prefill_s[row]), float(pull.new_tokens[row])
    return 0.0, float(costs.prefill_s[row]), float(costs.new_tokens[row])


def _offered(source: _Source | None, prefill: WorkerTable) -> Floats | float | None:
    """How much of the prompt each prefill worker could pull."""
    if source is None:
        return None
    if prefill.receives == {source.info.layout}:
        return source.tokens
    return np.array(
        [
            source.tokens
            if info.transfer_addresses and incompatibility(source.info.layout, info.layout) is None
            else 0.0
            for info in prefill.infos
        ]
    )


def _pick(cost_s: Floats, able: Mask | None, work: Floats, turn: int) -> int:
    """The row of the least cost; of those about as good the one with the least `work`, each in turn."""
    if able is not None:
        cost_s = np.where(able, cost_s, np.inf)
    (rows,) = (cost_s <= cost_s[cost_s.argmin()] * (1 + _EQUAL)).nonzero()
    if len(rows) > 1:
        least = work[rows]
        rows = rows[least == least[least.argmin()]]
    return int(rows[turn % len(rows)])
