"""Layers are announced in order, once their events have come, and all of them before the step goes on."""

import threading
from collections.abc import Callable

import pytest

from twostroke.model.cache.kv_cache import LayerAnnouncer


class Gate:
    """An event that comes when the test says so."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def synchronize(self) -> None:
        assert self._opened.wait(20)


def test_layers_are_announced_in_order_however_their_events_come() -> None:
    called: list[int] = []
    reached = threading.Event()

    def on_layer(layer: int) -> None:
        called.append(layer)
        reached.set()

    gates = [Gate() for _ in range(4)]
    with LayerAnnouncer(on_layer) as announcer:
        for layer, gate in enumerate(gates):
            announcer.announce(layer, gate)
        gates[2].open()
        gates[1].open()
        assert called == []
        gates[0].open()
        assert reached.wait(20), "while the step goes on"
        gates[3].open()
    assert called == [0, 1, 2, 3]


def announce_two(on_layer: Callable[[int], None], begin: Callable[[], None], error: Exception | None = None) -> None:
    gate = Gate()
    gate.open()
    with LayerAnnouncer(on_layer, begin) as announcer:
        announcer.announce(0, gate)
        announcer.announce(1, gate)
        if error is not None:
            raise error


def test_an_error_ends_the_announcements_and_the_first_one_is_raised_by_the_step() -> None:
    called: list[int] = []
    began: list[str] = []

    def fail(layer: int) -> None:
        called.append(layer)
        raise KeyError(layer)

    def begin() -> None:
        began.append(threading.current_thread().name)

    def fail_to_begin() -> None:
        raise RuntimeError("no such GPU")

    with pytest.raises(KeyError):
        announce_two(fail, begin)
    with pytest.raises(ValueError, match="the step's"):
        announce_two(fail, begin, ValueError("the step's"))
    with pytest.raises(RuntimeError, match="no such GPU"):
        announce_two(fail, fail_to_begin)
    assert called == [0, 0]
    assert all(name.startswith("layer-announcer") for name in began)
    assert not any(thread.name.startswith("layer-announcer") for thread in threading.enumerate())
