"""A step that the runner has launched: its tokens are known, or still on a GPU, where the next step can use them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from twostroke.model.host_tensors import place
from twostroke.model.layer_announcer import Event
from twostroke.model.step import Draw
from twostroke.protocol.requests import SampledToken

if TYPE_CHECKING:  # Triton is imported only where there is a GPU
    from twostroke.model.device_sampler import DrawnTokens


class LaunchedStep(Protocol):
    """What `ModelRunner.launch` returns."""

    @property
    def is_done(self) -> bool:
        """Whether `result` has nothing to wait for."""

    def result(self) -> list[SampledToken | None]:
        """As Engine.step's; blocks until they are there. To be called once, on any one thread."""

    def on_device(self) -> Tensor | None:
        """int64 [entries of the batch]: each one's token, on the device, any number where it drew none. None where the
        tokens are known already."""


@runtime_checkable
class LaunchingSampler(Protocol):
    """A sampler that need not be waited for: model/device_sampler.py."""

    def launch(self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> "DrawnTokens":
        """Draw one token for each row, without log-probabilities."""

    def collect(self, drawn: "DrawnTokens") -> list[int]:
        """The tokens; blocks until they have come."""


@dataclass(frozen=True)
class DoneStep:
    """Implements LaunchedStep for tokens that are known."""

    tokens: list[SampledToken | None]
    is_done = True

    def result(self) -> list[SampledToken | None]:
        return self.tokens

    def on_device(self) -> None:
        return None


@dataclass(frozen=True)
class SilentStep:
    """Implements LaunchedStep for a step that draws nothing, while a GPU may still compute its KV."""

    computed: Event
    device: torch.device
    num_entries: int
    is_done = False

    def result(self) -> list[SampledToken | None]:
        with torch.cuda.device(self.device):  # or waiting would make this thread a context on the first GPU
            self.computed.synchronize()
        return [None] * self.num_entries

    def on_device(self) -> None:
        return None


@dataclass(frozen=True)
class StepOnDevice:
    """Implements LaunchedStep for tokens under way."""

    sampler: LaunchingSampler
    drawn: "DrawnTokens"
    entries: list[int]  # of the batch: whose token each row is
    num_entries: int  # of the batch
    is_done = False

    def result(self) -> list[SampledToken | None]:
        tokens: list[SampledToken | None] = [None] * self.num_entries
        for entry, token in zip(self.entries, self.sampler.collect(self.drawn), strict=True):
            tokens[entry] = SampledToken(token)
        return tokens

    def on_device(self) -> Tensor:
        tokens = self.drawn.tokens
        if self.entries == list(range(self.num_entries)):
            return tokens
        places = place(np.array(self.entries, np.int64), tokens.device)
        return tokens.new_zeros(self.num_entries).index_copy_(0, places, tokens)
