"""KV in host memory: what goes out comes back as it was, wherever it comes back to."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.model.cache.kv_cache import make_kv_cache
from twostroke.model.cache.swap_space import SwapSpace, consecutive_runs, copy_over_bus
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.config import ModelConfig
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
from twostroke.model.step import BlockCopy, Draw, SequenceStep
from twostroke.protocol.errors import ConfigError, WorkerLost
from twostroke.protocol.requests import SampledToken, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def config(write_checkpoint: Any) -> ModelConfig:
    return load_model_config(write_checkpoint())


@pytest.mark.parametrize("crosses_a_bus", [False, True])
def test_blocks_come_back_as_they_were_to_other_places(config: ModelConfig, crosses_a_bus: bool) -> None:
    cache = make_kv_cache(
        config, num_blocks=12, block_size=4, dtype=torch.float32, device=torch.device("cpu"), model_digest="m"
    )
    for tensor in cache.tensors:
        tensor.copy_(torch.randn_like(tensor))
    before = [tensor.clone() for tensor in cache.tensors]
    space, host = SwapSpace(cache, 9), [torch.full_like(tensor[:9], torch.nan) for tensor in cache.tensors]
    copy = partial(copy_over_bus, cache.tensors, host) if crosses_a_bus else space.copy
    out, there, back = [2, 3, 4, 9, 1], [5, 6, 7, 0, 1], [11, 8, 0, 1, 4]
    copy(BlockCopy(True, out, there))
    for tensor in cache.tensors:
        tensor[out] = torch.nan
    copy(BlockCopy(False, back, there))
    for tensor, was in zip(cache.tensors, before, strict=True):
        assert torch.equal(tensor[back], was[out])
        others = [block for block in range(12) if block not in (*out, *back)]
        assert torch.equal(tensor[others], was[others])
    if crosses_a_bus:
        assert all(layer[[2, 3, 4, 8]].isnan().all() for layer in host)
    else:
        assert space.num_bytes == 10 * space.block_bytes == 10 * sum(tensor[0].nbytes for tensor in cache.tensors)
        assert space.seconds > 0


@pytest.mark.parametrize(
    ("left", "right", "runs"),
    [
        ((), (), []),
        ((3, 4, 5), (7, 8, 9), [(3, 7, 3)]),
        ((3, 4, 6, 7), (0, 1, 2, 3), [(3, 0, 2), (6, 2, 2)]),
        ((5, 4), (1, 0), [(5, 1, 1), (4, 0, 1)]),
    ],
)
def test_runs_are_as_long_as_both_sides_count_up(
    left: Sequence[int], right: Sequence[int], runs: list[tuple[int, int, int]]
) -> None:
    assert consecutive_runs(left, right) == runs


async def test_a_request_that_was_swapped_goes_on_as_one_that_was_not(write_checkpoint: Any) -> None:
    folder: Path = write_checkpoint(dtype=torch.float32)
    loaded = load_engine(EngineConfig(folder, num_blocks=8, block_size=4, swap_bytes=2**20, threads=1))
    engine, prompt = loaded.engine, [5, 9, 2, 7, 1, 8]

    async def decode(tokens: list[int], table: list[int], copies: Sequence[BlockCopy] = ()) -> int:
        start = 0 if tokens == prompt else len(tokens) - 1
        step = SequenceStep(tokens[start:], start, table, Draw(GREEDY, tokens, len(prompt)))
        (token,) = await engine.step([step], copies=copies)
        assert isinstance(token, SampledToken)
        return token.token_id

    try:
        answers: list[list[int]] = []
        for is_swapped in (False, True):
            tokens, table = list(prompt), [0, 1, 2]
            for index in range(4):
                copies: Sequence[BlockCopy] = ()
                if is_swapped and index == 2:
                    assert await engine.step([], copies=[BlockCopy(True, table[:2], [1, 0])]) == []
                    other = SequenceStep([3] * 8, 0, table[:2], None)
                    await engine.step([other])  # somebody else computes in its blocks
                    table = [6, 3, 7]
                    copies = [BlockCopy(False, table[:2], [1, 0])]
                tokens.append(await decode(tokens, table, copies))
            answers.append(tokens)
        assert answers[0] == answers[1]
        assert loaded.swap_space is not None
        assert loaded.swap_space.num_bytes == 4 * loaded.swap_space.block_bytes
    finally:
        await asyncio.to_thread(engine.close)


async def test_a_copy_without_swap_space_is_a_failed_step(write_checkpoint: Any) -> None:
    loaded = load_engine(EngineConfig(write_checkpoint(), num_blocks=8, block_size=4, threads=1))
    try:
        assert loaded.swap_space is None
        with pytest.raises(WorkerLost, match="no swap space"):
            await loaded.engine.step([], copies=[BlockCopy(True, [0], [0])])
    finally:
        await asyncio.to_thread(loaded.engine.close)


def test_more_swap_space_than_the_host_has_is_one_line(write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint()
    monkeypatch.setattr("twostroke.model.load.available_bytes", lambda device: 2**30)
    with pytest.raises(ConfigError, match=r"64.00 GiB of swap space .* lower decode.swap_gib"):
        load_engine(EngineConfig(folder, num_blocks=8, block_size=4, swap_bytes=2**36, threads=1))
