"""Memory and utilisation of a worker's GPU as NVML tells them, where `nvidia-ml-py` is installed."""

import time
from collections.abc import Callable
from typing import Any

import torch

from twostroke.protocol.clock import Clock
from twostroke.protocol.stats import GpuUse

INTERVAL_S = 2.0
"""NVML is asked this often at most: an answer takes up to milliseconds of the event loop."""


class GpuWatch:
    """Asks NVML of one GPU. The newest answer counts until it is INTERVAL_S old."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock = time.monotonic):
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._asked_at = -INTERVAL_S
        self._use: GpuUse | None = None

    def use(self) -> GpuUse | None:
        """None: NVML does not answer."""
        if (now := self._clock()) - self._asked_at >= INTERVAL_S:
            self._asked_at = now
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
                rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
                self._use = GpuUse(memory.used, memory.total, rates.gpu / 100)
            except self._nvml.NVMLError:
                self._use = None
        return self._use


def watch_gpu(device: torch.device) -> Callable[[], GpuUse | None]:
    """Return what tells the GPU's use: always None where the device is no GPU, or there is no NVML."""
    if device.type != "cuda":
        return lambda: None
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return GpuWatch(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")).use
    except Exception:  # without the package, its library or the right to ask: the numbers are left out
        return lambda: None
