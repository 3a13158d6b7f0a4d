"""A control connection under a lease: silence is broken by pings, and too long a silence ends it."""

from twostroke.protocol.clock import Clock, Silence
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Message, Ping
from twostroke.protocol.network import Connection


class LeasedConnection:
    """One side's view of a transfer control connection."""

    def __init__(self, connection: Connection, clock: Clock, lease_s: float):
        self._connection = connection
        self._clock = clock
        self._lease_s = lease_s
        self._said = clock()
        self._silence = Silence(clock, lease_s)
        self._num_draining = 0  # calls of `drain`
        self._num_drained = 0

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
        self._num_draining += 1
        try:
            await self._connection.drain()
            self._num_drained += 1
        finally:
            self._num_draining -= 1

    async def receive(self) -> Message:
        """The next message. Raises ConnectionLost."""
        message = await self._connection.receive()
        self._silence.end()
        return message

    async def watch(self) -> None:
        """Ping where we have been silent for a third of a lease.

        Raises ConnectionLost once the peer has said nothing for a lease, or has held up `drain` for one.
        """
        deaf_s = 0.0
        while True:
            if deaf_s >= self._lease_s:
                raise ConnectionLost(f"the peer has taken no message for {deaf_s:.1f} s: its lease has ended")
            if self._silence.is_too_long:
                raise ConnectionLost(f"the peer was silent for {self._silence.length_s:.1f} s: its lease has ended")
            now = self._clock()
            if now - self._said >= self._lease_s / 3:
                self.post(Ping())
                self._said = now
            until_ping_s = self._said + self._lease_s / 3 - now
            pause_s = max(min(until_ping_s, self._lease_s - self._silence.length_s), 0.001)
            was_draining, num_drained = self._num_draining > 0, self._num_drained
            await self._silence.pause(pause_s)
            is_deaf = was_draining and self._num_draining > 0 and self._num_drained == num_drained
            deaf_s = deaf_s + pause_s if is_deaf else 0.0
