"""Workers on both sides of a transfer, which do as they should, or as they should not."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from tests.simulation.transfers.plan import LEASE_S, PROGRESS_S, Plan, TransferPlan
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.transfer import IncomingTransfer, OutgoingTransfer
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.kv_layout import RankCut
from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket, mint_ticket
from twostroke.simulator.memory_network import MemoryFabric, Trace
from twostroke.simulator.memory_store import Array, FakeStore, fake_layout
from twostroke.simulator.memory_transport import LinkFabric, MemoryTransport, Parts, parts_around
from twostroke.simulator.virtual_loop import VirtualProcess

SECRET = b"the simulation's secret"
NUM_BLOCKS = 64
MAX_PENDING_OFFERS = 4


class Process(VirtualProcess):
    """One incarnation of a worker. All its tasks run in its own context, so that it can be stopped and continued."""

    def __init__(self, plan: Plan, number: int, epoch: int, fabric: MemoryFabric, links: LinkFabric):
        self.number = number
        self.host = f"worker-{number}"
        self.peer = Peer(self.host, epoch)
        super().__init__(f"{self.host} of epoch {epoch}")
        self.is_dead = False
        self.links_left = 0  # after its end: links that nobody has closed
        self.addresses: tuple[Address, ...] = ()
        worker = plan.workers[number]
        layout = fake_layout(
            num_layers=plan.num_layers,
            block_size=worker.block_size,
            tp_size=worker.tp_size,
            pp_size=worker.pp_size,
            num_kv_heads=plan.num_kv_heads,
            kinds=plan.kinds,
            context_ranks=worker.context_ranks,
        )
        config = TransferConfig(
            lease_s=LEASE_S,
            progress_s=PROGRESS_S,
            max_chunk_bytes=worker.max_chunk_bytes,
            max_pending_offers=MAX_PENDING_OFFERS,
        )
        self.ranks = tuple(
            parts_around(
                FakeStore(layout, num_blocks=NUM_BLOCKS, rank=rank),
                self.peer,
                # A process that is started again listens where its forerunner did.
                fabric.at(self.host, port=1000 + 10 * number + rank),
                links,
                config,
                SECRET,
                plan.links_from,
            )
            for rank in range(layout.num_ranks)
        )

    async def start(self) -> None:
        """Listen."""
        for rank in self.ranks:
            self.addresses += await self.spawn(rank.receiver.start(self.host), "start")

    async def close(self) -> None:
        """End everything that this process has."""
        for rank in self.ranks:
            await self.spawn(rank.sender.close(), "close")
            await self.spawn(rank.receiver.close(), "close")
            for transport in rank.transports.by_name.values():
                if isinstance(transport, MemoryTransport):
                    self.links_left += len(transport.open_links)
            await rank.transports.close()


@dataclass(frozen=True)
class Side:
    """One side of a transfer that has begun."""

    process: Process
    ticket: Ticket
    transfers: Sequence[OutgoingTransfer | IncomingTransfer]  # one for each of its ranks


@dataclass
class Sides:
    """Plays the sides of transfers, each in its own process; what must not be goes into `problems`."""

    plan: Plan
    processes: list[Process]  # those that live
    known_ids: Mapping[bytes, None]  # of all transfers that were ever offered
    problems: list[str]
    trace: Trace
    open: dict[tuple[int, str], Side] = field(default_factory=dict)  # by transfer and side; those that have not ended

    async def send(self, process: Process, one: TransferPlan, ticket: Ticket, truth: Array) -> str:
        """Send as a worker does that computes a prompt, or has its KV in the cache."""
        if one.source_act == "never open":
            return "never opened"
        if one.source_act == "decline":
            if ticket.source == process.peer:
                for rank in process.ranks:
                    rank.sender.decline_transfer(ticket, "nothing is here")
            return "declined"
        tables = [_allocate(rank, one.num_tokens) for rank in process.ranks]
        for rank, table in zip(process.ranks, tables, strict=True):
            _write(rank, table, truth, 0, one.num_ready_tokens)
        if one.is_forged:
            await self._forge(one, ticket)
        if one.source_act == "flood":
            await self._flood(process, one)
        transfers = [
            rank.sender.begin_transfer(ticket, one.num_tokens, table, one.num_ready_tokens)
            for rank, table in zip(process.ranks, tables, strict=True)
        ]
        self.open[one.number, "source"] = Side(process, ticket, transfers)
        outcome = await self._drive(process, one, ticket, truth, tables, transfers)
        for rank, table in zip(process.ranks, tables, strict=True):
            _free(rank, table)
        return outcome

    async def _drive(
        self,
        process: Process,
        one: TransferPlan,
        ticket: Ticket,
        truth: Array,
        tables: list[list[int]],
        transfers: list[OutgoingTransfer],
    ) -> str:
        """Compute, commit and wait for the end; all blocks may be freed afterwards."""
        if one.source_act == "abort":
            asyncio.get_running_loop().call_later(one.source_act_after_s, _abort_all, transfers, "the source gives up")
        ready = one.num_ready_tokens
        for step in one.steps:
            for layer in range(self.plan.num_layers):
                await asyncio.sleep(one.layer_s)
                for rank, table, transfer in zip(process.ranks, tables, transfers, strict=True):
                    if layer in _layers(rank.store):
                        _write(rank, table, truth, ready, step, layer)
                        transfer.layer_ready(layer, step)
            ready = step
        if one.source_act == "fall silent":
            asyncio.get_running_loop().call_later(3 * PROGRESS_S, _abort_all, transfers, "the source wakes up")
        else:
            for transfer in transfers:
                transfer.commit(_token(one))
        if one.source_act == "open twice":
            await self._open_twice(process, one, ticket)
        outcome = "released"
        for transfer in transfers:
            try:
                await transfer.done()
            except TransferFailed as error:
                self.trace(f"source of transfer {one.number} fails: {error}")
                outcome = "failed"
                for other in transfers:
                    other.abort("another rank's transfer has failed")
        return outcome

    async def _open_twice(self, process: Process, one: TransferPlan, ticket: Ticket) -> None:
        """Use a ticket for a second transfer: it must not arrive, whatever becomes of the first."""
        await asyncio.sleep(one.source_act_after_s)
        await self._send_in_vain(process, one, ticket, f"the ticket of transfer {one.number} was good for two")

    async def _send_in_vain(self, process: Process, one: TransferPlan, ticket: Ticket, problem: str) -> None:
        """Send on a ticket that is good for nothing: it is a problem where that arrives."""
        rank = process.ranks[0]
        table = _allocate(rank, one.num_tokens)
        transfer = rank.sender.begin_transfer(ticket, one.num_tokens, table, one.num_tokens)
        transfer.commit(_token(one))
        try:
            await transfer.done()
            self.problems.append(problem)
        except TransferFailed as error:
            self.trace(f"{process.name} sends in vain for transfer {one.number}: {error}")
            _free(rank, table)

    async def _flood(self, process: Process, one: TransferPlan) -> None:
        """Offer more than a receiver may keep, none of which anybody expects."""
        rank, target = process.ranks[0], self.processes[one.target]
        table = _allocate(rank, 1)
        floods: list[OutgoingTransfer] = []
        for number in range(MAX_PENDING_OFFERS + 3):
            ticket = mint_ticket(
                SECRET,
                f"flood {number}",
                process.peer,
                target.peer,
                target.addresses,
                **cuts_of(process, target),
            )
            floods.append(rank.sender.begin_transfer(ticket, 1, table, 1))
        await asyncio.sleep(one.source_act_after_s)
        self.check_offers()
        for flood in floods:
            flood.abort("enough")
        for flood in floods:
            with contextlib.suppress(TransferFailed):
                await flood.done()
        _free(rank, table)

    async def _forge(self, one: TransferPlan, ticket: Ticket) -> None:
        """Let another worker send on a ticket that nobody has signed for it."""
        forger = next(other for other in self.processes if other.number not in (one.source, one.target))
        if not forger.is_dead:
            shape = cuts_of(forger, self.processes[one.target])
            forged = replace(ticket, source=forger.peer, mac=bytes(16), **shape)
            problem = f"a forged ticket was good for transfer {one.number}"
            forger.spawn(self._send_in_vain(forger, one, forged, problem), f"forger of transfer {one.number}")
            await asyncio.sleep(one.source_act_after_s)

    async def receive(self, process: Process, one: TransferPlan, ticket: Ticket, truth: Array) -> str:
        """Receive as a worker does that expects KV."""
        if one.target_act == "never expect":
            return "never expected"
        if one.target_act == "refuse":
            for rank in process.ranks:
                rank.receiver.refuse_offer(ticket)
            return "refused"
        if one.target_act in ("wait for the offer", "wait for room") and not await self._offered(process, one, ticket):
            for rank in process.ranks:
                rank.receiver.refuse_offer(ticket)
            return "no offer"
        if one.target_act == "wait for room":
            for rank in process.ranks:
                rank.receiver.keep_offer(ticket)
            await asyncio.sleep(one.room_s)
        num_tokens = one.num_tokens + (one.target_act == "other size")
        skip = min(one.num_skip_tokens, one.num_tokens) if one.target_act != "other size" else 0
        tables = [_allocate(rank, num_tokens) for rank in process.ranks]
        for rank, table in zip(process.ranks, tables, strict=True):
            _write(rank, table, truth, 0, skip)
            rank.store.protected.update(_whole_blocks(rank.store, table, skip, num_tokens))
        transfers = [
            rank.receiver.expect_transfer(ticket, table, num_tokens, skip)
            for rank, table in zip(process.ranks, tables, strict=True)
        ]
        if one.target_act == "expect twice":
            self._expect_twice(process, one, ticket)
        self.open[one.number, "target"] = Side(process, ticket, transfers)
        outcome = await self._await(process, one, ticket, transfers)
        if outcome == "verified" and num_tokens == one.num_tokens:
            self._check_bytes(process, one, truth, tables, "when it is verified")
            await asyncio.sleep(one.hold_s)
            self._check_bytes(process, one, truth, tables, "some time after")
        for rank, table in zip(process.ranks, tables, strict=True):
            rank.store.protected.difference_update(table)
            _free(rank, table)
        return outcome

    async def _offered(self, process: Process, one: TransferPlan, ticket: Ticket) -> bool:
        """Return whether the offer comes, to all ranks, within the time that a worker waits for it."""
        clock = asyncio.get_running_loop().time
        until = clock() + PROGRESS_S
        while not all(rank.receiver.has_offer(ticket) for rank in process.ranks):
            if clock() > until:
                return False
            await asyncio.sleep(0.005)
        return True

    async def _await(
        self, process: Process, one: TransferPlan, ticket: Ticket, transfers: list[IncomingTransfer]
    ) -> str:
        """Wait for the end on all ranks; all blocks may be freed afterwards, unless everything is verified."""
        if one.target_act == "abort":
            asyncio.get_running_loop().call_later(one.target_act_after_s, _abort_all, transfers, "the target gives up")
        if one.target_act == "cancel":
            await asyncio.sleep(one.target_act_after_s)
            for transfer in transfers:
                await transfer.cancel()
        outcome = "verified"
        for transfer in transfers:
            try:
                token = await transfer.verified()
            except TransferFailed as error:
                self.trace(f"target of transfer {one.number} fails: {error}")
                outcome = "failed"
                for other in transfers:
                    other.abort("another rank's transfer has failed")
                continue
            if token != _token(one):
                self.problems.append(f"transfer {one.number} brings {token} in place of {_token(one)}")
            if ticket.target != process.peer:
                self.problems.append(f"{process.name} verified transfer {one.number}, which is {ticket.target}'s")
            if one.source_act == "open stale" or one.target_act in ("expect stale", "other size"):
                self.problems.append(
                    f"transfer {one.number} was verified, of which the source is to {one.source_act} and the target "
                    f"to {one.target_act}"
                )
        return outcome

    def _expect_twice(self, process: Process, one: TransferPlan, ticket: Ticket) -> None:
        """Use a ticket for a second transfer, which must fail at once."""
        rank = process.ranks[0]
        table = _allocate(rank, one.num_tokens)
        if not rank.receiver.expect_transfer(ticket, table, one.num_tokens, 0).ended:
            self.problems.append(f"the ticket of transfer {one.number} was good for two")
        _free(rank, table)

    def _check_bytes(
        self, process: Process, one: TransferPlan, truth: Array, tables: list[list[int]], when: str
    ) -> None:
        for rank, table in zip(process.ranks, tables, strict=True):
            heads, layout = _heads(rank.store), rank.store.layout
            here = [at for at in range(one.num_tokens) if at % layout.block_size in layout.tokens_of(rank.store.rank)]
            for layer in _layers(rank.store):
                found = rank.store.values(layer, table, one.num_tokens)
                if not np.array_equal(found[here], truth[layer, here, :, heads]):
                    self.problems.append(f"layer {layer} of transfer {one.number} is wrong {when}")

    def check_offers(self) -> None:
        """No receiver keeps more offers than it may."""
        for process in self.processes:
            for rank in process.ranks:
                waiting = sum(rank.receiver.offered_tokens(transfer_id) is not None for transfer_id in self.known_ids)
                if waiting > MAX_PENDING_OFFERS:
                    self.problems.append(f"{process.name} keeps {waiting} offers")


def _abort_all(transfers: Sequence[OutgoingTransfer | IncomingTransfer], reason: str) -> None:
    for transfer in transfers:
        transfer.abort(reason)


def _token(one: TransferPlan) -> SampledToken | None:
    return SampledToken(1000 + one.number) if one.has_token else None


def cuts_of(source: Process, target: Process) -> dict[str, RankCut]:
    """Return a ticket's cuts of both workers' ranks."""
    return {"source_cut": source.ranks[0].store.layout.cut, "target_cut": target.ranks[0].store.layout.cut}


def _layers(store: FakeStore) -> range:
    return store.layout.layers_of(store.rank)


def _heads(store: FakeStore) -> slice:
    first = store.layout.first_head(store.rank)
    return slice(first, first + store.layout.heads_per_rank)


def _allocate(rank: Parts, num_tokens: int) -> list[int]:
    return rank.pool.allocate(-(-num_tokens // rank.store.layout.block_size))


def _free(rank: Parts, table: list[int]) -> None:
    """Give blocks back. What a pull link reads there from now on is garbage."""
    rank.store.spoil(table)
    rank.pool.release(table)


def _write(rank: Parts, table: list[int], truth: Array, start: int, end: int, layer: int | None = None) -> None:
    """Put the true KV of some tokens into blocks, in one layer or all."""
    if start < end:
        for at in _layers(rank.store) if layer is None else (layer,):
            rank.store.write_values(at, table, start, truth[at, start:end, :, _heads(rank.store)])


def _whole_blocks(store: FakeStore, table: list[int], skip: int, num_tokens: int) -> list[int]:
    """The blocks that only hold skipped tokens: perhaps others', too."""
    return table if skip == num_tokens else table[: skip // store.layout.block_size]
