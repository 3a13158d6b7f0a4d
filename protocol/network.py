"""The network as a constructor argument: live TCP (`tcp_network.py`), or memory on virtual time (tests/simulation)."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from twostroke.protocol.messages import Message
from twostroke.protocol.tickets import Address


class Connection(Protocol):
    """An ordered, authenticated stream of messages. A broken one raises ConnectionLost from then on."""

    @property
    def unsent_bytes(self) -> int:
        """What `send` has accepted and the peer's side has not yet taken."""

    def send(self, message: Message) -> None:
        """Queue `message` behind those before it; never waits. Raises ConnectionLost."""

    async def drain(self) -> None:
        """Wait until the unsent bytes are below the high-water mark. Raises ConnectionLost."""

    async def receive(self) -> Message:
        """The next message. Raises ConnectionLost when the peer is gone, ProtocolError when it misbehaves."""

    async def close(self) -> None:
        """End the connection; a `receive` that waits raises ConnectionLost. May be called more than once."""


Handler = Callable[[Connection], Awaitable[None]]


class Listener(Protocol):
    """Accepts connections until closed."""

    @property
    def address(self) -> Address:
        """Where peers can reach it (the port is the one really bound)."""

    async def close(self) -> None:
        """Stop accepting, and cancel the handlers of open connections and wait for them."""


class Network(Protocol):
    """Makes connections."""

    async def connect(self, address: Address) -> Connection:
        """Raises ConnectionLost where nobody listens, or the peer does not share our secret."""

    async def listen(self, host: str, handler: Handler) -> Listener:
        """Listen on a free port of `host`; each connection runs `handler`, and is closed when it returns."""
