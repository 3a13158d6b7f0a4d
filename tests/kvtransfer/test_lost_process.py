"""A source's process that is killed or stopped in the middle of a transfer."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from transfer_harness import BytesStore, Pair, make_pair, settle

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.incoming import IncomingTransfer
from twostroke.kvtransfer.rules.lifecycle import ReceiverState
from twostroke.protocol.errors import TransferFailed

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BLOCKS = [5, 6, 7, 8, 20, 21, 22, 3]
LEASE_S = 1.0


@contextlib.asynccontextmanager
async def stalled(transport: str) -> AsyncIterator[tuple[Pair, IncomingTransfer, Process]]:
    """A transfer whose sender's process has stalled between a chunk's message and its bytes."""
    async with make_pair(transport, target=BytesStore(), config=TransferConfig(lease_s=LEASE_S)) as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect(ticket, BLOCKS, 32, 0)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            HERE / "stalling_sender.py",
            transport,
            msgspec.msgpack.encode(ticket).hex(),
            str(LEASE_S),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1"},
            stdin=PIPE,
            stdout=PIPE,
        )
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"stalled\n"
            yield pair, incoming, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


@pytest.mark.parametrize("transport", ["tcp", "torch_distributed"])
async def test_a_killed_source_fails_its_transfer_at_once_and_its_bytes_are_never_taken_for_kv(
    transport: str,
) -> None:
    async with stalled(transport) as (pair, incoming, process):
        await settle(lambda: incoming.lanes[0].state is ReceiverState.RECEIVING or incoming.ended)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(TransferFailed):
            await incoming.verified()
        assert pair.receiver.stats.done == 0
        assert pair.receiver.stats.in_flight == 0


@pytest.mark.parametrize("transport", ["tcp", "torch_distributed"])
async def test_a_stopped_source_that_wakes_after_its_lease_writes_nothing_into_the_blocks(
    transport: str,
) -> None:
    async with stalled(transport) as (pair, incoming, process):
        await settle(lambda: incoming.lanes[0].state is ReceiverState.RECEIVING or incoming.ended)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferFailed, match=r"silent for|3 times"):
            await incoming.verified()
        pair.target.fill(9)  # the blocks are somebody else's now
        before = pair.target.copy()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.send_signal(signal.SIGCONT)
        assert (await process.stdout.readline()).startswith(b"failed: "), "it has tried, and was refused"
        assert await process.wait() == 0
        assert pair.target.copy() == before
