"""The recent load of a model's experts: how unevenly tokens choose among them. No torch."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from twostroke.protocol.clock import Clock
from twostroke.worker.constants import EXPERT_MEMORY_S

ReadHits = Callable[[], np.ndarray[Any, np.dtype[np.int64]]]
"""[layers, experts]: how often each was chosen so far; zeros where a layer has none."""


class ExpertLoad:
    """The choices of one worker's tokens, the older the less."""

    def __init__(self, read: ReadHits, clock: Clock):
        self._read = read
        self._clock = clock
        self._told_at = clock()
        self._hits = read()
        self._recent = np.zeros(self._hits.shape)

    @property
    def num_layers(self) -> int:
        """Layers of the model, including those without experts."""
        return len(self._recent)

    def recent(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Recent choices of each expert: [layers, experts]."""
        now, hits = self._clock(), self._read()
        self._recent = self._recent * math.exp((self._told_at - now) / EXPERT_MEMORY_S) + (hits - self._hits)
        self._told_at, self._hits = now, hits
        return self._recent

    def skews(self) -> tuple[float, ...]:
        """Return for each layer how often its hottest expert was chosen, over the mean of its experts.

        1 where all were chosen alike, experts / top_k where all tokens chose the same; 0 without choices or experts.
        """
        recent = self.recent()
        means = recent.mean(axis=1)
        return tuple((recent.max(axis=1) / np.where(means > 0, means, 1.0)).tolist())
