"""What a request would cost on each worker, in seconds, over arrays of workers. Pure; docs/routing.md has the formulas.

The costs of a prefill and of a decode worker add up, so that the best pair is found from two vectors, never by trying
all pairs. What couples the two, that prefill hides the transfer, is settled with the chosen prefill worker's time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.requests import Promise
from router.worker_table import Floats, WorkerTable

HOP_S = 0.002
"""Of any transfer, however short: offer, grant, commit and its answer."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of its workers."""

    num_tokens: int  # of the prompt, and of what was sent of the answer
    answer_tokens: float  # that are still to come, about
    promise: Promise
    min_pull_tokens: int | None  # what a pull must spare; None: nothing is pulled


@dataclass(frozen=True, slots=True)
class Pull:
    """Of the prompt where its beginning is pulled."""

    pull_s: Floats
    prefill_s: Floats
    new_tokens: Floats
    is_cheaper: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """Of the prompt on each prefill worker; it is pulled where that is cheaper."""

    queue_s: Floats
    prefill_s: Floats  # where nothing is pulled
    new_tokens: Floats  # to be computed then
    pull: Pull | None  # None: nobody has anything to pull

    @property
    def total_s(self) -> Floats:
        """Until the first token."""
        if self.pull is None:
            return self.queue_s + self.prefill_s
        pulling_s = self.pull.pull_s + self.pull.prefill_s
        return self.queue_s + np.where(self.pull.is_cheaper, pulling_s, self.prefill_s)


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Of the answer on each decode worker."""

    slot_s: Floats  # until a step has room for it
    step_s: Floats  # of each step with it
    total_s: Floats  # until the answer's end


@dataclass(frozen=True, slots=True)
class AloneCosts:
    """Of the prompt on each decode worker that computes it itself, beside the requests that run there."""

    queue_s: Floats
    prefill_s: Floats
    stall_s: Floats  # what others wait for it, added up: a second of theirs counts as much as one of its own

    @property
    def total_s(self) -> Floats:
        """Until the first token, with what it costs others."""
        return self.queue_s + self.prefill_s + self.stall_s


def queue_s(table: WorkerTable, promise: Promise) -> Floats:
    """How long a new prompt of this class waits for those that go first.

    Those are all of equal or higher priority; lower classes that wait keep their share of the worker meanwhile. A class
    with a share of its own waits no longer than that takes for the class's own prompts.
    """
    own = table.classes.number_of(promise)
    table.add_classes()
    queued = table.queued
    if len(queued) == 1:
        waiting_s: Floats = queued[0] * table.queue_token_s
        return waiting_s
    first, floors = table.classes.ahead_of(promise.priority)
    tokens: Floats = first @ queued
    if floors is not None:
        tokens = tokens / np.maximum(1.0 - floors @ (queued > 0), 0.01)
    if promise.share > 0:
        tokens = np.minimum(tokens, queued[own] / promise.share)
    return tokens * table.queue_token_s


def prefill_costs(table: WorkerTable, need: Need, held: Floats, source_tokens: Floats | float | None) -> PrefillCosts:
    """`held` is what each worker has of the prompt, in tokens, and `source_tokens` what it could pull.

    None: nothing.
    """
    held = np.minimum(held, need.num_tokens - 1)  # the last token is always computed: the next is drawn from it
    new_tokens = need.num_tokens - held
    prefill_s = _prefill_s(table, new_tokens, held)
    pull: Pull | None = None
    if need.min_pull_tokens is not None and source_tokens is not None:
        pulled = np.minimum(source_tokens, need.num_tokens - 1)
        spared = pulled - held
        pull_s = HOP_S + spared * table.token_transfer_s
        rest_s = _prefill_s(table, need.num_tokens - pulled, pulled)
        is_cheaper = (spared >= need.min_pull_tokens) & (pull_s + rest_s < prefill_s)
        pull = Pull(pull_s, rest_s, new_tokens - spared, is_cheaper)
    return PrefillCosts(queue_s(table, need.promise), prefill_s, new_tokens, pull)


def transfer_s(table: WorkerTable, need: Need, held: Floats, *, hidden_s: float, last_tokens: float) -> Floats:
    """What is left of the KV's transfer to each decode worker when a prefill of `hidden_s` ends.

    `held` is what each has already. The last layer of the last `last_tokens` can't be hidden at all.
    """
    missing = need.num_tokens - held
    last_s = np.minimum(missing, last_tokens) * table.layer_transfer_s
    left_s: Floats = np.maximum(missing * table.token_transfer_s - hidden_s, last_s)
    return HOP_S + left_s


def decode_costs(table: WorkerTable, need: Need) -> DecodeCosts:
    """A slot is there where batch, blocks and everybody's time between tokens allow; else some request must end first.

    Of R requests one ends every (step x answer / R) seconds.
    """
    step_s = table.step_s + table.row_s + need.num_tokens * table.context_s
    limit_s = table.tightest_tpot_s
    if need.promise.tpot_s is not None:
        limit_s = np.minimum(limit_s, need.promise.tpot_s)
    too_many = np.maximum(table.requests_over, (need.num_tokens - table.free_tokens) * table.requests_per_token)
    too_many = np.maximum(too_many, (step_s - limit_s) * table.requests_per_s)
    too_many = np.maximum(np.minimum(too_many, table.requests), 0.0)
    slot_s = too_many * table.end_s * need.answer_tokens
    return DecodeCosts(slot_s, step_s, slot_s + need.answer_tokens * step_s)


def alone_costs(table: WorkerTable, need: Need, held: Floats) -> AloneCosts:
    """`held` is what each decode worker has of the prompt, in tokens.

    The requests that run there, and the one that is to come next, wait for the prompt's chunks.
    """
    held = np.minimum(held, need.num_tokens - 1)
    new_tokens = need.num_tokens - held
    prompt_s = _prompt_s(table, new_tokens, held)
    prefill_s = np.ceil(new_tokens / table.chunk_tokens) * table.step_s + prompt_s
    return AloneCosts(queue_s(table, need.promise), prefill_s, (table.requests + 1) * prompt_s)


def _prompt_s(table: WorkerTable, new: Floats | float, before: Floats | float) -> Floats:
    """As StepCosts.prompt_s."""
    return new * (table.token_s + table.pair_s * (before + new / 2))


def _prefill_s(table: WorkerTable, new: Floats | float, before: Floats | float) -> Floats:
    """As StepCosts.prefill_s."""
    return np.ceil(new / table.step_tokens) * table.base_s + _prompt_s(table, new, before)
