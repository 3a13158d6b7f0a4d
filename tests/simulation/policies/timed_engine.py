"""An engine that only takes time: as long as the calibrated steps do."""

import asyncio
from collections.abc import Sequence

from tests.simulation.fake_model import FakeEngine
from tests.simulation.fake_store import FakeStore, FakeSwapSpace
from tests.simulation.policies.calibration import SMALL_MODEL
from tests.simulation.policies.traffic import ANSWER
from twostroke.model.step import BlockCopy, OnLayer, SequenceStep
from twostroke.protocol.requests import SampledToken


class TimedEngine(FakeEngine):
    """Computes nothing. The store has few layers: the last one stands for the model's last, the others for the rest."""

    costs = SMALL_MODEL.costs

    def __init__(self, store: FakeStore, swap_space: FakeSwapSpace | None = None):
        super().__init__(store, swap_space)
        self._one_at_a_time = asyncio.Lock()
        self.busy_s = 0.0

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        async with self._one_at_a_time:
            seconds = self._seconds(batch)
            self.num_steps += 1
            self.busy_s += seconds
            if on_layer is None:
                await asyncio.sleep(seconds)
            else:
                await asyncio.sleep(seconds * (1 - 1 / SMALL_MODEL.layout.num_layers))
                for layer in range(self._num_layers - 1):
                    on_layer(layer)
                await asyncio.sleep(seconds / SMALL_MODEL.layout.num_layers)
                on_layer(self._num_layers - 1)
            return [None if one.draw is None else SampledToken(ANSWER) for one in batch]

    def _seconds(self, batch: Sequence[SequenceStep]) -> float:
        rows = [one.start + 1 for one in batch if len(one.token_ids) == 1]
        prompts = [(len(one.token_ids), one.start) for one in batch if len(one.token_ids) > 1]
        return (
            self.costs.base_s
            + sum(self.costs.prompt_s(num_new, num_before) for num_new, num_before in prompts)
            + self.costs.decode_s(len(rows), sum(rows))
        )
