"""A router's turn to have suspects computed at one worker, which other routers may want, too (protocol/turns.py)."""

import asyncio
from collections.abc import Callable

from twostroke.protocol.messages import AskTurn, EndTurn


class WorkerTurn:
    """Of one channel. `send` sends on it."""

    def __init__(self, send: Callable[[AskTurn | EndTurn], None]):
        self._send = send
        self._number = 0
        self._given: asyncio.Future[None] | None = None  # there is one while a turn is wanted or taken

    async def take(self) -> None:
        """Return when it has come, or the connection has ended. Everybody here shares it, until `end`."""
        if self._given is None:
            self._given = asyncio.get_running_loop().create_future()
            self._number += 1
            self._send(AskTurn(self._number))
        await asyncio.shield(self._given)

    def come(self, number: int) -> None:
        """The worker gives a turn; one that was given up meanwhile counts for nothing."""
        if self._given is not None and number == self._number and not self._given.done():
            self._given.set_result(None)

    def end(self) -> None:
        """Nobody here wants it any more. Harmless where nobody did."""
        if self._given is not None:
            self._forget()
            self._send(EndTurn())

    def lose(self) -> None:
        """The connection has ended, and with it all that this router has there: nobody waits any longer."""
        if self._given is not None:
            self._forget()

    def _forget(self) -> None:
        if self._given is not None and not self._given.done():
            self._given.set_result(None)
        self._given = None
