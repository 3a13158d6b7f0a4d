"""What the ranks of one tensor-parallel worker say to each other, on one connection between rank 0 and each other one.

Rank 0 is the leader: it schedules, draws, and owns the block accounting. The others do as it says, in its order. What
it says after its own step has ended it means to happen after theirs: see StepEnded. Numbers of transfers are its own.
"""

import msgspec

from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket


class _RankMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """As all messages: an array whose first element is the class's name."""


# --- a rank to the leader ---


class RankHello(_RankMessage, frozen=True):
    """The first message: which rank of which worker connects."""

    worker: Peer
    rank: int


class RankLoaded(_RankMessage, frozen=True):
    """Its engine is ready to step, and it listens for KV."""

    transfer_address: Address


class RankFailed(_RankMessage, frozen=True):
    """It could not load, or a step failed: it ends, and the worker with it."""

    reason: str


class TransferCounts(msgspec.Struct, frozen=True, array_like=True):
    """What one side of KV transfer has counted on a rank so far: as TransferStats."""

    bytes: int = 0
    digest_failures: int = 0
    links_lost: int = 0


class TransferEnded(_RankMessage, frozen=True):
    """The rank touches the transfer's blocks no more."""

    number: int
    failure: str | None  # None: verified
    first_token: SampledToken | None  # that came with an incoming one
    counts: TransferCounts  # of the transfer's side


# --- the leader to every rank ---


class RankSequence(msgspec.Struct, frozen=True, array_like=True):
    """As SequenceStep; how a token is drawn is the leader's business."""

    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    draws: bool


class RankCopy(msgspec.Struct, frozen=True, array_like=True):
    """As BlockCopy, each rank between its own cache and its own host memory."""

    is_out: bool
    cache_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class RankStep(_RankMessage, frozen=True):
    """Run this step; the leader begins it now."""

    sequences: tuple[RankSequence, ...]
    tells_layers: bool  # as the leader's engine is asked to: engines may choose their way by it, and all must go one
    copies: tuple[RankCopy, ...] = ()  # to be made before


def most_step_bytes(*, max_tokens: int, max_sequences: int, blocks_of_one: int, host_blocks: int) -> int:
    """How long a RankStep can get: its tokens, its sequences with block tables of `blocks_of_one`, and its copies."""
    number = 5  # bytes of one below 2^32, or of a length
    sequences = max_sequences * number * (blocks_of_one + 8)  # with what names and counts their parts
    return 64 + number * (max_tokens + 2 * host_blocks) + sequences


class StepEnded(_RankMessage, frozen=True):
    """The leader's step has ended: what follows is to be done once the rank's has, too.

    Until then the rank may still write into blocks that the leader has given to somebody else meanwhile.
    """


class OpenTransfer(_RankMessage, frozen=True):
    """As KVSender.open."""

    number: int
    ticket: Ticket
    num_tokens: int
    block_ids: tuple[int, ...]
    num_ready_tokens: int


class TransferReady(_RankMessage, frozen=True):
    """KV of the first `num_tokens` tokens is in the blocks: layer by layer as the rank's step under way computes them,
    or all of it where none is."""

    number: int
    num_tokens: int


class CommitTransfer(_RankMessage, frozen=True):
    """As OutgoingTransfer.commit."""

    number: int
    first_token: SampledToken | None


class DeclineTransfer(_RankMessage, frozen=True):
    """As KVSender.decline."""

    ticket: Ticket
    reason: str


class ExpectTransfer(_RankMessage, frozen=True):
    """As KVReceiver.expect."""

    number: int
    ticket: Ticket
    block_ids: tuple[int, ...]
    num_tokens: int
    skip_tokens: int


class KeepTransfer(_RankMessage, frozen=True):
    """As KVReceiver.keep."""

    ticket: Ticket


class RefuseTransfer(_RankMessage, frozen=True):
    """As KVReceiver.refuse."""

    ticket: Ticket


class AbortTransfer(_RankMessage, frozen=True):
    """Give a transfer up, outgoing or incoming; its TransferEnded still follows."""

    number: int
    reason: str


RankMessage = (
    RankHello
    | RankLoaded
    | RankFailed
    | TransferEnded
    | RankStep
    | StepEnded
    | OpenTransfer
    | TransferReady
    | CommitTransfer
    | DeclineTransfer
    | ExpectTransfer
    | KeepTransfer
    | RefuseTransfer
    | AbortTransfer
)
