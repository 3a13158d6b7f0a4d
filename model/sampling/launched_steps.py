"""Steps that were launched: their tokens are known, or on their way on a GPU, where the next step can use them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import Tensor

from twostroke.model.batch import place
from twostroke.model.cache.layer_announcer import LaunchedWork, StepAnnouncements
from twostroke.protocol.requests import SampledToken

if TYPE_CHECKING:  # Triton is imported only where there is a GPU
    from twostroke.model.cuda.sampler import DrawnTokens


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
