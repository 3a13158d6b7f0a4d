"""Work that was launched and is still under way on a GPU: layers whose KV is announced while the GPU computes on, and
steps whose tokens the next step can use before they are known.

The thread that launches steps waits for no layer.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from twostroke.model.batch import place
from twostroke.protocol.requests import SampledToken

if TYPE_CHECKING:
    from twostroke.model.cuda.sampler import DrawnTokens


class Waited(Protocol):
    """Work of a device: LaunchedWork."""

    def synchronize(self) -> None:
        """Return once it is done."""


class LaunchedWork:
    """All work that was launched on the current stream of `device` before this object was made, for any thread to wait
    for."""

    def __init__(self, device: torch.device):
        # Waiters sleep. By default they spin, and a step of milliseconds would take one core from the event loop and
        # from the thread that launches the next step.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))
        self._device = device

    def synchronize(self) -> None:
        """Return once it is done. Frees the interpreter's lock. Raises RuntimeError where the device has failed."""
        # A thread without a current device would be given the first GPU, and a context of 500 MiB there.
        with torch.cuda.device(self._device):
            self._event.synchronize()


class LayerAnnouncer:
    """Announces layers whose KV a GPU has written, on a thread of its own that lives from step to step.

    The thread that launches steps therefore never waits for a layer. Only that thread uses this object.
    """

    def __init__(self, begin: Callable[[], None], record: Callable[[], Waited]):
        """`begin` is called first on the announcer's thread. `record` returns all work launched so far."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layer-announcer")
        self._begun = self._thread.submit(begin)
        self._record = record

    def step(self, on_layer: Callable[[int], None]) -> "StepAnnouncements":
        """Return the announcements of the step that is about to be launched."""
        return StepAnnouncements(self._thread, self._begun, self._record, on_layer)

    def close(self) -> None:
        """End the thread after all announcements so far."""
        self._thread.shutdown(wait=True)


class StepAnnouncements:
    """Calls `on_layer(i)` for the layers of one step, in order, each once what writes its KV has run."""

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        begun: "Future[None]",
        record: Callable[[], Waited],
        on_layer: Callable[[int], None],
    ):
        self._thread = thread
        self._record = record
        self._on_layer = on_layer
        self._last = begun

    def announce(self, layer: int) -> None:
        """Announce the layer once all work launched so far has run, its KV's write last. Never waits."""
        self._last = self._thread.submit(self._tell, self._last, layer, self._record())

    def result(self) -> None:
        """Wait until all layers are announced. Raises the first error of a call, or of the device, after which no
        further layer of the step is announced."""
        self._last.result()

    def _tell(self, before: "Future[None]", layer: int, event: Waited) -> None:
        before.result()  # its error is this one's, too
        event.synchronize()
        self._on_layer(layer)


def layer_announcer(device: torch.device) -> LayerAnnouncer | None:
    """Return an announcer for `device`; None on CPUs, where a layer's KV is written when its call returns."""
    if device.type != "cuda":
        return None

    return LayerAnnouncer(partial(torch.cuda.set_device, device), partial(LaunchedWork, device))


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose tokens are known; subclasses stand for steps still under way."""

    tokens: list[SampledToken | None]  # one of each entry of the batch, None where it draws none or none is known yet

    is_done: ClassVar[bool] = True
    """True if `result` has nothing to wait for."""

    def result(self) -> list[SampledToken | None]:
        """Return Engine.step's result; blocks until it is there. To be called once, on any one thread."""
        return self.tokens

    def peek(self) -> list[SampledToken | None]:
        """Return the result as `result` does, on the engine's thread, any number of times."""
        return self.tokens

    def on_device(self) -> Tensor | None:
        """int64 [entries of the batch]: each one's token, on the device, any number where it drew none. None where the
        tokens are known already."""
        return None


@dataclass(frozen=True)
class SilentStep(LaunchedStep):
    """A step that draws nothing on this rank, while a GPU may still compute its KV."""

    computed: LaunchedWork
    is_done: ClassVar[bool] = False

    def result(self) -> list[SampledToken | None]:
        self.computed.synchronize()
        return self.tokens


@dataclass(frozen=True)
class AnnouncedStep(LaunchedStep):
    """A step whose layers a LayerAnnouncer announces: it ends after the last announcement."""

    step: LaunchedStep
    announcements: StepAnnouncements
    is_done: ClassVar[bool] = False

    def result(self) -> list[SampledToken | None]:
        self.announcements.result()
        return self.step.result()

    def peek(self) -> list[SampledToken | None]:
        return self.step.peek()

    def on_device(self) -> Tensor | None:
        return self.step.on_device()


@dataclass(frozen=True)
class StepOnDevice(LaunchedStep):
    """A step whose tokens are still on the device."""

    drawn: "DrawnTokens"
    entries: list[int]  # of the batch: whose token each row is
    is_done: ClassVar[bool] = False

    def result(self) -> list[SampledToken | None]:
        for entry, token in zip(self.entries, self.drawn.collect(), strict=True):
            self.tokens[entry] = SampledToken(token)
        return self.tokens

    def peek(self) -> list[SampledToken | None]:
        tokens = [*self.tokens]
        for entry, token in zip(self.entries, self.drawn.wait(), strict=True):
            tokens[entry] = SampledToken(token)
        return tokens

    def on_device(self) -> Tensor:
        tokens = self.drawn.tokens
        if self.entries == list(range(len(self.tokens))):
            return tokens
        places = place(np.array(self.entries, np.int64), tokens.device)
        return tokens.new_zeros(len(self.tokens)).index_copy_(0, places, tokens)
