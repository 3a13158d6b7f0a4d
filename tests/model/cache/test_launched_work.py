"""Threads that wait for a GPU: on its own context, and asleep. No GPU here: what is asked of CUDA is recorded."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twostroke.kvtransfer.transports.device_units import DeviceQueue
from twostroke.model.cache.layer_announcer import LaunchedWork, SilentStep
from twostroke.model.cuda.sampler import DeviceSampler

GPU = torch.device("cuda", 3)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device | None, bool]]:
    """Return, of each wait for an event, the stream waited for, the thread's current device, and if the thread
    sleeps."""
    current = threading.local()
    found: list[tuple[str, torch.device | None, bool]] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.device = chosen
        yield
        current.device = None

    class Event:
        def __init__(self, blocking: bool = False):
            self._blocking = blocking

        def record(self, stream: str) -> None:
            self._stream = stream

        def synchronize(self) -> None:
            found.append((self._stream, getattr(current, "device", None), self._blocking))

    on_host = torch.empty
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current one of {device}")
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: on_host(*shape, **options))
    return found


def on_a_new_thread(wait: Any) -> None:
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()


def chunk_digest() -> Any:
    queue = DeviceQueue(torch.device("cpu"))
    queue._stream = SimpleNamespace(device=GPU)  # type: ignore[assignment]
    return queue.later(torch.zeros(2, dtype=torch.int64))


def drawn_tokens() -> Any:
    sampler = DeviceSampler(8, torch.device("cpu"))
    sampler._device, sampler._is_cuda = GPU, True
    return sampler.take(torch.zeros(2, 1, dtype=torch.int64), []).wait


@pytest.mark.parametrize(
    "launch",
    [
        lambda: LaunchedWork(GPU).synchronize,
        lambda: SilentStep([None], LaunchedWork(GPU)).result,
        drawn_tokens,
        chunk_digest,
    ],
    ids=["launched work", "a step that draws nothing", "drawn tokens", "the digest of a chunk"],
)
def test_a_thread_that_waits_gets_no_context_on_the_first_gpu_and_takes_no_core(launch: Any, waited: Any) -> None:
    on_a_new_thread(launch())
    assert waited == [("the current one of cuda:3", GPU, True)]
