"""Permission for one transfer: minted by the router, bound to one request, two workers and their epochs.

The worker that receives KV accepts it only with a ticket it can verify, made out to itself, and not seen before. KV
goes from prefill to decode workers, and back, or between prefill workers, where a prefix is pulled.
"""

import hashlib
import hmac
import secrets

import msgspec

from twostroke.protocol.errors import EpochMismatch, TicketRefused

MAC_BYTES = 16


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a process listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """One incarnation of a worker."""

    worker_id: str
    epoch: int


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A transfer of one request's KV from `source` to `target`."""

    transfer_id: bytes  # 16 random bytes
    request_id: str
    source: Peer
    target: Peer
    target_addresses: tuple[Address, ...]  # the target's transfer control listeners, one for each of its ranks
    source_ranks: int = 1
    mac: bytes = b""


def mint_ticket(
    secret: bytes,
    request_id: str,
    source: Peer,
    target: Peer,
    target_addresses: tuple[Address, ...],
    *,
    source_ranks: int = 1,
) -> Ticket:
    """A fresh ticket, signed with the cluster's secret."""
    unsigned = Ticket(secrets.token_bytes(16), request_id, source, target, target_addresses, source_ranks)
    return msgspec.structs.replace(unsigned, mac=_mac(secret, unsigned))


def verify_ticket(secret: bytes, ticket: Ticket, *, source: Peer, target: Peer) -> None:
    """Check that `ticket` is genuine and made out to these two incarnations.

    Raises TicketRefused (forged, or other workers) or EpochMismatch (a worker has restarted since).
    """
    unsigned = msgspec.structs.replace(ticket, mac=b"")
    if not hmac.compare_digest(_mac(secret, unsigned), ticket.mac):
        raise TicketRefused("the ticket's signature is wrong")
    for role, named, actual in (("source", ticket.source, source), ("target", ticket.target, target)):
        if named.worker_id != actual.worker_id:
            raise TicketRefused(f"the ticket's {role} is {named.worker_id}, not {actual.worker_id}")
        if named.epoch != actual.epoch:
            raise EpochMismatch(f"the ticket's {role} is {named.worker_id} in its epoch {named.epoch:x}")


def _mac(secret: bytes, unsigned: Ticket) -> bytes:
    return hmac.digest(secret, b"ticket" + msgspec.msgpack.encode(unsigned), hashlib.sha256)[:MAC_BYTES]
