"""A worker without an engine, in a process of its own: a KVSender, a KVReceiver and a store of patterns.

Commands come and reports go as lines of JSON over a socket. Every command is answered by a report with its number.
"""

import asyncio
import dataclasses
import gc
import json
import logging
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec

from tests.faults.census import take_census
from tests.faults.faulty_links import FaultyNetwork, FaultyTransport
from tests.faults.injection import Fault, Faults
from tests.faults.pattern_store import CONFIG, LAYOUT, SECRET, PatternStore, num_blocks_of, token_of
from tests.faults.sabotage import install
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import make_transports
from twostroke.kvtransfer.transports.torch_distributed import TorchDistributedTransport
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Peer, Ticket

JOIN_TIMEOUT_S = 2.0
OPERATION_TIMEOUT_S = 2 * CONFIG.lease_s
Report = dict[str, Any]


class _Errors(logging.Handler):
    """Errors that were logged; there should be none."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class WorkerProcess:
    """Commands of the process. Each public coroutine is one."""

    def __init__(self, control: socket.socket, worker_id: str, epoch: int, transport: str):
        self._control = control
        self._peer = Peer(worker_id, epoch)
        self._store = PatternStore()
        self._held: dict[str, tuple[int, list[int]]] = {}
        self._errors = _Errors()
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {worker_id} %(levelname)s %(message)s", force=True)
        logging.getLogger().addHandler(self._errors)
        self._faults = Faults(self.report, self._store)
        install(self._faults)
        self._network = FaultyNetwork(TcpNetwork(SECRET), self._faults, self._peer)
        # The shared-memory rig has the others too, so that it can fall back.
        config = TransferConfig(transport="auto" if transport == "shm" else transport)
        made = make_transports(config, self._store, join_timeout_s=JOIN_TIMEOUT_S)
        if transport == "torch_distributed":  # what hangs in gloo ends with its operation's time-out
            hasty = TorchDistributedTransport(
                self._store, join_timeout_s=JOIN_TIMEOUT_S, operation_timeout_s=OPERATION_TIMEOUT_S
            )
            made = dataclasses.replace(made, by_name={transport: hasty})
        self._transports = dataclasses.replace(
            made,
            by_name={
                name: FaultyTransport(inner, self._faults, self._network, self._peer)
                for name, inner in made.by_name.items()
            },
        )
        self._sender = self._make_sender()
        self._receiver = KVReceiver(
            peer=self._peer,
            store=self._store,
            network=self._network,
            transports=self._transports,
            config=CONFIG,
            clock=time.monotonic,
            secret=SECRET,
        )

    def report(self, **what: Any) -> None:
        """Complete when it returns, so that a process may be stopped or killed right after it."""
        self._control.sendall(json.dumps(what).encode() + b"\n")

    async def run(self) -> None:
        """Serve commands until the parent is gone."""
        (address,) = await self._receiver.start("127.0.0.1")
        self.report(event="ready", host=address.host, port=address.port)
        async with asyncio.TaskGroup() as tasks:
            async for command in self._commands():
                number, call = command.pop("number"), getattr(self, command.pop("do"))
                tasks.create_task(self._answer(number, call(**command)))

    async def _commands(self) -> AsyncIterator[Report]:
        """Yield commands until the parent is gone. The socket stays a blocking one, for the reports."""
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[bytes] = asyncio.Queue()
        loop.add_reader(self._control, lambda: received.put_nowait(self._control.recv(65536)))
        rest = b""
        while part := await received.get():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield json.loads(line)
        loop.remove_reader(self._control)

    async def _answer(self, number: int, work: Awaitable[Report]) -> None:
        try:
            answer = await work
        except Exception:
            answer = {"error": traceback.format_exc()}
        self.report(event="answer", number=number, **answer)

    # --- transfers ---

    async def send(self, ticket: str, seed: int, num_tokens: int) -> Report:
        """Compute (fill in) a prompt's KV, layer by layer, send it, and free its blocks."""
        block_ids = self._store.take(num_blocks_of(num_tokens))
        self._store.fill(seed, block_ids)
        out = self._sender.begin_transfer(decoded(ticket), num_tokens, block_ids, 0)
        for num_ready in (num_tokens // 2, num_tokens):
            for layer in range(LAYOUT.num_layers):
                out.layer_ready(layer, num_ready)
        out.commit(token_of(seed))
        failure = None
        try:
            await out.done()
        except TransferFailed as failed:
            failure = str(failed)
        self._store.release(block_ids)
        return {"failure": failure, "ended_s": time.monotonic(), "blocks": block_ids}

    async def receive(self, ticket: str, seed: int, num_tokens: int, hold: bool) -> Report:
        """Let a prompt's KV come, look at every byte of it, and free its blocks; where `hold`, `recheck` frees them."""
        block_ids = self._store.take(num_blocks_of(num_tokens))
        incoming = self._receiver.expect_transfer(decoded(ticket), block_ids, num_tokens, 0)
        failure, wrong_bytes = None, 0
        try:
            token = await incoming.verified()
            wrong_bytes = self._store.count_wrong_bytes(seed, block_ids) + (token != token_of(seed))
        except TransferFailed as failed:
            failure = str(failed)
        ended_s = time.monotonic()
        if hold:
            self._held[ticket] = seed, block_ids
        else:
            self._store.release(block_ids)
        return {"failure": failure, "ended_s": ended_s, "blocks": block_ids, "wrong_bytes": wrong_bytes}

    async def recheck(self, ticket: str) -> Report:
        """Look at held blocks again, and free them."""
        seed, block_ids = self._held.pop(ticket)
        wrong_bytes = self._store.count_wrong_bytes(seed, block_ids)
        self._store.release(block_ids)
        return {"wrong_bytes": wrong_bytes}

    # --- faults ---

    async def arm(self, faults: list[dict[str, Any]], via_port: int | None = None) -> Report:
        """Replace what is armed. `via_port`: the next link is joined through the proxy that listens there."""
        self._faults.armed[:] = [Fault(**fault) for fault in faults]
        self._faults.via_port = via_port
        return {}

    async def resume(self) -> Report:
        """Let a fault `wait` go on."""
        self._faults.resume()
        return {}

    # --- looking after ---

    async def census(self) -> Report:
        """Return what this process holds."""
        return {
            "census": {
                **take_census(),
                "counts": {
                    "blocks owned": self._store.num_owned,
                    "outgoing": self._sender.stats.in_flight,
                    "incoming": self._receiver.stats.in_flight,
                },
                "errors": self._errors.lines,
            }
        }

    async def numbers(self) -> Report:
        """A target's counters."""
        return msgspec.structs.asdict(self._receiver.stats)

    async def links(self) -> Report:
        """The transports of this source's links, by target."""
        return {"links": {report.target.worker_id: report.transport for report in self._sender.links()}}

    async def reconnect(self) -> Report:
        """End this source's connections: the next transfers make new ones."""
        await self._sender.close()
        self._sender = self._make_sender()
        return {}

    async def close(self) -> Report:
        """Let go of everything."""
        await self._sender.close()
        await self._receiver.close()
        await self._transports.close()
        return {}

    def _make_sender(self) -> KVSender:
        return KVSender(
            peer=self._peer,
            store=self._store,
            network=self._network,
            transports=self._transports,
            config=CONFIG,
            clock=time.monotonic,
        )


def work(control: socket.socket, worker_id: str, epoch: int, transport: str) -> None:
    """The whole life of a worker's process."""
    gc.freeze()  # a census collects what it makes itself: all that was loaded before takes longer than a lease
    asyncio.run(WorkerProcess(control, worker_id, epoch, transport).run())


def decoded(ticket: str) -> Ticket:
    return msgspec.msgpack.decode(bytes.fromhex(ticket), type=Ticket)
