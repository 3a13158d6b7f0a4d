"""Tells of layers whose KV is in the cache while the GPU computes on: the step's thread waits for none of them."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol


class Event(Protocol):
    """As torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until what was launched before the event was recorded is done, without the interpreter's lock."""


class LayerAnnouncer:
    """Calls `on_layer(i)` on a thread of its own, in order, each once layer i's event has come.

    A context: when it is left, every call has been made, and the thread has ended. An error of a call, or of the
    device, is raised there, after which no further layer is announced.
    """

    def __init__(self, on_layer: Callable[[int], None], begin: Callable[[], None] = lambda: None):
        """`begin` is called first on the new thread: a thread has a current GPU of its own."""
        self._on_layer = on_layer
        self._begin = begin
        self._layers: SimpleQueue[tuple[int, Event] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="layer-announcer")

    def __enter__(self) -> "LayerAnnouncer":
        self._thread.start()
        return self

    def announce(self, layer: int, event: Event) -> None:
        """`event` was recorded after the launch that writes the layer's KV."""
        self._layers.put((layer, event))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._layers.put(None)
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _work(self) -> None:
        try:
            self._begin()
        except BaseException as failure:
            self._failure = failure
        while (item := self._layers.get()) is not None:
            layer, event = item
            if self._failure is not None:
                continue
            try:
                event.synchronize()
                self._on_layer(layer)
            except BaseException as failure:  # it belongs to the step
                self._failure = failure
