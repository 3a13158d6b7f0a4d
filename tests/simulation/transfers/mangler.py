"""Processes that misbehave on their control connections: messages lost, repeated, out of order, or wrong.

An altered chunk's bytes don't fit its seed. A source that lies is worse: it seals what it says, so that only the
target's own checks stand between the lie and the blocks. It only says what a target can know to be wrong.

Every message of a simulation passes here, so this is also where it is noticed that a side grants a rank pair twice.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from twostroke.kvtransfer.link import chunk_seed
from twostroke.protocol.messages import (
    Abort,
    Awaited,
    Chunk,
    Commit,
    Grant,
    Hello,
    Message,
    Offer,
    Run,
    Verified,
    Welcome,
)
from twostroke.protocol.requests import Peer, Ticket
from twostroke.simulator.memory_network import MemoryConnection
from twostroke.simulator.memory_transport import LinkFabric

FROM_TARGETS = (Welcome, Grant, Verified)
_LIKELY: tuple[type[Message], ...] = (Offer, Chunk, Chunk, Chunk, Commit, Commit, Grant, Grant, Verified)
_RARE: tuple[type[Message], ...] = (Hello, Welcome, Abort, Awaited)


@dataclass
class _Order:
    """Order to mangle some of the next messages of one type."""

    kind: str
    victim: type[Message]
    times: int
    draw: random.Random


@dataclass(frozen=True)
class _Held:
    """A message that waits for the next one of its connection."""

    message: Message
    order: _Order | None  # to forget a transfer's last chunk, where this is it; None: the next one goes first


class Mangler:
    """A fabric's `mangle`. Counts what it has done by (kind, message type)."""

    def __init__(self, links: LinkFabric, transports: tuple[str, ...]) -> None:
        self._links = links
        self._transports = transports
        self.fired: Counter[tuple[str, str]] = Counter()
        self.violations: list[str] = []
        self.targets_lie = False  # a message of a receiving side was among the victims
        self._orders: list[_Order] = []
        self._held: dict[MemoryConnection, _Held] = {}
        self.known_ids: dict[bytes, None] = {}
        self.granted: set[tuple[MemoryConnection, bytes]] = set()
        self._ends: dict[MemoryConnection, tuple[Peer, Peer]] = {}  # source and target, by the source's end
        self._unwanted: dict[MemoryConnection, tuple[str, ...]] = {}  # transports, by the target's end
        self._announced: dict[tuple[MemoryConnection, bytes], dict[int, tuple[Run, ...]]] = {}  # by sequence

    def order(self, kind: str, which: int, times: int) -> None:
        """Mangle from now on, until it has been done `times` times."""
        draw = random.Random(which)
        victim: type[Message] = draw.choice(_LIKELY if draw.random() < 0.8 else _RARE)
        if kind == "lie in messages":
            victim = draw.choice((Chunk, Chunk, Grant, Commit))
        self._orders.append(_Order(kind, victim, times, draw))

    def __call__(self, connection: MemoryConnection, message: Message) -> Sequence[Message]:
        self._look_at(connection, message)
        if not self._orders and not self._held:
            return (message,)
        held = self._held.pop(connection, None)
        return self._mangle(connection, message) if held is None else self._release(held, connection, message)

    def _look_at(self, connection: MemoryConnection, message: Message) -> None:
        if isinstance(message, Hello):
            self._ends[connection] = message.sender, message.receiver
            if message.kv is not None:
                self._unwanted[connection.peer] = message.kv.without
        elif isinstance(message, Offer):
            self.known_ids[message.ticket.transfer_id] = None
        elif isinstance(message, Welcome) and message.kv is not None:
            unwanted = self._unwanted.pop(connection, ())
            if message.kv.transport in unwanted and set(self._transports) > set(unwanted):
                self.violations.append(f"{connection.host} prepares {message.kv.transport}, which was to be avoided")
        elif isinstance(message, Chunk):
            rank_pair = connection, message.transfer_id
            self._announced.setdefault(rank_pair, {})[message.sequence] = message.runs
        elif isinstance(message, Grant):
            rank_pair = connection, message.transfer_id
            if rank_pair in self.granted:
                self.violations.append(f"{connection.host} grants a rank pair to {connection.peer_host} twice")
            self.granted.add(rank_pair)

    def _release(self, held: _Held, connection: MemoryConnection, message: Message) -> Sequence[Message]:
        if held.order is None:
            return (message, held.message)
        if isinstance(held.message, Chunk) and held.order.times > 0:
            if isinstance(message, Chunk):
                self._held[connection] = _Held(message, held.order)
                return (held.message,)
            if isinstance(message, Commit) and held.message.transfer_id == message.transfer_id:
                self._finish(held.order)
                self.fired[held.order.kind, "Commit"] += 1
                return (replace(message, num_chunks=message.num_chunks - 1),)  # and never a word of its last chunk
        return (held.message, message)

    def _mangle(self, connection: MemoryConnection, message: Message) -> Sequence[Message]:
        for order in self._orders:
            if order.kind == "lie in messages" and order.victim is Commit:
                if isinstance(message, Chunk):
                    self._held[connection] = _Held(message, order)
                    return ()
                continue
            if type(message) is not order.victim or order.draw.random() < 0.4:
                continue
            if order.kind == "lie in messages":
                lie = self._lie(order, connection, message)
                if lie is None:
                    continue
                self._finish(order)
                self.fired[order.kind, type(message).__name__] += 1
                return (lie,)
            self._finish(order)
            self.fired[order.kind, type(message).__name__] += 1
            self.targets_lie |= isinstance(message, FROM_TARGETS)
            if order.kind == "swap messages":
                self._held[connection] = _Held(message, None)
                return ()
            if order.kind == "drop messages":
                return ()
            if order.kind == "repeat messages":
                return (message, message) if order.draw.random() < 0.7 else (message,) * 3
            return (self._alter(order.draw, message),)
        return (message,)

    def _finish(self, order: _Order) -> None:
        order.times -= 1
        if order.times == 0:
            self._orders.remove(order)

    def _lie(self, order: _Order, connection: MemoryConnection, message: Message) -> Message | None:
        """Return a lie that makes a source send what it must not; None where there is nothing to lie about."""
        if isinstance(message, Grant):
            return replace(message, skip_tokens=0) if message.skip_tokens else None
        return self._lie_about(order, connection, message) if isinstance(message, Chunk) else None

    def _lie_about(self, order: _Order, connection: MemoryConnection, chunk: Chunk) -> Chunk | None:
        """Other units than those that are sent."""
        earlier = [
            run
            for sequence, runs in self._announced[connection, chunk.transfer_id].items()
            for run in runs
            if sequence < chunk.sequence
        ]
        count = sum(run.num_units for run in chunk.runs)
        runs = tuple(replace(run, num_units=1) for run in order.draw.choices(earlier, k=count)) if earlier else ()
        if not runs or order.draw.random() < 0.4:
            wrong = order.draw.choice(
                (Run(0, 10**6, count), Run(99, 0, count), Run(-1, 0, count), Run(0, -count, count))
            )
            runs = (wrong,)
        lie = replace(chunk, runs=runs)
        ends = self._ends[connection]
        self._links.resealed[chunk_seed(chunk, *ends)] = chunk_seed(lie, *ends)
        return lie

    def _alter(self, draw: random.Random, message: Message) -> Message:
        other_id = draw.choice([*self.known_ids, bytes(16)])
        match message:
            case Offer():
                return draw.choice(_OFFERS)(draw, message)
            case Chunk():
                if draw.random() < 0.1:
                    return replace(message, transfer_id=other_id)
                return draw.choice(_CHUNKS)(draw, message)
            case Commit():
                return replace(message, num_chunks=max(0, message.num_chunks + draw.choice((-1, 1, 1000))))
            case Grant():
                return replace(message, skip_tokens=draw.choice((0, 0, 1, message.skip_tokens + 1, 10**6, -1)))
            case Hello():
                return draw.choice(_HELLOS)(draw, message)
            case Welcome():
                return draw.choice(_WELCOMES)(draw, message)
            case Verified() | Abort() | Awaited():
                return replace(message, transfer_id=other_id)
        return message


def _other_epoch(peer: Peer) -> Peer:
    return Peer(peer.worker_id, peer.epoch ^ 1)


def _altered_ticket(draw: random.Random, ticket: Ticket) -> Ticket:
    return draw.choice(
        (
            replace(ticket, mac=bytes(16)),
            replace(ticket, source=_other_epoch(ticket.source)),
            replace(ticket, target=_other_epoch(ticket.target)),
            replace(ticket, request_id="another"),
            replace(ticket, source_cut=replace(ticket.source_cut, ranks=ticket.source_cut.ranks + 1)),
            replace(ticket, source_cut=replace(ticket.source_cut, stages=ticket.source_cut.stages + 1)),
        )
    )


_OFFERS: tuple[Callable[[random.Random, Offer], Offer], ...] = (
    lambda draw, offer: replace(offer, ticket=_altered_ticket(draw, offer.ticket)),
    lambda draw, offer: replace(offer, num_tokens=draw.choice((0, 1, offer.num_tokens + 1, 10**9))),
)


def _altered_runs(draw: random.Random, runs: tuple[Run, ...]) -> tuple[Run, ...]:
    if not runs:
        return (Run(0, 0, 1),)
    at = draw.randrange(len(runs))
    run = runs[at]
    wrong: Run = draw.choice(
        (
            replace(run, layer=run.layer + draw.choice((-1, 1, 99))),
            replace(run, first_unit=0),
            replace(run, first_unit=run.first_unit + draw.choice((-1, 1, 1, 2, 10**6))),
            replace(run, num_units=run.num_units + draw.choice((-1, 1, 2, 10**6))),
        )
    )
    others = (*runs[:at], wrong, *runs[at + 1 :])
    return draw.choice((others, others, (*runs, run), runs[:at]))


_CHUNKS: tuple[Callable[[random.Random, Chunk], Chunk], ...] = (
    lambda draw, chunk: replace(chunk, sequence=chunk.sequence + draw.choice((-1, 1, 100))),
    lambda draw, chunk: replace(chunk, num_bytes=draw.choice((0, chunk.num_bytes + 1, chunk.num_bytes * 2, 2**60))),
    lambda draw, chunk: replace(chunk, runs=_altered_runs(draw, chunk.runs)),
    lambda draw, chunk: replace(chunk, runs=_altered_runs(draw, chunk.runs)),
    lambda draw, chunk: replace(chunk, runs=_altered_runs(draw, chunk.runs)),
)


def _altered_hello(draw: random.Random, hello: Hello) -> Hello:
    if hello.kv is None:
        return hello
    kv = hello.kv
    layout = draw.choice(
        (
            replace(kv.layout, block_size=kv.layout.block_size * 2),
            replace(kv.layout, num_layers=kv.layout.num_layers + 1),
            replace(kv.layout, tp_size=0),
            replace(kv.layout, pp_size=kv.layout.pp_size + 1),
            replace(kv.layout, dtype="float99"),
        )
    )
    kv = draw.choice((replace(kv, layout=layout), replace(kv, rank=kv.rank + 1), replace(kv, encoding="fp8")))
    return replace(hello, kv=kv)


_HELLOS: tuple[Callable[[random.Random, Hello], Hello], ...] = (
    lambda draw, hello: replace(hello, sender=_other_epoch(hello.sender)),
    lambda draw, hello: replace(hello, receiver=_other_epoch(hello.receiver)),
    lambda draw, hello: replace(hello, kv=None),
    _altered_hello,
)


def _altered_welcome(draw: random.Random, welcome: Welcome) -> Welcome:
    if welcome.kv is None:
        return welcome
    kv = welcome.kv
    return replace(
        welcome,
        kv=draw.choice(
            (
                replace(kv, layout=replace(kv.layout, block_size=kv.layout.block_size * 2)),
                replace(kv, rank=kv.rank + 1),
                replace(kv, transport="carrier pigeon"),
                replace(kv, link={"token": 10**9}),
            )
        ),
    )


_WELCOMES: tuple[Callable[[random.Random, Welcome], Welcome], ...] = (
    lambda draw, welcome: replace(welcome, receiver=_other_epoch(welcome.receiver)),
    lambda draw, welcome: replace(welcome, kv=None),
    _altered_welcome,
)
