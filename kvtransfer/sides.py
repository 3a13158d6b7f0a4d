"""Both sides of KV transfer as workers use them: one rank's (sender.py, receiver.py), or several' (ranked_*.py)."""

from collections.abc import Callable, Sequence
from typing import Protocol

from twostroke.kvtransfer.sender_connection import LinkReport
from twostroke.kvtransfer.stats import TransferStats
from twostroke.protocol.requests import Address, SampledToken, Ticket


class Outgoing(Protocol):
    """As OutgoingTransfer, which documents these."""

    def layer_ready(self, layer: int, num_tokens: int) -> None: ...

    def commit(self, first_token: SampledToken | None) -> None: ...

    def abort(self, reason: str) -> None: ...

    async def done(self) -> None: ...


class SendingSide(Protocol):
    """As KVSender, which documents these."""

    @property
    def stats(self) -> TransferStats: ...

    def open(self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int) -> Outgoing: ...

    def decline(self, ticket: Ticket, reason: str) -> None: ...

    def links(self) -> tuple[LinkReport, ...]: ...

    async def close(self) -> None: ...


class Incoming(Protocol):
    """As IncomingTransfer, which documents these."""

    async def verified(self) -> SampledToken | None: ...

    async def cancel(self) -> None: ...

    def abort(self, reason: str) -> None: ...


class ReceivingSide(Protocol):
    """As KVReceiver, which documents these."""

    on_offer: Callable[[bytes], None]

    @property
    def stats(self) -> TransferStats: ...

    async def start(self, host: str) -> tuple[Address, ...]:
        """Listen for sources on `host`; one address for each rank of the worker. Raises ConnectionLost."""

    def has_offer(self, ticket: Ticket) -> bool: ...

    def offered_tokens(self, transfer_id: bytes) -> int | None: ...

    def expect(self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int) -> Incoming: ...

    def keep(self, ticket: Ticket) -> None: ...

    def refuse(self, ticket: Ticket) -> None: ...

    async def close(self) -> None: ...
