"""A prefill worker that can't reach the decode worker: nobody waits, and no answer changes.

The decode worker would wait an hour for an offer by itself; so an answer that comes at all shows that it was told.
"""

import asyncio
import logging
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.local_fleet import HOST, Served, Shape, serve
from twostroke.kvtransfer.config import TransferConfig
from twostroke.protocol.requests import Address, SamplingParams
from twostroke.router.observe.stages import Stages

GREEDY = SamplingParams(temperature=0.0)
AN_HOUR_S = 3600.0
PROMPT = [random.Random(4).randrange(96) for _ in range(150)]
LENGTH = 20


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    """A model of random weights."""
    return write_checkpoint(seed=3, num_attention_heads=8, num_key_value_heads=2)


@pytest.fixture(scope="module")
def answer(folder: Path) -> list[int]:
    """The right one, of a single worker."""

    async def ask() -> list[int]:
        async with serve(folder, Shape(None, num_blocks=256)) as served:
            return await served.generate(PROMPT, LENGTH, GREEDY)

    return asyncio.run(ask())


@pytest.fixture
def refusing() -> Iterator[Address]:
    """Where connections are refused: the port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        yield Address(HOST, taken.getsockname()[1])


def hide_decode_worker(served: Served, address: Address) -> None:
    """From now on tickets name `address` as the decode worker's."""
    infos = served.fleet.infos
    (index,) = [index for index, info in enumerate(infos) if info.role == "decode"]
    infos[index] = msgspec.structs.replace(infos[index], transfer_addresses=(address,))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("fault", ["refused", "a lease too short for anything"])
async def test_a_prompt_whose_kv_can_not_be_sent_is_computed_at_once_where_it_is_decoded(
    transport: str,
    fault: str,
    folder: Path,
    answer: list[int],
    refusing: Address,
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_refused = fault == "refused"
    transfers = TransferConfig() if is_refused else TransferConfig(lease_s=1e-6)
    shape = Shape(transport, num_blocks=256, router_wait_s=AN_HOUR_S, transfers=transfers)
    async with serve(folder, shape) as served, asyncio.timeout(60):
        if is_refused:
            hide_decode_worker(served, refusing)
        for count in (1, 2):  # the second finds what the first has learned of the pair: nothing
            stages = Stages(time.monotonic())
            assert await served.generate(PROMPT, LENGTH, GREEDY, stages) == answer
            await served.idle()
            assert (stages.attempts, stages.prefill_failures) == (1, 1)
            assert served.fleet.stats("prefill").transfers_failed == count
        assert served.fleet.stats("decode").transfers_failed == 0, "it never saw an offer"
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "twostroke.prefill_worker.worker" and record.levelno == logging.WARNING
    ]
    assert len(lines) == 2
    assert all("was not sent" in line for line in lines)
