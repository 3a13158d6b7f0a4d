"""The doctor on fleets that are none: which trials it asks for, and what it makes of their times."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from twostroke.protocol.errors import RequestError, TransferFailed
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.requests import Address, Peer, Ticket, verify_ticket
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.router.http import doctor as module
from twostroke.router.http.doctor import MAX_BYTES, Doctor, possible_pairs

SECRET = b"the cluster's secret"
TOKEN_BYTES = 2 * 4 * 2 * 64 * 2  # K and V, layers, heads, head_dim, bytes of bf16


def worker(
    role: str, name: str, *, block_size: int = 16, num_blocks: int = 100_000, receives: bool = True
) -> WorkerInfo:
    layout = KVLayout("digest", "bfloat16", 4, 2, 64, block_size, tp_size=2)
    addresses = (Address("h", 2), Address("h", 3)) if receives else ()
    return WorkerInfo(role, Peer(name, 7), Address("h", 1), addresses, layout, num_blocks, 4096)  # type: ignore[arg-type]


P0, P1, D0, D1 = worker("prefill", "p0"), worker("prefill", "p1"), worker("decode", "d0"), worker("decode", "d1")


@dataclass
class FakeFleet:
    """Trials that take `delay_s` and the time of their bytes at `bytes_per_s`, without waiting for it."""

    infos: Sequence[WorkerInfo]
    delay_s: float = 0.001
    bytes_per_s: float = 1e9
    source_fails: Callable[[Peer], Exception | None] = lambda _: None
    target_fails: Callable[[Peer], Exception | None] = lambda _: None
    gate: asyncio.Event | None = None
    waiting: asyncio.Event = field(default_factory=asyncio.Event)  # a trial has come to the gate
    trials: list[tuple[Peer, Sequence[Ticket], int]] = field(default_factory=list)
    num_running: int = 0

    def workers(self) -> Sequence[WorkerInfo]:
        return self.infos

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        self.trials.append((worker, tickets, num_tokens))
        failure = self.source_fails(worker)
        async with self._call(failure, hangs=failure is None and self.target_fails(tickets[0].target) is not None):
            seconds = self.delay_s + num_tokens * TOKEN_BYTES / self.bytes_per_s
            # The first one also waits for the link; one of the others is unlucky.
            return ProbeTimes((9.0, 5.0, *(seconds for _ in tickets[2:])), "tcp", "the why", ("shm: a reason",))

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        failure = self.target_fails(worker)
        async with self._call(failure, hangs=failure is None and self.source_fails(tickets[0].source) is not None):
            return

    @asynccontextmanager
    async def _call(self, failure: Exception | None, *, hangs: bool) -> AsyncIterator[None]:
        """A call that fails, waits for a peer that never comes, or goes through."""
        self.num_running += 1
        try:
            await asyncio.sleep(0)
            if failure is not None:
                raise failure
            if hangs:
                await asyncio.Event().wait()
            if self.gate is not None:
                self.waiting.set()
                await self.gate.wait()
            yield
        finally:
            self.num_running -= 1


def doctor_of(
    fleet: FakeFleet,
    stats: Callable[[Peer], WorkerStats | None] = lambda _: None,
    expected: Mapping[Role, int] | None = None,
) -> Doctor:
    return Doctor(fleet=fleet, stats=stats, secret=SECRET, expected=lambda: expected or {})  # type: ignore[arg-type]


async def report(doctor: Doctor) -> list[dict[str, Any]]:
    async with aclosing(doctor.examine()) as lines:
        return [json.loads(line) async for line in lines]


def test_prompts_ways_come_first_then_what_can_be_pulled():
    lone = worker("prefill", "p2", receives=False)
    pairs = possible_pairs([D0, P0, lone, P1, D1])
    names = [(source.peer.worker_id, target.peer.worker_id) for source, target in pairs]
    assert names[:6] == [("p0", "d0"), ("p0", "d1"), ("p2", "d0"), ("p2", "d1"), ("p1", "d0"), ("p1", "d1")]
    assert names[6:10] == [("d0", "p0"), ("d0", "p1"), ("d1", "p0"), ("d1", "p1")]
    assert names[10:14] == [("p0", "p1"), ("p2", "p0"), ("p2", "p1"), ("p1", "p0")]
    assert names[14:] == [("d0", "d1"), ("d1", "d0")]


async def test_a_pair_is_told_with_its_speed_and_the_round_trip_of_one_block():
    fleet = FakeFleet([P0, D0], delay_s=0.001, bytes_per_s=1e8)
    begin, there, back, end = await report(doctor_of(fleet))
    assert begin == {"event": "begin", "pairs": 2, "left_out": 0, "missing_workers": []}
    assert end == {"event": "end", "failed": 0}
    told = [there[key] for key in ("source", "source_role", "target", "target_role")]
    assert told == ["p0", "prefill", "d0", "decode"]
    assert (back["source"], back["target"]) == ("d0", "p0")
    assert (there["transport"], there["why"], there["missing"]) == ("tcp", "the why", ["shm: a reason"])
    assert there["error"] is None
    assert there["round_trip_s"] == pytest.approx(0.001 + 16 * TOKEN_BYTES / 1e8)
    assert there["bytes_per_s"] == pytest.approx(1e8, rel=0.05)


async def test_trials_grow_until_one_takes_long_enough():
    slow, fast = FakeFleet([P0, D0], bytes_per_s=5e7), FakeFleet([P0, D0], bytes_per_s=1e12)
    sizes = []
    for fleet in (slow, fast):
        await doctor_of(fleet).probe(P0, D0)
        sizes.append([num_tokens * TOKEN_BYTES / 2**20 for _, _, num_tokens in fleet.trials[1:]])
    assert sizes == [[1.0, 8.0], [1.0, 8.0, 64.0]]


@pytest.mark.parametrize(("free_p", "free_d", "most"), [(8, 20, 2 * 32), (80, 20, 5 * 16), (3, 80, 32)])
async def test_a_trial_takes_a_quarter_of_either_sides_free_blocks_at_most_but_one_block(
    free_p: int, free_d: int, most: int
):
    small, large = worker("prefill", "p0", block_size=32), worker("decode", "d0")
    free = {small.peer: free_p, large.peer: free_d}
    fleet = FakeFleet([small, large], bytes_per_s=1e12)
    await doctor_of(fleet, lambda peer: WorkerStats(free_blocks=free[peer])).probe(small, large)
    assert [num_tokens for _, _, num_tokens in fleet.trials] == [32, most]
    assert most * TOKEN_BYTES < MAX_BYTES


async def test_every_transfer_has_a_ticket_of_its_own_for_the_pair():
    fleet = FakeFleet([P0, D0])
    await doctor_of(fleet).probe(P0, D0)
    tickets = [ticket for _, tickets, _ in fleet.trials for ticket in tickets]
    assert len({ticket.transfer_id for ticket in tickets}) == len(tickets) > 10
    for ticket in tickets:
        verify_ticket(SECRET, ticket, source=P0.peer, target=D0.peer)
        assert ticket.target_addresses == D0.transfer_addresses
        assert ticket.source_cut.ranks == 2


@pytest.mark.parametrize("side", ["source_fails", "target_fails"])
async def test_a_failure_on_either_side_is_told_and_ends_the_other(side: str):
    fleet = FakeFleet([P0, D0, D1])
    bad = {"source_fails": P0.peer, "target_fails": D0.peer}[side]
    setattr(fleet, side, lambda peer: TransferFailed("the link broke") if peer == bad else None)
    found = await report(doctor_of(fleet))
    failed = {(line["source"], line["target"]): line["error"] for line in found[1:-1]}
    wanted = "the link broke"
    ways = [("p0", "d0"), ("p0", "d1"), ("d0", "p0"), ("d1", "p0"), ("d0", "d1"), ("d1", "d0")]
    end = {"source_fails": 0, "target_fails": 1}[side]
    assert failed == {way: wanted if way[end] == bad.worker_id else None for way in ways}
    assert found[-1]["failed"] == sum(error is not None for error in failed.values())
    assert fleet.num_running == 0


async def test_a_pair_that_never_ends_has_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PAIR_S", 0.01)
    fleet = FakeFleet([P0, D0], gate=asyncio.Event())
    assert (await doctor_of(fleet).probe(P0, D0))["error"] == "the trial did not end within 0.01 s"
    assert fleet.num_running == 0


async def test_there_is_one_run_at_a_time_and_leaving_it_ends_its_trial():
    fleet = FakeFleet([P0, D0], gate=asyncio.Event())
    doctor = doctor_of(fleet)
    run = asyncio.create_task(report(doctor))
    await fleet.waiting.wait()
    with pytest.raises(RequestError) as caught:
        await report(doctor)
    assert (caught.value.status, caught.value.code) == (409, "doctor_is_running")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert fleet.num_running == 0
    fleet.gate = None
    assert (await report(doctor))[-1]["event"] == "end"


async def test_a_run_tries_so_many_pairs_at_most(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_PAIRS", 3)
    found = await report(doctor_of(FakeFleet([P0, P1, D0, D1])))
    assert (found[0]["pairs"], found[0]["left_out"]) == (3, 4 + 4 + 2 + 2 - 3)
    assert len(found) == 5


@pytest.mark.parametrize(
    ("present", "expected", "missing"),
    [
        ([P0, D0, D1], {"prefill": 1, "decode": 2}, []),
        ([D0], {"prefill": 0, "decode": 1}, []),
        ([P0, D0], {"prefill": 1, "decode": 2}, ["1 of 2 decode workers that there are to be is missing"]),
        (
            [],
            {"prefill": 1, "decode": 3},
            [
                "1 of 1 prefill worker that there are to be is missing",
                "3 of 3 decode workers that there are to be are missing",
            ],
        ),
        ([P0, P1, D0], {"prefill": 1, "decode": 1}, []),  # an old one leaves while its successor is there already
    ],
)
async def test_workers_that_are_to_be_there_and_are_not_are_told_first(
    present: Sequence[WorkerInfo], expected: Mapping[Role, int], missing: list[str]
):
    begin, *_ = await report(doctor_of(FakeFleet(present), expected=expected))
    assert begin["missing_workers"] == missing


async def test_the_endpoint_sends_a_line_for_each_pair_but_none_for_a_head(site_of):
    fleet = FakeFleet([P0, D0])
    async with site_of(0, 1) as site:
        site.app.state.doctor, http = doctor_of(fleet), site.http
        answer = await http.get("/doctor")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert [json.loads(line)["event"] for line in answer.text.splitlines()] == ["begin", "pair", "pair", "end"]
        num_trials = len(fleet.trials)
        head = await http.head("/doctor")
        assert head.status_code == 200
        assert len(fleet.trials) == num_trials
