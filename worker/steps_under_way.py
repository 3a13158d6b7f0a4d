"""The steps that an engine has been given and has not finished: one that runs, and perhaps the next behind it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from twostroke.model.step import BlockCopy, Engine, OnLayer, SequenceStep
from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import SampledToken

StepT = TypeVar("StepT")


@dataclass(frozen=True, slots=True)
class EndedStep(Generic[StepT]):
    """A step that has run."""

    step: StepT
    sampled: list[SampledToken | None]  # one for each entry
    seconds: float  # how long it ran; time behind another step isn't counted


class StepsUnderWay(Generic[StepT]):
    """Hands steps to an engine, and takes them back in the same order. Belongs to the worker's step loop."""

    def __init__(self, engine: Engine, clock: Clock):
        self._engine = engine
        self._clock = clock
        self._steps: list[StepT] = []
        self._results: list[asyncio.Task[list[SampledToken | None]]] = []  # of each step
        self._began = 0.0  # when the first of them could begin

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> StepT | None:
        """The one that another step would have to wait for."""
        return self._steps[-1] if self._steps else None

    async def begin(
        self,
        step: StepT,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> None:
        """Have it run after those under way. Returns once the engine has it."""
        if not self._steps:
            self._began = self._clock()
        self._steps.append(step)
        self._results.append(asyncio.create_task(self._engine.step(batch, on_layer, copies), name="engine step"))
        await asyncio.sleep(0)  # the task begins: the engine starts before the loop goes on thinking

    async def first_ended(self) -> EndedStep[StepT]:
        """Wait for the step that runs. Raises what the engine raises, which then does nothing more."""
        try:
            sampled = await self._results[0]
        except BaseException:
            for result in self._results:
                result.cancel()
            await asyncio.gather(*self._results, return_exceptions=True)
            raise
        began, self._began = self._began, self._clock()
        del self._results[0]
        return EndedStep(self._steps.pop(0), sampled, self._began - began)

    def give_up(self) -> list[StepT]:
        """Forget all steps, of an engine that has died; returns them."""
        given_up, self._steps, self._results = self._steps, [], []
        return given_up
