"""The path with the least predicted time, by what every worker has cached and has to do. Pure."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.routing.fleet import Mask, anybody, both
from twostroke.router.routing.fleet_view import AVAILABLE, DRAINING, EJECTED, UNWELCOME, Ints, WorkerTable
from twostroke.router.routing.path_costs import Need, PromptCost, decode_costs, prompt_cost, prompt_costs, transfer_s
from twostroke.router.routing.policy import Estimate, NoPath, Path
from twostroke.router.slo.classes import Floats

_EQUAL = 0.05
"""Costs within this part of the least count as equal, and load decides: fitted costs are no better than that."""


class _Source(NamedTuple):
    info: WorkerInfo
    tokens: float


class _Choice(NamedTuple):
    total_s: float
    reader: int  # the row of who computes the prompt, in the table
    prompt: PromptCost  # there
    decode: int  # the row of who decodes, among the decode workers
    transfer_s: float


def cheapest_path(
    table: WorkerTable,
    need: Need,
    held: Floats,
    *,
    failed: Collection[Peer] = (),
    ejected: Collection[Peer] = (),
    decodes_alone: bool = True,
    turn: int = 0,
) -> Path:
    """The pair of workers, or the decode worker alone, that is through with the request first; with its estimate.

    `held` is how many tokens of the prompt's beginning each worker has. Prefill workers in `failed` or `ejected` are
    never taken, decode workers in them only for want of others, draining ones never. Where not `decodes_alone`, a
    decode worker computes a prompt only where there is no pair. Of equals, each `turn` takes another. Raises NoPath
    where no decode worker is left.
    """
    tiers = _tiers(table, failed, ejected)
    weighing = _Weighing(table, need, held, tiers, turn)
    best = weighing.pair()
    if best is None or decodes_alone:
        alone = weighing.alone()
        if best is None or alone.total_s < best.total_s:
            best = alone
    return weighing.path(best)


class _Weighing:
    """Of one request's paths. Raises NoPath where there is no decode worker for it."""

    def __init__(self, table: WorkerTable, need: Need, held: Floats, tiers: Ints, turn: int):
        self._table = table
        self._need = need
        self._turn = turn
        self._prefill, self._decode = slice(table.num_prefill), slice(table.num_prefill, None)
        self._held_at_decode = held[self._decode]
        self._able_to_prefill, self._able_to_decode = _able(table, tiers, need)
        self._source = _source(table, need, held, tiers)
        offered = None if self._source is None else self._source.tokens * table.takes(self._source.info.layout)
        self._reading = prompt_costs(table, need, held, offered)
        self._decoding = decode_costs(table.decode, need)

    def pair(self) -> _Choice | None:
        """A prefill and a decode worker."""
        best: _Choice | None = None
        table, decode = self._table, self._table.decode
        reading_s, new_tokens = self._reading.total_s[self._prefill], self._reading.own.new_tokens[self._prefill]
        for pairing in table.pairings:
            first = both(self._able_to_prefill, pairing.prefill)
            second = both(self._able_to_decode, pairing.decode)
            if not anybody(first) or not anybody(second):
                continue
            p = _pick(reading_s, first, self._turn, new_tokens)
            prompt = prompt_cost(self._reading, p)
            sending_s = transfer_s(
                decode,
                self._need,
                self._held_at_decode,
                hidden_s=prompt.prefill_s,
                last_tokens=min(prompt.new_tokens, table.columns.chunk_tokens.item(p)),
            )
            after_s = sending_s + self._decoding.total_s
            d = _pick(after_s, second, self._turn, decode.requests, sending_s)
            total_s = reading_s.item(p) + after_s.item(d)
            if best is None or total_s < best.total_s:
                best = _Choice(total_s, p, prompt, d, sending_s.item(d))
        return best

    def alone(self) -> _Choice:
        """A decode worker that computes the prompt itself."""
        total_s = self._reading.total_s[self._decode] + self._decoding.total_s
        # A pull may make others nearly as good as those that hold the prompt's beginning.
        new_tokens = self._reading.own.new_tokens[self._decode]
        d = _pick(total_s, self._able_to_decode, self._turn, self._table.decode.requests, new_tokens)
        reader = self._table.num_prefill + d
        return _Choice(total_s.item(d), reader, prompt_cost(self._reading, reader), d, 0.0)

    def path(self, choice: _Choice) -> Path:
        """With what is expected of it."""
        num_prefill, infos = self._table.num_prefill, self._table.infos
        prompt = choice.prompt
        estimate = Estimate(
            queue_s=prompt.queue_s,
            pull_s=prompt.pull_s,
            prefill_s=prompt.prefill_s,
            transfer_s=choice.transfer_s,
            decode_slot_s=self._decoding.slot_s.item(choice.decode),
            step_s=self._decoding.step_s.item(choice.decode),
        )
        prefill = infos[choice.reader] if choice.reader < num_prefill else None
        source = self._source.info if self._source is not None and prompt.pull_s > 0 else None
        cached_tokens = self._need.num_tokens - int(self._reading.own.new_tokens.item(choice.reader))
        return Path(prefill, infos[num_prefill + choice.decode], source, estimate, prompt.new_tokens, cached_tokens)


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


def _able(table: WorkerTable, tiers: Ints, need: Need) -> tuple[Mask | None, Mask | None]:
    """Prefill workers that are well, and the least objectionable decode workers. Raises NoPath."""
    num_prefill = table.num_prefill
    are_all = tiers is table.tier and table.all_available and need.num_tokens <= table.least_context
    if are_all and table.of_role["decode"]:
        return None, None
    has_room = table.max_context >= need.num_tokens
    able = (has_room & (tiers < DRAINING))[num_prefill:]
    if not able.any():
        raise NoPath("no decode worker is available; try again shortly")
    decode_tiers = tiers[num_prefill:]
    return (has_room & (tiers == AVAILABLE))[:num_prefill], able & (decode_tiers == decode_tiers[able].min())


def _source(table: WorkerTable, need: Need, held: Floats, tiers: Ints) -> _Source | None:
    """Whoever has most of the prompt, of either role, and of those the one with the fewest requests."""
    if need.min_pull_tokens is None:
        return None
    if not (tiers is table.tier and table.all_available):
        held = np.where(tiers == AVAILABLE, held, 0.0)
    most = held.item(held.argmax())
    if most < need.min_pull_tokens:
        return None
    (rows,) = (held == most).nonzero()
    return _Source(table.infos[rows[table.columns.requests[rows].argmin()]], most)


def _pick(cost_s: Floats, able: Mask | None, turn: int, *works: Floats) -> int:
    """The row of the least cost; of those about as good the one with the least work of the first kind, of those the one
    with the least of the next, and so on; then each in turn.
    """
    if able is not None:
        cost_s = np.where(able, cost_s, np.inf)
    (rows,) = (cost_s <= cost_s.item(cost_s.argmin()) * (1 + _EQUAL)).nonzero()
    for work in works:
        if len(rows) == 1:
            break
        least = work[rows]
        rows = rows[least == least.item(least.argmin())]
    return int(rows[turn % len(rows)])
