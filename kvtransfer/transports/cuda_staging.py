"""Staging buffers in a GPU's memory, for NCCL groups. Not confirmed on hardware."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.store import DeviceStore
from twostroke.kvtransfer.transports.device_units import DeviceQueue, DeviceUnits
from twostroke.kvtransfer.transports.staging import NUM_BUFFERS


class CudaStaging:
    """For stores in a GPU's memory; one stream for each of its two threads.

    A layer is announced to the transfer once its KV is in memory (model/cache/kv_cache.py), so what is packed needs no
    event to wait for, and the model's stream never waits for this one.
    """

    def __init__(self, store: DeviceStore, cut: Cut):
        self._units = DeviceUnits(store, cut)
        self._posting = DeviceQueue(self._units.device)
        self._waiting = DeviceQueue(self._units.device)
        self._memory = [torch.empty(0, dtype=torch.uint8, device=self._units.device) for _ in range(NUM_BUFFERS)]

    def buffer(self, index: int, num_units: int) -> Tensor:
        num_bytes = self._units.buffer_bytes(num_units)
        if self._memory[index].numel() < num_bytes:
            self._memory[index] = torch.empty(num_bytes, dtype=torch.uint8, device=self._units.device)
        return self._memory[index][:num_bytes]

    def landing(self, index: int, num_units: int) -> Tensor:
        return self.buffer(index, num_units)  # NCCL wants the same size on both sides

    def pack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> None:
        with self._posting():
            self._units.pack(segments, seal, packed)
        self._posting.wait()  # the store's blocks may be given away once the send returns

    def unpack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> bool:
        with self._waiting():
            intact = self._units.unpack(segments, seal, packed)
        self._waiting.wait()
        return intact

    def post(self, move: Callable[[], dist.Work]) -> dist.Work:
        with self._posting():  # NCCL's own stream waits for this one
            return move()

    def wait(self, work: dist.Work) -> None:
        with self._waiting():
            work.wait()
        self._waiting.wait()
