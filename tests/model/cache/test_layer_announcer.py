"""Layers are announced in order, once their events have come, and a step has not ended before all of its are."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from twostroke.model.cache import layer_announcer as announcing
from twostroke.model.cache.layer_announcer import LayerAnnouncer, layer_announcer


class Gate:
    """An event that comes when the test says so."""

    def __init__(self, is_open: bool = False) -> None:
        self._opened = threading.Event()
        if is_open:
            self.open()

    def open(self) -> None:
        self._opened.set()

    def synchronize(self) -> None:
        assert self._opened.wait(20)


@pytest.fixture
def announcer_of() -> Iterator[Callable[..., LayerAnnouncer]]:
    """Makes an announcer whose events are these gates, one after the other; closes it."""
    made: list[LayerAnnouncer] = []

    def make(gates: list[Gate], begin: Callable[[], None] = lambda: None) -> LayerAnnouncer:
        events = iter(gates)
        made.append(LayerAnnouncer(begin, lambda: next(events)))
        return made[-1]

    yield make
    for announcer in made:
        announcer.close()
    assert not any(thread.name.startswith("layer-announcer") for thread in threading.enumerate())


def test_layers_are_announced_in_order_however_their_events_come(announcer_of: Callable[..., LayerAnnouncer]) -> None:
    called: list[int] = []
    reached = threading.Event()

    def on_layer(layer: int) -> None:
        called.append(layer)
        reached.set()

    gates = [Gate() for _ in range(4)]
    step = announcer_of(gates).step(on_layer)
    for layer in range(4):
        step.announce(layer)
    gates[2].open()
    gates[1].open()
    assert called == []
    gates[0].open()
    assert reached.wait(20), "while the step goes on"
    gates[3].open()
    step.result()
    assert called == [0, 1, 2, 3]


def test_an_error_ends_a_steps_announcements_and_is_that_of_the_step(
    announcer_of: Callable[..., LayerAnnouncer],
) -> None:
    called: list[int] = []

    def fail(layer: int) -> None:
        called.append(layer)
        raise KeyError(layer)

    announcer = announcer_of([Gate(is_open=True) for _ in range(3)])
    broken, sound = announcer.step(fail), announcer.step(called.append)
    broken.announce(0)
    broken.announce(1)
    sound.announce(2)
    with pytest.raises(KeyError, match="0"):
        broken.result()
    sound.result()
    assert called == [0, 2]


def test_a_thread_that_cannot_use_its_gpu_fails_each_step(announcer_of: Callable[..., LayerAnnouncer]) -> None:
    def begin() -> None:
        raise RuntimeError("no such GPU")

    announcer = announcer_of([Gate(is_open=True)], begin)
    step = announcer.step(lambda layer: None)
    step.announce(0)
    for one in (step, announcer.step(lambda layer: None)):
        with pytest.raises(RuntimeError, match="no such GPU"):
            one.result()


def test_on_a_gpu_the_announcer_takes_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device, taken = torch.device("cuda", 3), []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(announcing, "LaunchedWork", lambda device: Gate(is_open=True))
    announcer = layer_announcer(device)
    assert announcer is not None
    told: list[int] = []
    step = announcer.step(told.append)
    step.announce(0)
    step.result()
    announcer.close()
    assert (told, taken) == ([0], [device])
    assert layer_announcer(torch.device("cpu")) is None
