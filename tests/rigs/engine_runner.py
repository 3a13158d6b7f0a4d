"""A loaded engine in the place of a runner, for tests/model/conftest.py's `generate`."""

import asyncio
from collections.abc import Callable, Sequence

from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import LoadedEngine, load_engine
from twostroke.model.step import SequenceStep
from twostroke.protocol.requests import SampledToken


class EngineRunner:
    """Runs each step through the engine's thread, and waits for it."""

    def __init__(self, loaded: LoadedEngine):
        self._engine = loaded.engine
        self.groups = loaded.kv_cache.groups

    def run(self, batch: Sequence[SequenceStep]) -> list[SampledToken | None]:
        return asyncio.run(self._engine.step(batch))


def greedy_tokens(
    config: EngineConfig,
    generate: Callable[..., list[list[int]]],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    chunk: int,
) -> list[list[int]]:
    """Return what an engine of its own answers to each prompt."""
    loaded = load_engine(config)
    try:
        return generate(EngineRunner(loaded), prompts, new_tokens, chunk=chunk, block_size=config.block_size)
    finally:
        loaded.engine.close()
