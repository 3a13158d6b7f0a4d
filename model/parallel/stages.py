"""Pipeline stages: which of a worker's ranks hold which layers, and how rows of hidden states go from one to the next.

A worker has stages x tensor-parallel ranks; rank r belongs to stage r // tp_size. Stage 0 has the embedding, the first
layers, and what stands behind the last one: final norm, LM head, draws. So the stages are a ring. Each rank sends rows
to that of its number in the next stage, since all ranks of a stage have the same rows; those of the last stage send
back to stage 0 what somebody reads. Nothing as wide as a vocabulary travels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twostroke.protocol.kv_layout import stage_layers


@dataclass(frozen=True, slots=True)
class Stage:
    """Which part of the layers a rank holds."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Of the model's, those of this stage."""
        return stage_layers(num_layers, self.count, self.index)


ONLY_STAGE = Stage()


class StageLink:
    """A rank's connections with the ranks of its number in the stage before and in the next one.

    Sends don't wait for the receiver, nor do receives begin only when they are waited for. Each pair's come in order.
    """

    def __init__(self, group: Any, stage: Stage):
        """`group` is a process group of torch of one rank a stage, in their order."""
        self.stage = stage
        self._group = group
        self._next = (stage.index + 1) % stage.count
        self._before = (stage.index - 1) % stage.count
        self._sent: list[tuple[Any, Tensor]] = []  # with what has to stay as it is

    def send(self, rows: Tensor) -> None:
        """[N, hidden], contiguous, to the next stage, or from the last one to the first. Must not be written into."""
        self._sent.append((self._group.send([rows], self._next, 0), rows))

    def receive(self, count: int, width: int, dtype: torch.dtype, device: torch.device) -> "ComingRows":
        """[count, width] that the stage before sends."""
        rows = torch.empty((count, width), dtype=dtype, device=device)
        return ComingRows(self._group.recv([rows], self._before, 0), rows)

    def settle(self) -> None:
        """Wait until all that was sent is received; on GPUs the stream does, and not the host."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def abort(self) -> None:
        """End the group of GPUs, though others may wait in it."""
        self._group.abort()


@dataclass(frozen=True)
class ComingRows:
    """Rows that are under way."""

    work: Any
    rows: Tensor

    def wait(self) -> Tensor:
        """Them, once they are here. Raises RuntimeError, as torch does, where the other rank is gone."""
        self.work.wait()
        return self.rows
