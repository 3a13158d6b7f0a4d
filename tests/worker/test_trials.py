"""Trial transfers: which blocks they take, and that these come back on every path."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.simulation.worker_rig import DECODE, PREFILL, SECRET, begin, make_parts, play
from tests.simulation.worker_rig import Rig as WorkerRig
from twostroke.protocol.errors import RequestError, TransferFailed
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Peer, Ticket, mint_ticket
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.pulls import Transfers
from twostroke.worker.trials import LinkProbe

SOURCE, TARGET = Peer("p0", 1), Peer("d0", 2)
BLOCK = 4
LAYOUT = KVLayout("m", "float32", 2, 2, 8, BLOCK)


def tickets(count: int) -> list[Ticket]:
    return [Ticket(bytes([i]) * 16, "doctor", SOURCE, TARGET, ()) for i in range(count)]


@dataclass(frozen=True)
class Store:
    layout: KVLayout = LAYOUT
    rank: int = 0
    num_blocks: int = 16


@dataclass(frozen=True)
class Report:
    target: Peer
    rank: int
    transport: str
    why: str
    missing: tuple[str, ...]


@dataclass
class Transfer:
    """One side of a transfer. It ends when the test says so."""

    block_ids: Sequence[int]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str | None = None
    is_committed: bool = False
    is_aborted: bool = False

    def commit(self, first_token: None) -> None:
        assert first_token is None
        self.is_committed = True

    def abort(self, _reason: str) -> None:
        self.is_aborted = True

    async def done(self) -> None:
        await self.over.wait()
        if self.failure or self.is_aborted:
            raise TransferFailed(self.failure or "aborted")

    verified = done

    async def cancel(self) -> None:
        self.is_aborted = True
        await self.over.wait()


class Side:
    """A sender and a receiver that keep what they are asked for, and finish as many transfers as they are told."""

    def __init__(self, num_done: int = 0, seconds: float = 0.0):
        self.transfers: list[Transfer] = []
        self.now = 0.0
        self._num_done = num_done
        self._seconds = seconds
        self.stuck = asyncio.Event()

    def open(self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int) -> Transfer:
        assert num_ready_tokens == num_tokens
        return self._begin(block_ids)

    def expect(self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int) -> Transfer:
        assert skip_tokens == 0
        return self._begin(block_ids)

    def links(self) -> tuple[Report, ...]:
        return (
            Report(TARGET, 0, "tcp", "the only one", ("shm: one machine",)),
            Report(TARGET, 1, "tcp", "the only one", ("shm: one machine",)),
            Report(Peer("d1", 3), 0, "shm", "another worker's", ()),
        )

    def _begin(self, block_ids: Sequence[int]) -> Transfer:
        transfer = Transfer(tuple(block_ids))
        self.transfers.append(transfer)
        if len(self.transfers) <= self._num_done:
            self.now += self._seconds * len(self.transfers)
            transfer.over.set()
        else:
            self.stuck.set()
        return transfer


@dataclass
class Rig:
    side: Side
    pool: BlockPool = field(default_factory=lambda: BlockPool(16, BLOCK))
    num_releases: int = 0

    def __post_init__(self) -> None:
        self.transfers = Transfers(self._released)
        self.probe = LinkProbe(
            pool=self.pool,
            sender=self.side,  # type: ignore[arg-type]
            receiver=self.side,  # type: ignore[arg-type]
            store=Store(),  # type: ignore[arg-type]
            clock=lambda: self.side.now,
            transfers=self.transfers,
        )

    def _released(self) -> None:
        assert self.pool.owned_blocks == 0
        self.num_releases += 1

    def run(self, end: str, count: int, num_tokens: int) -> "asyncio.Task[object]":
        return asyncio.create_task(getattr(self.probe, end)(tickets(count), num_tokens))

    def is_over(self) -> bool:
        self.pool.check_integrity()
        return self.pool.owned_blocks == 0 and not self.transfers.is_busy and self.num_releases == 1


async def test_the_source_times_each_transfer_and_tells_its_links_once() -> None:
    rig = Rig(Side(num_done=3, seconds=0.5))
    times = await rig.probe.source(tickets(3), 9)
    assert times.seconds == (0.5, 1.0, 1.5)
    assert (times.transport, times.why, times.missing) == ("tcp", "the only one", ("shm: one machine",))
    assert [len(transfer.block_ids) for transfer in rig.side.transfers] == [3, 3, 3]
    assert all(transfer.is_committed for transfer in rig.side.transfers)
    await asyncio.sleep(0)
    assert rig.is_over()


async def test_the_target_takes_every_transfer_in_turn() -> None:
    rig = Rig(Side(num_done=3))
    await rig.probe.target(tickets(3), 8)
    assert [len(transfer.block_ids) for transfer in rig.side.transfers] == [2, 2, 2]
    await asyncio.sleep(0)
    assert rig.is_over()


@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_trial_takes_half_of_the_free_blocks_and_no_more(end: str) -> None:
    rig = Rig(Side(num_done=2))
    held = rig.pool.allocate(6)  # 10 are free
    await getattr(rig.probe, end)(tickets(1), 5 * BLOCK)
    with pytest.raises(RequestError, match="6 blocks: it may take 1 to 5"):
        await getattr(rig.probe, end)(tickets(1), 5 * BLOCK + 1)
    assert rig.pool.owned_blocks == 6
    rig.pool.release(held)


@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_failed_transfer_ends_the_trial_and_frees_its_blocks(end: str) -> None:
    rig = Rig(Side(num_done=1))
    call = rig.run(end, 3, 8)
    await rig.side.stuck.wait()
    rig.side.transfers[1].failure = "the link broke"
    rig.side.transfers[1].over.set()
    with pytest.raises(TransferFailed, match="the link broke"):
        await call
    assert len(rig.side.transfers) == 2
    await asyncio.sleep(0)
    assert rig.is_over()


@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_cancelled_trial_keeps_its_blocks_until_its_transfer_has_ended(end: str) -> None:
    rig = Rig(Side())
    call = rig.run(end, 3, 8)
    await rig.side.stuck.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for _ in range(5):
        await asyncio.sleep(0)
    assert rig.side.transfers[0].is_aborted
    assert rig.transfers.is_busy
    assert rig.pool.owned_blocks == 2  # somebody may still read or write them
    rig.side.transfers[0].over.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(rig.side.transfers) == 1
    assert rig.is_over()


def test_a_real_trial_is_timed_on_both_ends_and_a_refusal_or_a_cancellation_leaves_both_free() -> None:
    async def script(rig: WorkerRig) -> None:
        parts = make_parts(DECODE, rig.fabric, rig.links)
        clock = asyncio.get_running_loop().time
        transfers = Transfers(lambda: None)
        target = LinkProbe(
            pool=parts.pool,
            sender=parts.sender,
            receiver=parts.receiver,
            transfers=transfers,
            store=parts.store,
            clock=clock,
        )
        addresses = await parts.receiver.start("host")

        def both(count: int) -> tuple["asyncio.Task[object]", "asyncio.Task[object]"]:
            signed = [mint_ticket(SECRET, "doctor", PREFILL, DECODE, addresses) for _ in range(count)]
            return begin(rig.worker.probe.source(signed, 20)), begin(target.target(signed, 20))

        times, _ = await asyncio.gather(*both(4))
        assert len(times.seconds) == 4
        assert min(times.seconds) > 0
        assert rig.worker.stats().transfers_done == parts.receiver.stats.done == 4

        held = parts.pool.allocate(30)
        source, refused = both(1)
        with pytest.raises(RequestError, match="it may take 1 to 1 here"):
            await refused
        source.cancel()
        with pytest.raises(asyncio.CancelledError):
            await source
        parts.pool.release(held)

        source, receiving = both(500)
        while parts.receiver.stats.done < 8:  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.01)
        source.cancel()
        with pytest.raises(TransferFailed):
            await receiving
        await rig.worker.drain()
        assert rig.pool.owned_blocks == parts.pool.owned_blocks == 0
        assert not transfers.is_busy
        await parts.receiver.close()
        await parts.sender.close()
        await parts.transports.close()

    play(script, role="prefill")
