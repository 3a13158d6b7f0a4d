"""A network whose connections pass a point of `injection` before and after each message."""

from injection import Faults

from tests.rigs.delegate import Delegate
from twostroke.kvtransfer.link import chunk_seal
from twostroke.protocol.messages import Chunk, Hello, Message, Offer, Welcome
from twostroke.protocol.network import Connection, Handler, Listener, Network
from twostroke.protocol.requests import Address, Peer


class FaultyNetwork:
    """A Network whose connections pass the points of their messages."""

    def __init__(self, inner: Network, faults: Faults, own: Peer):
        self._inner = inner
        self._faults = faults
        self._own = own
        self.chunks: dict[int, tuple[Chunk, Peer]] = {}  # sent to whom, by their seals

    async def connect(self, address: Address) -> Connection:
        return FaultyConnection(await self._inner.connect(address), self._faults, self, self._own)

    async def listen(self, host: str, handler: Handler) -> Listener:
        async def handle(connection: Connection) -> None:
            await handler(FaultyConnection(connection, self._faults, self, self._own))

        return await self._inner.listen(host, handle)


class FaultyConnection(Delegate):
    """A Connection that passes a point before and after each message."""

    def __init__(self, inner: Connection, faults: Faults, network: FaultyNetwork, own: Peer):
        super().__init__(inner)
        self._faults = faults
        self._network = network
        self._own = own
        self._other = Peer("", 0)

    def send(self, message: Message) -> None:
        kind, transfer_id = type(message).__name__, transfer_of(message)
        if isinstance(message, Hello):
            self._other = message.receiver
        elif isinstance(message, Chunk):
            self._network.chunks[chunk_seal(message, self._own, self._other)] = message, self._other
        fault = self._faults.due(f"before send {kind}", transfer_id)
        if fault is not None and fault.action == "drop":
            return
        self._inner.send(message)
        if fault is not None and fault.action == "repeat":
            self._inner.send(message)
        self._faults.due(f"after send {kind}", transfer_id)

    async def receive(self) -> Message:
        while True:
            message = await self._inner.receive()
            fault = self._faults.due(f"received {type(message).__name__}", transfer_of(message))
            if fault is None or fault.action != "drop":
                return message


def transfer_of(message: Message) -> bytes | None:
    if isinstance(message, Offer):
        return message.ticket.transfer_id
    if isinstance(message, Hello | Welcome):
        return None
    transfer_id = getattr(message, "transfer_id", None)
    return transfer_id if isinstance(transfer_id, bytes) else None
