"""Every message on our own sockets, and their one encoding: typed msgpack arrays that begin with the type's tag.

Two kinds of connection exist. The token channel joins a router replica to a worker. The transfer control connection
joins a prefill worker (sender) to a decode worker (receiver); the KV bytes themselves go over a data link beside it.
Both begin with Hello from the connecting side and Welcome (or Refuse) from the listening side.

msgspec is used because it checks every field's type while decoding and is faster than a generic unpacker.
"""

import msgspec

from protocol.errors import ProtocolError
from protocol.requests import SampledToken, TokenEvent
from protocol.stats import WorkerStats
from protocol.tickets import Peer, Ticket


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: an array whose first element is the class's name."""


# --- both kinds of connection ---


class Hello(_Message, frozen=True):
    """Who connects, and whom it believes to reach."""

    sender: Peer
    receiver: Peer
    fingerprint: str = ""  # of the KV layout; empty on a token channel
    transport: str = ""  # the data link wanted; empty on a token channel


class Welcome(_Message, frozen=True):
    """The connection is accepted. `link` tells how to join the data link (transport's own words)."""

    receiver: Peer
    link: dict[str, str | int] = {}  # msgspec copies a mutable default


class Refuse(_Message, frozen=True):
    """The connection is refused; the listener closes it after this."""

    reason: str


class Ping(_Message, frozen=True):
    """Proof of life: each side sends one where it has been silent for a third of a lease."""


# --- token channel ---


class TokenFrame(_Message, frozen=True):
    """Worker to router: all that one engine step produced for that router's requests."""

    events: tuple[TokenEvent, ...]


class StatsFrame(_Message, frozen=True):
    """Worker to router: its numbers, now and then."""

    stats: WorkerStats


class Cancel(_Message, frozen=True):
    """Router to worker: forget the request, free its blocks. Unknown ids are ignored."""

    request_id: str


class PrefillFailed(_Message, frozen=True):
    """Router to decode worker: no KV will come for this request; compute it yourself."""

    request_id: str


# --- transfer control, prefill worker to decode worker ---


class Offer(_Message, frozen=True):
    """KV of `num_tokens` tokens is being computed; may it come?"""

    ticket: Ticket
    num_tokens: int


class Chunk(_Message, frozen=True):
    """`num_bytes` follow on the data link: consecutive blocks of one layer."""

    transfer_id: bytes
    sequence: int  # 0, 1, 2, ... within the transfer
    layer: int
    first_block: int  # index into the request's block table, not a pool's block id
    num_blocks: int
    num_bytes: int
    digest: bytes  # xxh3-128 of the bytes


class Commit(_Message, frozen=True):
    """All chunks are out, and this is the first token."""

    transfer_id: bytes
    num_chunks: int
    first_token: SampledToken


# --- transfer control, decode worker to prefill worker ---


class Grant(_Message, frozen=True):
    """Blocks are reserved. The first `skip_blocks` are there already: don't send them."""

    transfer_id: bytes
    skip_blocks: int


class Verified(_Message, frozen=True):
    """Every byte arrived and its digest holds: the sender may let go of its blocks."""

    transfer_id: bytes


# --- transfer control, either way ---


class Abort(_Message, frozen=True):
    """The transfer is over, without success. Legal in every state."""

    transfer_id: bytes
    reason: str


Message = (
    Hello
    | Welcome
    | Refuse
    | Ping
    | TokenFrame
    | StatsFrame
    | Cancel
    | PrefillFailed
    | Offer
    | Chunk
    | Commit
    | Grant
    | Verified
    | Abort
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """The message's bytes, without a frame around them."""
    return _encoder.encode(message)


def decode_message(payload: bytes | memoryview) -> Message:
    """The message in `payload`. Raises ProtocolError for anything that is not exactly one known message."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from error
