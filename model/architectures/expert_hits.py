"""Counters of how often each expert of a model was chosen. Kernels count where they sort tokens by expert; readers wait
for no step.

On a CPU the counts are the kernels' own. On a GPU they stay there: now and then a copy to the host is queued behind a
step, and readers see the last that has come.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.protocol.clock import Clock
from twostroke.protocol.kv_layout import KVLayout

COPY_S = 0.5
"""Counts on the host are as old as this, or as the step before the last."""


class ExpertHits:
    """The counts of all layers' experts, of one rank: each rank has the same, since each routes all tokens."""

    def __init__(self, layers: Sequence[Tensor | None], clock: Clock = time.monotonic):
        """layers: each one's `Experts.hits`, int64 [experts], as many in each; None where there are none, not in
        all."""
        self._layers = layers
        self._clock = clock
        self._counts = counts = [hits for hits in layers if hits is not None]
        self._copied_at = clock()
        self._host: Tensor | None = None
        if counts[0].device.type == "cuda":
            self._host = torch.zeros((len(counts), len(counts[0])), dtype=torch.int64, pin_memory=True)

    def clear(self) -> None:
        """Reset the counters, on the thread of `copy`: steps before this belong to no request."""
        for hits in self._counts:
            hits.zero_()
        if self._host is not None:
            torch.cuda.synchronize(self._counts[0].device)
            self._host.zero_()

    def copy(self) -> None:
        """Queue a copy of the counters, between steps, on the thread that launches them. Waits for nothing."""
        if self._host is not None and (now := self._clock()) >= self._copied_at + COPY_S:
            self._copied_at = now
            self._host.copy_(torch.stack(self._counts), non_blocking=True)

    def read(self) -> NDArray[np.int64]:
        """[layers, experts], counters; zeros for layers without experts. On any thread, steps may be under way."""
        found = self._counts if self._host is None else self._host.unbind()
        counts = iter(found)
        return np.stack(
            [np.zeros(len(found[0]), np.int64) if hits is None else next(counts).numpy() for hits in self._layers]
        )


class StagesHits:
    """Counters of all layers' experts where stages share the model: rank 0's own, and the last reports of other
    stages."""

    def __init__(
        self, own: ExpertHits | None, reports: Mapping[int, Sequence[Sequence[int]]], layout: KVLayout, experts: int
    ):
        """`reports` is filled from outside: the hits of its layers by each stage's first rank. `own` is None where
        stage 0 has no experts."""
        self._own = own
        self._reports = reports
        self._layout = layout
        self._experts = experts

    def read(self) -> NDArray[np.int64]:
        """Return counters as ExpertHits.read, of all layers: zeros for a stage that has not reported yet."""
        found = np.zeros((self._layout.num_layers, self._experts), np.int64)
        if self._own is not None:
            found[: len(self._layout.layers_of(0))] = self._own.read()
        for rank, hits in self._reports.items():
            layers = self._layout.layers_of(rank)
            found[layers.start : layers.stop] = hits
        return found
