"""A loaded engine in the place of a runner, for tests/model/conftest.py's `generate`."""

import asyncio
from collections.abc import Sequence

from twostroke.model.load import LoadedEngine
from twostroke.model.step import SequenceStep
from twostroke.protocol.requests import SampledToken


class EngineRunner:
    """Runs each step through the engine's thread, and waits for it."""

    def __init__(self, loaded: LoadedEngine):
        self._engine = loaded.engine
        self.groups = loaded.kv_cache.groups

    def run(self, batch: Sequence[SequenceStep]) -> list[SampledToken | None]:
        return asyncio.run(self._engine.step(batch))
