"""Both sides of KV transfer as workers use them, and what they count and report.

One rank's are in sender.py and receiver.py, which document the calls; those of a worker of several ranks in ranks.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket


@dataclass(slots=True)
class TransferStats:
    """Counters of one worker's side; they only grow, but for `in_flight`."""

    in_flight: int = 0  # transfers that have not ended
    done: int = 0  # verified
    failed: int = 0  # ended otherwise, given up ones included
    given_up: int = 0  # of the failed, those not wanted any more, on this side or by the peer's word
    digest_failures: int = 0  # chunks whose bytes did not match their digest (receiver only)
    links_lost: int = 0  # data links that broke, or could not be joined, while their connection stood (sender only)
    bytes: int = 0  # of KV on the wire, sent or received
    seconds: float = 0.0  # summed over the verified ones, from open or expect to verified

    def end(self, failure: str | None, seconds: float, *, is_given_up: bool) -> None:
        """A transfer has ended after so many seconds."""
        self.in_flight -= 1
        if failure is None:
            self.done += 1
            self.seconds += seconds
        else:
            self.failed += 1
            self.given_up += is_given_up


@dataclass(frozen=True, slots=True)
class LinkReport:
    """How this rank sends to one rank of another worker."""

    target: Peer
    rank: int  # of the target
    transport: str
    why: str  # this transport, in words for people
    missing: tuple[str, ...]  # for each better transport: what it would need


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
