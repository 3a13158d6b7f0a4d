"""The workers of one role as columns of numbers, one row a worker: what paths' costs are computed from.

A row is computed anew when its worker's numbers or this router's own work there have changed, not for each request.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.requests import Promise
from protocol.stats import WorkerInfo, WorkerStats
from protocol.step_costs import StepCosts
from protocol.tickets import Peer
from router.in_flight import Load

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AVAILABLE, EJECTED, UNWELCOME, DRAINING = range(4)
"""Tiers of workers. Those between the first and the last are taken for want of a better one: first those that fail many
requests, then those that have failed this one or can't be reached."""

_NO_LIMIT_S = 1e9
_LEAST_CHUNK = 16  # tokens of a prompt that decode workers compute in a step, however tight its streams' promises


class ServiceClasses:
    """The SLO classes that were heard of, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._priority: list[int] = []
        self._share: list[float] = []
        self._ahead: dict[int, tuple[Floats, Floats | None]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, name: str, priority: int, share: float) -> int:
        """The class's number; what it says of itself last counts."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            self._priority.append(priority)
            self._share.append(share)
        elif self._priority[number] == priority and self._share[number] == share:
            return number
        self._priority[number], self._share[number] = priority, share
        self._ahead.clear()
        return number

    def ahead_of(self, priority: int) -> tuple[Floats, Floats | None]:
        """For each class 1 where it goes before one of `priority`, else 0; and the shares of those that don't.

        None: none of them has a share.
        """
        known = self._ahead.get(priority)
        if known is None:
            first = np.array([1.0 if one >= priority else 0.0 for one in self._priority])
            floors = np.where(first > 0, 0.0, self._share)
            known = self._ahead[priority] = first, floors if floors.any() else None
        return known

    def number_of(self, promise: Promise) -> int:
        """The number of a request's class."""
        return self.number(promise.class_name, promise.priority, promise.share)

    def find(self, name: str) -> int | None:
        """The class's number, where it is known."""
        return self._numbers.get(name)


class WorkerTable:
    """All workers of one role, in the order of `infos`. Arrays have one element a worker unless said otherwise."""

    def __init__(self, infos: Sequence[WorkerInfo], classes: ServiceClasses):
        self.infos = tuple(infos)
        self.block_sizes = {info.layout.block_size for info in self.infos}
        self.receives = {info.layout if info.transfer_addresses else None for info in self.infos}  # None: no KV at all
        self.rows: Mapping[Peer, int] = {info.peer: row for row, info in enumerate(self.infos)}
        self.classes = classes
        count = len(self.infos)
        # What does not change.
        self.max_context: Ints = np.array([info.max_context for info in self.infos], np.int64)
        self.least_context = min((info.max_context for info in self.infos), default=0)
        self.step_tokens: Floats = np.array([info.max_step_tokens for info in self.infos], float)
        self.block_size: Ints = np.array([info.layout.block_size for info in self.infos], np.int64)
        # What workers' steps cost here, as in StepCosts.
        self.base_s: Floats = np.zeros(count)
        self.token_s: Floats = np.zeros(count)
        self.pair_s: Floats = np.zeros(count)
        self.row_s: Floats = np.zeros(count)
        self.context_s: Floats = np.zeros(count)
        # What there is to do.
        self.tier: Ints = np.zeros(count, np.int64)
        self.all_available = True
        self.requests: Floats = np.zeros(count)
        self.free_tokens: Floats = np.zeros(count)  # of KV that find room now
        self.tightest_tpot_s: Floats = np.full(count, _NO_LIMIT_S)
        self.queued: Floats = np.zeros((len(classes), count))  # prompt tokens, by class and worker
        # What follows from both.
        self.queue_token_s: Floats = np.zeros(count)  # a queued prompt token's time
        self.step_s: Floats = np.zeros(count)  # of a step with the requests that decode there
        self.requests_over: Floats = np.zeros(count)  # that must end before the batch has room for one more
        self.requests_per_token: Floats = np.ones(count)  # of KV: one over what each of them holds
        self.requests_per_s: Floats = np.ones(count)  # of a step: one over what each of them adds to it
        self.end_s: Floats = np.zeros(count)  # until one of them ends, for each token of their answers
        self.chunk_tokens: Floats = np.ones(count)  # of a prompt, in one step beside them
        self.token_transfer_s: Floats = np.zeros(count)  # of a token's KV, all layers
        self.layer_transfer_s: Floats = np.zeros(count)  # of a token's KV in one layer

    def __len__(self) -> int:
        return len(self.infos)

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
        self.token_transfer_s[row] = transfer_s = _token_bytes(info) / bytes_per_s
        self.layer_transfer_s[row] = transfer_s / info.layout.num_layers
        self.base_s[row], self.token_s[row], self.pair_s[row] = costs.base_s, costs.token_s, costs.pair_s
        self.row_s[row], self.context_s[row] = costs.row_s, costs.context_s

        requests = load.requests(stats.num_running + stats.num_waiting)
        context_tokens = load.context_tokens(stats.context_tokens) if info.role == "decode" else 0.0
        limit_s = _NO_LIMIT_S if stats.tightest_tpot_s is None else stats.tightest_tpot_s
        decoding = requests if info.role == "decode" else 0.0
        step_s = costs.base_s + decoding * costs.row_s + context_tokens * costs.context_s
        request_tokens = max(context_tokens, 1.0) / max(requests, 1.0)
        room = (limit_s - step_s) / costs.token_s if costs.token_s > 0 else info.max_step_tokens
        chunk_tokens = max(_LEAST_CHUNK, min(info.max_step_tokens - decoding, room))
        self.requests[row] = requests
        self.free_tokens[row] = stats.free_blocks * info.layout.block_size - load.since.context_tokens
        self.tightest_tpot_s[row] = limit_s
        self.step_s[row] = step_s
        self.requests_over[row] = requests + 1 - info.max_batch
        self.requests_per_token[row] = 1 / request_tokens
        self.requests_per_s[row] = 1 / max(costs.row_s + costs.context_s * request_tokens, 1e-9)
        self.end_s[row] = step_s / max(requests, 1.0)
        self.chunk_tokens[row] = chunk_tokens
        num_queued, num_tokens = self._update_queue(row, stats, load)
        half_prompt = num_tokens / num_queued / 2 if num_queued else 0.0
        self.queue_token_s[row] = costs.token_s + step_s / chunk_tokens + costs.pair_s * half_prompt

    def add_classes(self) -> None:
        """Make room for all classes that were heard of."""
        missing = len(self.classes) - len(self.queued)
        if missing:
            self.queued = np.vstack([self.queued, np.zeros((missing, len(self)))])

    def _update_queue(self, row: int, stats: WorkerStats, load: Load) -> tuple[int, int]:
        """Returns what the worker told of: prompts, and their tokens."""
        told: dict[str, int] = {}
        num_queued = num_tokens = 0
        for work in stats.queued:
            self.classes.number(work.class_name, work.priority, work.share)
            # A class is there once for each priority that its requests have.
            told[work.class_name] = told.get(work.class_name, 0) + work.tokens
            num_queued += work.requests
            num_tokens += work.tokens
        self.add_classes()
        self.queued[:, row] = 0
        for name in told.keys() | load.now.prompt_tokens.keys():
            number = self.classes.find(name)
            if number is not None:  # of a request that is held now, it is
                self.queued[number, row] = load.prompt_tokens(name, told.get(name, 0))
        return num_queued, num_tokens


def _token_bytes(info: WorkerInfo) -> float:
    layout = info.layout
    return layout.block_bytes * layout.tp_size * layout.num_layers / layout.block_size
