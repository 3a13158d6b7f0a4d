"""Two sources and two targets in processes of their own, whose transfers are watched while one of them is harmed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.faults.children import LIMIT_S, Child, Nursery, Report, WorkerLost
from tests.faults.pattern_store import SECRET
from twostroke.protocol.requests import Address, Ticket, mint_ticket

NUM_TOKENS = 1000  # 4 layers of 63 blocks, the last one not full: 4 MB, 8 chunks or more
BYSTANDER_TOKENS = 250


@dataclass
class Transfer:
    """One prompt's KV from one child to another. Nothing happens before `begin`."""

    source: Child
    target: Child
    ticket: Ticket
    seed: int
    num_tokens: int
    hold: bool = False
    _sent: asyncio.Task[Report] | None = field(default=None, init=False)
    _received: asyncio.Task[Report] | None = field(default=None, init=False)

    @property
    def transfer_id(self) -> str:
        return self.ticket.transfer_id.hex()

    @property
    def encoded_ticket(self) -> str:
        return msgspec.msgpack.encode(self.ticket).hex()

    def begin(self) -> None:
        arguments: dict[str, Any] = {
            "ticket": self.encoded_ticket,
            "seed": self.seed,
            "num_tokens": self.num_tokens,
        }
        self._received = asyncio.create_task(self.target.call("receive", hold=self.hold, **arguments))
        self._sent = asyncio.create_task(self.source.call("send", **arguments))

    async def sent(self) -> Report:
        """Return how the source saw it end. Raises WorkerLost where it died."""
        assert self._sent is not None
        return await self._sent

    async def received(self) -> Report:
        """Return how the target saw it end, once it has checked every byte. Raises WorkerLost where it died."""
        assert self._received is not None
        return await self._received

    async def is_verified(self) -> None:
        """Both sides see a success, and the target every byte as it should be."""
        sent, received = await asyncio.gather(self.sent(), self.received())
        assert (sent["failure"], received["failure"], received["wrong_bytes"]) == (None, None, 0)

    async def has_failed(self) -> tuple[str, str]:
        """Both sides see a failure; returns their reasons."""
        sent, received = await asyncio.gather(self.sent(), self.received())
        assert sent["failure"]
        assert received["failure"]
        return sent["failure"], received["failure"]

    async def is_forgotten(self) -> None:
        """Let the calls of a dead worker end too."""
        for call in (self._sent, self._received):
            if call is not None:
                with contextlib.suppress(WorkerLost):
                    await call


class Bystanders:
    """Transfers of another pair, one after the other, as long as this runs."""

    def __init__(self, rig: "Rig"):
        self._rig = rig
        self._task = asyncio.create_task(self._run())
        self._one_more = asyncio.Event()

    async def go_on(self) -> None:
        """Wait until the pair has finished a transfer that it began after now."""
        for _ in range(2):
            self._one_more.clear()
            waiting = asyncio.create_task(self._one_more.wait())
            await asyncio.wait([waiting, self._task], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self._task.done():
                self._task.result()
            assert self._one_more.is_set(), "the bystanders' transfers hang"

    async def stop(self) -> None:
        self._rig.stopping.set()
        await self._task

    async def _run(self) -> None:
        self._rig.stopping.clear()
        while not self._rig.stopping.is_set():
            transfer = self._rig.prepare("source-1", "target-1", num_tokens=BYSTANDER_TOKENS)
            transfer.begin()
            await transfer.is_verified()
            self._one_more.set()


class Rig:
    """The processes of one transport. `source-0` and `target-0` are harmed; `source-1` and `target-1` stand by."""

    NAMES = ("source-0", "source-1", "target-0", "target-1")

    def __init__(self, nursery: Nursery, transport: str):
        self.transport = transport
        self.stopping = asyncio.Event()
        self.bystanders: Bystanders
        self._nursery = nursery
        self._children: dict[str, Child] = {}
        self._baselines: dict[int, Report] = {}  # by pid
        self._seed = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, nursery: Nursery, transport: str) -> AsyncIterator["Rig"]:
        rig = cls(nursery, transport)
        try:
            await rig.restore()
            yield rig
        finally:
            for child in rig._children.values():
                await child.end()

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def prepare(
        self,
        source: str,
        target: str,
        *,
        num_tokens: int = NUM_TOKENS,
        hold: bool = False,
        address: Address | None = None,
    ) -> Transfer:
        """A transfer with a fresh ticket; `address`: of a proxy before the target."""
        self._seed += 1
        source_child, target_child = self[source], self[target]
        where = address if address is not None else target_child.address
        ticket = mint_ticket(SECRET, f"r{self._seed}", source_child.peer, target_child.peer, (where,))
        return Transfer(source_child, target_child, ticket, self._seed, num_tokens, hold)

    async def transfer(self, source: str, target: str, **arguments: Any) -> Transfer:
        """A transfer that must go well."""
        made = self.prepare(source, target, **arguments)
        made.begin()
        await made.is_verified()
        return made

    async def arm(self, name: str, at: str, action: str, **details: Any) -> None:
        """Replace what is armed in a child by this one fault."""
        await self[name].call("arm", faults=[{"at": at, "action": action, **details}])

    async def transfer_again(self, source: str, target: str) -> None:
        """A transfer that must go well, where a worker that slept may find a dead connection first."""
        first = self.prepare(source, target)
        first.begin()
        sent, received = await asyncio.gather(first.sent(), first.received())
        if sent["failure"] or received["failure"]:
            await self.transfer(source, target)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """A fault may happen inside. Bystanders go on meanwhile; survivors hold afterwards what they held before."""
        if any(child.is_gone for child in self._children.values()):
            await self.restore()
        self.bystanders = Bystanders(self)
        try:
            await self.bystanders.go_on()
            yield
            await self.bystanders.go_on()
        finally:
            await self.bystanders.stop()
        survivors = [child for child in self._children.values() if not child.is_gone]
        await self.restore()
        for child in survivors:
            try:
                await self._is_as_before(child)
            except AssertionError:
                await child.kill()  # the next test begins with others
                raise

    async def blocks_are_free(self, *names: str) -> None:
        """Wait until no transfer owns a block there."""
        for name in names:
            async with asyncio.timeout(LIMIT_S):
                while (await self[name].call("census"))["census"]["counts"]["blocks owned"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

    async def respawn(self, name: str) -> None:
        """Another incarnation, for one that was killed."""
        await self[name].end()
        self._children[name] = await self._nursery.spawn(name, self.transport)

    async def restore(self) -> None:
        """Spawn who is dead, and warm all four links up. The bystanders must be at rest."""
        for name in self.NAMES:
            if name not in self._children:
                self._children[name] = await self._nursery.spawn(name, self.transport)
            elif self[name].is_gone:
                await self.respawn(name)
            else:  # whatever a failed test has left behind
                self[name].wake()
                await self[name].call("resume")
            await self[name].call("arm", faults=[])
        await self._warm_up()
        for child in self._children.values():
            if child.pid not in self._baselines:
                self._baselines[child.pid] = (await child.call("census"))["census"]

    async def _warm_up(self) -> None:
        """Let all four links stand, on both sides, by the rig's own transport."""
        for source in ("source-0", "source-1"):
            links = (await self[source].call("links"))["links"]
            if any(transport != self.transport for transport in links.values()):
                await self[source].call("reconnect")
            for target in ("target-0", "target-1"):
                await self.transfer_again(source, target)  # the first use of a link may outlast a lease
                await self.transfer(source, target)
            links = (await self[source].call("links"))["links"]
            assert links == dict.fromkeys(("target-0", "target-1"), self.transport)

    async def _is_as_before(self, child: Child) -> None:
        """Wait for ends that nobody reports. What was lost meanwhile, on a machine too busy for a lease, comes back."""
        expected = self._baselines[child.pid]
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            for _ in range(50):
                found = (await child.call("census"))["census"]
                assert not found["errors"], f"{child.peer.worker_id} logged errors"
                if found == expected:
                    return
                await asyncio.sleep(0.02)
            await self._warm_up()
        raise AssertionError(f"{child.peer.worker_id} holds something else: {differences(found, expected)}")


def differences(found: Any, expected: Any) -> Any:
    """The entries in which two censuses differ, as (found, expected)."""
    if not isinstance(found, dict) or not isinstance(expected, dict):
        return found, expected
    keys = sorted(found.keys() | expected.keys())
    return {key: differences(found.get(key), expected.get(key)) for key in keys if found.get(key) != expected.get(key)}
