"""Layers are announced in order, once their events have come, and all of them before the step goes on."""

import threading

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


def test_the_new_thread_begins_as_it_is_told() -> None:
    began: list[str] = []
    with LayerAnnouncer(lambda layer: None, lambda: began.append(threading.current_thread().name)):
        pass
    assert began == ["layer-announcer"]

    def fail() -> None:
        raise RuntimeError("no such GPU")

    with pytest.raises(RuntimeError, match="no such GPU"), LayerAnnouncer(lambda layer: None, fail):
        pass


def test_leaving_waits_until_every_call_has_been_made() -> None:
    gate, called = Gate(), list[str]()

    def on_layer(layer: int) -> None:
        called.append(threading.current_thread().name)

    opener = threading.Timer(0.05, gate.open)
    opener.start()
    with LayerAnnouncer(on_layer) as announcer:
        announcer.announce(0, gate)
    opener.join()
    assert called == ["layer-announcer"]
    assert not any(thread.name == "layer-announcer" for thread in threading.enumerate())


def test_an_error_of_a_call_is_raised_by_the_step_and_ends_the_announcements() -> None:
    called: list[int] = []

    def on_layer(layer: int) -> None:
        called.append(layer)
        raise KeyError(layer)

    gate = Gate()
    gate.open()

    def step() -> None:
        with LayerAnnouncer(on_layer) as announcer:
            announcer.announce(0, gate)
            announcer.announce(1, gate)

    with pytest.raises(KeyError):
        step()
    assert called == [0]


def test_an_error_of_the_step_is_not_hidden_by_one_of_a_call() -> None:
    def on_layer(layer: int) -> None:
        raise KeyError(layer)

    gate = Gate()
    gate.open()

    def step() -> None:
        with LayerAnnouncer(on_layer) as announcer:
            announcer.announce(0, gate)
            raise ValueError("the step's")

    with pytest.raises(ValueError, match="the step's"):
        step()
    assert not any(thread.name == "layer-announcer" for thread in threading.enumerate())
