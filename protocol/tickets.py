"""Permission for one transfer: minted by the router, bound to one request, two workers and their epochs.

The decode worker accepts a transfer only with a ticket it can verify, made out to itself, and not seen before.
"""

import hashlib
import hmac
import secrets

import msgspec

from protocol.errors import EpochMismatch, TicketRefused

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
    """A transfer of one request's KV from `prefill` to `decode`."""

    transfer_id: bytes  # 16 random bytes
    request_id: str
    prefill: Peer
    decode: Peer
    decode_address: Address  # the decode worker's transfer control listener
    mac: bytes = b""


def mint_ticket(secret: bytes, request_id: str, prefill: Peer, decode: Peer, decode_address: Address) -> Ticket:
    """A fresh ticket, signed with the cluster's secret."""
    unsigned = Ticket(secrets.token_bytes(16), request_id, prefill, decode, decode_address)
    return msgspec.structs.replace(unsigned, mac=_mac(secret, unsigned))


def verify_ticket(secret: bytes, ticket: Ticket, *, prefill: Peer, decode: Peer) -> None:
    """Check that `ticket` is genuine and made out to these two incarnations.

    Raises TicketRefused (forged, or other workers) or EpochMismatch (a worker has restarted since).
    """
    unsigned = msgspec.structs.replace(ticket, mac=b"")
    if not hmac.compare_digest(_mac(secret, unsigned), ticket.mac):
        raise TicketRefused("the ticket's signature is wrong")
    for role, named, actual in (("prefill", ticket.prefill, prefill), ("decode", ticket.decode, decode)):
        if named.worker_id != actual.worker_id:
            raise TicketRefused(f"the ticket names {role} worker {named.worker_id}, not {actual.worker_id}")
        if named.epoch != actual.epoch:
            raise EpochMismatch(f"the ticket names epoch {named.epoch:x} of {role} worker {named.worker_id}")


def _mac(secret: bytes, unsigned: Ticket) -> bytes:
    return hmac.digest(secret, b"ticket" + msgspec.msgpack.encode(unsigned), hashlib.sha256)[:MAC_BYTES]
