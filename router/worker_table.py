"""All workers as columns of numbers, one row a worker: what paths' costs are computed from.

A row is computed anew when its worker's numbers or this router's own work there have changed, not for each request.
Prefill workers come first, so that whatever is asked of both roles is computed for all at once, and each role's part is
a slice.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.protocol.step_costs import StepCosts
from twostroke.protocol.tickets import Peer
from twostroke.router.in_flight import Load
from twostroke.router.kv_kinds import pair_up, takers
from twostroke.router.service_classes import Floats, ServiceClasses

Ints = NDArray[np.int64]
Number = TypeVar("Number", float, Floats)

AVAILABLE, EJECTED, UNWELCOME, DRAINING = range(4)
"""Tiers of workers. Those between the first and the last are taken for want of a better one: first those that fail many
requests, then those that have failed this one or can't be reached."""

_NO_LIMIT_S = 1e9
_LEAST_CHUNK = 16  # tokens of a prompt that decode workers compute in a step, however tight its streams' promises


class Columns(NamedTuple, Generic[Number]):
    """Numbers of one worker, or arrays of those of many."""

    # What its steps cost, as in StepCosts.
    token_s: Number
    pair_s: Number
    context_s: Number
    # What computing a prompt takes.
    step_s: Number  # of a step without one: with the requests that decode there
    chunk_tokens: Number  # of a prompt, in one step beside them
    stalled: Number  # requests that wait for each chunk: those that decode, and who comes next; at prefill workers none
    queue_token_s: Number  # a queued prompt token's time
    # What KV takes on its way there.
    token_transfer_s: Number  # of a token's, all layers
    layer_transfer_s: Number  # of a token's in one layer
    # What there is room for.
    requests: Number
    free_tokens: Number  # of KV that find room now
    tightest_tpot_s: Number
    next_step_s: Number  # of a step with one more request, its context aside
    requests_over: Number  # that must end before the batch has room for one more
    requests_per_token: Number  # of KV: one over what each of them holds
    requests_per_s: Number  # of a step: one over what each of them adds to it
    end_s: Number  # until one of them ends, for each token of their answers


class WorkerTable:
    """The workers in the order of `infos`, prefill workers first. Arrays have one element a worker."""

    def __init__(self, infos: Sequence[WorkerInfo], classes: ServiceClasses):
        prefill = tuple(info for info in infos if info.role == "prefill")
        decode = tuple(info for info in infos if info.role == "decode")
        self.infos = prefill + decode
        self.of_role: Mapping[Role, tuple[WorkerInfo, ...]] = {"prefill": prefill, "decode": decode}
        self.num_prefill = len(prefill)
        self.rows: Mapping[Peer, int] = {info.peer: row for row, info in enumerate(self.infos)}
        self.classes = classes
        # What does not change.
        self.pairings = pair_up(prefill, decode)
        self.block_sizes = {info.layout.block_size for info in self.infos}
        self.block_size: Floats = np.array([info.layout.block_size for info in self.infos], float)
        self.max_context: Ints = np.array([info.max_context for info in self.infos], np.int64)
        self.least_context = min((info.max_context for info in self.infos), default=0)
        self._token_bytes = [_token_bytes(info) for info in self.infos]
        self._takes: dict[KVLayout, Floats] = {}
        # What does.
        self.tier: Ints = np.zeros(len(self), np.int64)
        self.all_available = True
        self.queued: Floats = np.zeros((len(classes), len(self)))  # prompt tokens, by class and worker
        self._numbers: Floats = np.zeros((len(Columns._fields), len(self)))
        self.columns: Columns[Floats] = Columns(*self._numbers)
        self.decode: Columns[Floats] = Columns(*self._numbers[:, self.num_prefill :])
        """Those of the decode workers alone."""

    def __len__(self) -> int:
        return len(self.infos)

    def takes(self, layout: KVLayout) -> Floats:
        """1 for each worker that takes KV of this layout, else 0."""
        known = self._takes.get(layout)
        if known is None:
            known = self._takes[layout] = takers(self.infos, layout).astype(float)
        return known

    def update(
        self, row: int, stats: WorkerStats | None, load: Load, costs: StepCosts, tier: int, bytes_per_s: float
    ) -> None:
        """Take in what is known of a worker now."""
        info = self.infos[row]
        if stats is None:
            stats = WorkerStats(free_blocks=info.num_blocks, total_blocks=info.num_blocks)
        tier = DRAINING if stats.is_draining else tier
        if tier != self.tier[row]:
            self.tier[row] = tier
            self.all_available = not self.tier.any()
        num_queued, num_tokens = self._update_queue(row, stats, load)
        half_prompt = num_tokens / num_queued / 2 if num_queued else 0.0

        requests = load.requests(stats.num_running + stats.num_waiting)
        decoding = context_tokens = 0.0
        if info.role == "decode":
            decoding, context_tokens = requests, load.context_tokens(stats.context_tokens)
        limit_s = _NO_LIMIT_S if stats.tightest_tpot_s is None else stats.tightest_tpot_s
        step_s = costs.base_s + decoding * costs.row_s + context_tokens * costs.context_s
        request_tokens = max(context_tokens, 1.0) / max(requests, 1.0)
        room = (limit_s - step_s) / costs.token_s if costs.token_s > 0 else info.max_step_tokens
        chunk_tokens = max(_LEAST_CHUNK, min(info.max_step_tokens - decoding, room))
        transfer_s = self._token_bytes[row] / bytes_per_s
        numbers: Columns[float] = Columns(
            token_s=costs.token_s,
            pair_s=costs.pair_s,
            context_s=costs.context_s,
            step_s=step_s,
            chunk_tokens=chunk_tokens,
            stalled=decoding + 1 if info.role == "decode" else 0.0,
            queue_token_s=costs.token_s + step_s / chunk_tokens + costs.pair_s * half_prompt,
            token_transfer_s=transfer_s,
            layer_transfer_s=transfer_s / info.layout.num_layers,
            requests=requests,
            free_tokens=stats.free_blocks * info.layout.block_size - load.since.context_tokens,
            tightest_tpot_s=limit_s,
            next_step_s=step_s + costs.row_s,
            requests_over=requests + 1 - info.max_batch,
            requests_per_token=1 / request_tokens,
            requests_per_s=1 / max(costs.row_s + costs.context_s * request_tokens, 1e-9),
            end_s=step_s / max(requests, 1.0),
        )
        self._numbers[:, row] = numbers

    def add_classes(self) -> None:
        """Make room for all classes that were heard of."""
        missing = len(self.classes) - len(self.queued)
        if missing:
            self.queued = np.vstack([self.queued, np.zeros((missing, len(self)))])

    def _update_queue(self, row: int, stats: WorkerStats, load: Load) -> tuple[int, int]:
        """Returns what the worker told of: prompts, and their tokens."""
        tokens: dict[int, float] = {}
        num_queued = num_tokens = 0
        for work in stats.queued:
            number = self.classes.number(work.class_name, work.priority, work.share)
            # A class is there once for each priority that its requests have.
            tokens[number] = tokens.get(number, 0.0) + work.tokens
            num_queued += work.requests
            num_tokens += work.tokens
        for name in load.now.prompt_tokens:
            known = self.classes.find(name)
            if known is not None:  # of a request that is held now, it is
                tokens[known] = load.prompt_tokens(name, tokens.get(known, 0.0))
        self.add_classes()
        self.queued[:, row] = 0.0
        for number, waiting in tokens.items():
            self.queued[number, row] = waiting
        return num_queued, num_tokens


def _token_bytes(info: WorkerInfo) -> float:
    layout = info.layout
    return layout.block_bytes * layout.tp_size * layout.num_layers / layout.block_size
