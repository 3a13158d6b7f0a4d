"""Trial transfers between two workers: which blocks they take, what they tell, and that all comes back in the end."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rigs.played import played_by
from tests.worker.worker_rig import BLOCK, DECODE, PREFILL, SECRET, Rig, begin, make_parts, play
from twostroke.kvtransfer.sender import LinkReport
from twostroke.protocol.errors import RequestError, TransferFailed
from twostroke.protocol.requests import Address, Peer, mint_ticket
from twostroke.simulator.memory_transport import Parts
from twostroke.worker.link_probe import LinkProbe, _links
from twostroke.worker.transfers import Transfers


@dataclass
class Scene:
    """A prefill worker, and a target whose parts the test has in hand."""

    rig: Rig
    parts: Parts
    addresses: tuple[Address, ...]
    target: LinkProbe

    def both(self, count: int, num_tokens: int = 20) -> tuple["asyncio.Task[Any]", "asyncio.Task[Any]"]:
        """Calls of both ends, under way."""
        tickets = [mint_ticket(SECRET, "doctor", PREFILL, DECODE, self.addresses) for _ in range(count)]
        source = begin(self.rig.worker.probe.source(tickets, num_tokens))
        return source, begin(self.target.target(tickets, num_tokens))

    async def both_of_many(self) -> tuple["asyncio.Task[Any]", "asyncio.Task[Any]"]:
        """Begin both ends of more transfers than ever end; some have ended when this returns."""
        calls = self.both(500)
        while self.parts.receiver.stats.done < 8:  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.01)
        return calls


def play_trials(script: Callable[[Scene], Awaitable[None]]) -> None:
    """Run `script`; afterwards both ends have all their blocks, and nothing is under way."""

    async def main(rig: Rig) -> None:
        parts = make_parts(DECODE, rig.fabric, rig.links)
        transfers = Transfers()
        target = LinkProbe(
            pool=parts.pool,
            sender=parts.sender,
            receiver=parts.receiver,
            transfers=transfers,
            clock=asyncio.get_running_loop().time,
        )
        await script(Scene(rig, parts, await parts.receiver.start("host"), target))
        await rig.worker.drain()
        await transfers.all_ended()
        assert rig.pool.owned_blocks == parts.pool.owned_blocks == 0
        await parts.close()

    play(main, role="prefill")


@played_by(play_trials)
async def test_each_transfer_is_timed_and_the_links_are_reported(scene: Scene) -> None:
    times, _ = await asyncio.gather(*scene.both(4))
    assert len(times.seconds) == 4
    assert min(times.seconds) > 0
    assert times.transport.startswith("memory")
    assert scene.rig.worker.stats().transfers_done == scene.parts.receiver.stats.done == 4


def test_what_the_links_of_several_ranks_have_in_common_is_reported_once() -> None:
    target, missing = Peer("d0", 2), ("shm: one machine",)
    links = (
        LinkReport(target, "tcp", "the only one", missing),
        LinkReport(target, "tcp", "the only one", missing),
        LinkReport(Peer("d1", 3), "shm", "another worker's", ()),
    )
    sender: Any = SimpleNamespace(links=lambda: links)
    assert _links(sender, target) == ("tcp", "the only one", missing)


@pytest.mark.parametrize("end", ["source", "target"])
@played_by(play_trials)
async def test_a_trial_takes_half_of_the_free_blocks_and_no_more(scene: Scene, end: str) -> None:
    pool = scene.rig.pool if end == "source" else scene.parts.pool
    held = pool.allocate(pool.num_blocks - 10)
    await asyncio.gather(*scene.both(1, 5 * BLOCK))
    calls = scene.both(1, 5 * BLOCK + 1)
    refused, other = calls if end == "source" else reversed(calls)
    with pytest.raises(RequestError, match="6 blocks: it may take 1 to 5"):
        await refused
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    pool.release(held)


@pytest.mark.parametrize("end", ["source", "target"])
@played_by(play_trials)
async def test_a_cancelled_trial_returns_at_once_and_fails_the_other_end(scene: Scene, end: str) -> None:
    calls = await scene.both_of_many()
    cancelled, other = calls if end == "source" else reversed(calls)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(TransferFailed):
        await other


@played_by(play_trials)
async def test_a_cancelled_trial_keeps_its_blocks_until_nothing_writes_into_them(scene: Scene) -> None:
    scene.rig.links.bytes_per_s = 1e3
    source, target = scene.both(1)
    await asyncio.sleep(0.1)
    target.cancel()
    await asyncio.gather(target, return_exceptions=True)
    assert scene.parts.pool.owned_blocks == 20 // BLOCK, "a chunk is on the wire"
    await asyncio.gather(source, return_exceptions=True)


@played_by(play_trials)
async def test_a_trial_that_is_cancelled_before_its_target_answers_gives_its_blocks_back(scene: Scene) -> None:
    source, target = scene.both(1)
    target.cancel()
    await asyncio.sleep(0.1)
    source.cancel()
    await asyncio.sleep(0.1)
    assert scene.rig.pool.owned_blocks == 0
    await asyncio.gather(source, target, return_exceptions=True)


@played_by(play_trials)
async def test_a_lost_end_fails_the_trial(scene: Scene) -> None:
    calls = await scene.both_of_many()
    scene.rig.fabric.cut(DECODE.worker_id)
    for call in calls:
        with pytest.raises(TransferFailed):
            await call
