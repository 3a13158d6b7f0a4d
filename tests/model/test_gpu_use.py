"""NVML's figures of a worker's GPU: how often they are sampled, and the answer where it does not respond."""

from types import SimpleNamespace

import torch

from twostroke.model.cuda.gpu_use import INTERVAL_S, GpuWatch, watch_gpu
from twostroke.protocol.stats import GpuUse


class FakeNvml:
    """Answers as NVML does, and counts the questions."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.asked = 0
        self.is_lost = False

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self.asked += 1
        if self.is_lost:
            raise self.NVMLError
        return SimpleNamespace(used=30, total=80)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=75)


def test_an_answer_counts_for_some_seconds_and_none_where_nvml_fails() -> None:
    now, nvml = 100.0, FakeNvml()
    watch = GpuWatch(nvml, "handle", lambda: now)
    assert watch.use() == watch.use() == GpuUse(30, 80, 0.75)
    assert nvml.asked == 1
    now += INTERVAL_S
    nvml.is_lost = True
    assert watch.use() is None
    assert nvml.asked == 2


def test_a_worker_without_a_gpu_tells_nothing() -> None:
    assert watch_gpu(torch.device("cpu"))() is None
