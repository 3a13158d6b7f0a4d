"""What a request would cost on each worker, in seconds, over arrays of workers. Pure; docs/routing.md has the formulas.

The costs of whoever reads the prompt and of the decode worker add up, so that the best path is found from two vectors,
never by trying all pairs. What couples the two, that prefill hides the transfer, is settled with the chosen prefill
worker's time.
"""

from typing import NamedTuple

import numpy as np

from twostroke.protocol.requests import Promise
from twostroke.router.routing.fleet_view import Columns, WorkerTable
from twostroke.router.slo.classes import Floats

HOP_S = 0.002
"""Of any transfer, however short: offer, grant, commit and its answer."""

# Beside an array numpy takes an array of one number in half the time that it needs for a Python number.
_HOP_S, _ZERO, _HALF = np.array(HOP_S), np.array(0.0), np.array(0.5)


class Need(NamedTuple):
    """What a request asks of its workers."""

    num_tokens: int  # of the prompt, and of what was sent of the answer
    answer_tokens: float  # that are still to come, about
    promise: Promise
    min_pull_tokens: int | None  # what a pull must spare; None: nothing is pulled


class Computing(NamedTuple):
    """Of a prompt on each worker, its beginning being there."""

    new_tokens: Floats  # the rest
    prefill_s: Floats
    total_s: Floats  # and what others wait for it, added up: a second of theirs counts as much as one of its own


class Pulling(NamedTuple):
    """Of a prompt's beginning to each worker from the one that has most of it."""

    pull_s: Floats  # infinite where it is not worth it
    rest: Computing  # then


class PromptCosts(NamedTuple):
    """Of the prompt on each worker, of either role."""

    queue_s: Floats
    own: Computing  # after what is cached there
    pulling: Pulling | None  # None: nobody has anything to pull
    total_s: Floats  # until the first token, in the cheaper way, with what it costs others


class PromptCost(NamedTuple):
    """On one worker, in the cheaper way."""

    queue_s: float
    pull_s: float  # 0: nothing is pulled
    prefill_s: float
    new_tokens: int  # to be computed


class DecodeCosts(NamedTuple):
    """Of the answer on each decode worker."""

    slot_s: Floats  # until a step has room for it
    step_s: Floats  # of each step with it
    total_s: Floats  # until the answer's end


def queue_s(table: WorkerTable, promise: Promise) -> Floats:
    """How long a new prompt of this class waits for those that go first.

    Those are all of equal or higher priority; lower classes that wait keep their share of the worker meanwhile. A class
    with a share of its own waits no longer than that takes for the class's own prompts.
    """
    own = table.classes.number_of(promise)
    table.add_classes()
    queued = table.queued
    if len(queued) == 1:
        waiting_s: Floats = queued[0] * table.columns.queue_token_s
        return waiting_s
    first, floors = table.classes.ahead_of(promise.priority)
    tokens: Floats = first @ queued
    if floors is not None:
        tokens = tokens / np.maximum(1.0 - floors @ (queued > 0), 0.01)
    if promise.share > 0:
        tokens = np.minimum(tokens, queued[own] / promise.share)
    return tokens * table.columns.queue_token_s


def prompt_costs(table: WorkerTable, need: Need, held: Floats, offered: Floats | None) -> PromptCosts:
    """`held` is what each worker has of the prompt, in tokens, and `offered` what it could pull. None: nothing."""
    columns = table.columns
    num_tokens = np.array(float(need.num_tokens))
    most = np.array(need.num_tokens - 1.0)  # the last token is always computed: the next is drawn from it
    held = np.minimum(held, most)
    waiting_s = queue_s(table, need.promise)
    own = _computing(columns, num_tokens, held)
    if need.min_pull_tokens is None or offered is None:
        return PromptCosts(waiting_s, own, None, waiting_s + own.total_s)
    offered = np.minimum(offered, most)
    spared = offered - held
    pull_s = _HOP_S + spared * columns.token_transfer_s
    pull_s[spared < need.min_pull_tokens] = np.inf
    rest = _computing(columns, num_tokens, offered)
    total_s = waiting_s + np.minimum(own.total_s, pull_s + rest.total_s)
    return PromptCosts(waiting_s, own, Pulling(pull_s, rest), total_s)


def prompt_cost(costs: PromptCosts, row: int) -> PromptCost:
    """Those of the worker in this row of the table."""
    pull_s, computing, pulling = 0.0, costs.own, costs.pulling
    if pulling is not None and pulling.pull_s[row] + pulling.rest.total_s[row] < computing.total_s[row]:
        pull_s, computing = pulling.pull_s.item(row), pulling.rest
    return PromptCost(
        costs.queue_s.item(row), pull_s, computing.prefill_s.item(row), int(computing.new_tokens.item(row))
    )


def transfer_s(decode: Columns[Floats], need: Need, held: Floats, *, hidden_s: float, last_tokens: float) -> Floats:
    """What is left of the KV's transfer to each decode worker when a prefill of `hidden_s` ends.

    `held` is what each has already. The last layer of the last `last_tokens` can't be hidden at all.
    """
    missing = need.num_tokens - held
    last_s = np.minimum(missing, last_tokens) * decode.layer_transfer_s
    left_s: Floats = np.maximum(missing * decode.token_transfer_s - hidden_s, last_s)
    return _HOP_S + left_s


def decode_costs(decode: Columns[Floats], need: Need) -> DecodeCosts:
    """A slot is there where batch, blocks and everybody's time between tokens allow; else some request must end first.

    Of R requests one ends every (step x answer / R) seconds.
    """
    num_tokens, answer_tokens = np.array(float(need.num_tokens)), np.array(need.answer_tokens)
    step_s = decode.next_step_s + num_tokens * decode.context_s
    limit_s = decode.tightest_tpot_s
    if need.promise.tpot_s is not None:
        limit_s = np.minimum(limit_s, need.promise.tpot_s)
    too_many = np.maximum(decode.requests_over, (num_tokens - decode.free_tokens) * decode.requests_per_token)
    too_many = np.maximum(too_many, (step_s - limit_s) * decode.requests_per_s)
    too_many = np.maximum(np.minimum(too_many, decode.requests), _ZERO)
    slot_s = too_many * decode.end_s * answer_tokens
    return DecodeCosts(slot_s, step_s, slot_s + answer_tokens * step_s)


def _computing(columns: Columns[Floats], num_tokens: Floats, before: Floats) -> Computing:
    """As StepCosts.prefill_s, but for what steps read before their chunks; decode workers' streams share the steps.

    The requests that run there, and the one that is to come next, wait for the prompt's chunks.
    """
    new = num_tokens - before
    prompt_s = new * (columns.token_s + columns.pair_s * (before + new * _HALF))
    prefill_s = np.ceil(new / columns.chunk_tokens) * columns.step_s + prompt_s
    return Computing(new, prefill_s, prefill_s + columns.stalled * prompt_s)
