"""A control connection under a lease: silence is broken by pings, and too long a silence ends it."""

from protocol.clock import Clock
from protocol.errors import ConnectionLost
from protocol.messages import Message, Ping
from protocol.network import Connection
from protocol.silence import Silence


class LeasedConnection:
    """One side's view of a transfer control connection."""

    def __init__(self, connection: Connection, clock: Clock, lease_s: float):
        self._connection = connection
        self._clock = clock
        self._lease_s = lease_s
        self._said = clock()
        self._silence = Silence(clock, lease_s)

    def post(self, message: Message) -> None:
        """Send `message`, if the connection still stands; never waits.

        A lost connection is no error here: its reader notices, and ends every transfer on it.
        """
        try:
            self._connection.send(message)
        except ConnectionLost:
            return
        self._said = self._clock()

    async def drain(self) -> None:
        """Wait until the peer keeps up with what was posted. Raises ConnectionLost."""
        await self._connection.drain()

    async def receive(self) -> Message:
        """The next message. Raises ConnectionLost."""
        message = await self._connection.receive()
        self._silence.end()
        return message

    async def watch(self) -> None:
        """Ping where we have been silent for a third of a lease. Raises ConnectionLost after a lease of the peer's."""
        while True:
            if self._silence.is_too_long:
                raise ConnectionLost(f"the peer was silent for {self._silence.length_s:.1f} s: its lease has ended")
            now = self._clock()
            if now - self._said >= self._lease_s / 3:
                self.post(Ping())
                self._said = now
            until_ping_s = self._said + self._lease_s / 3 - now
            await self._silence.pause(max(min(until_ping_s, self._lease_s - self._silence.length_s), 0.001))
