"""All messages on the project's own sockets, and their encoding: typed msgpack arrays that begin with the type's tag.

Three kinds of connection exist. The token channel joins a router replica to a worker. The transfer control connection
joins a rank of a worker that sends KV (the source) to one of a worker that receives it (the target); the KV bytes
themselves go over data links beside it. The first two begin with Hello from the connecting side and Welcome (or Refuse)
from the listening side. The third joins the ranks of one worker, rank 0 to each other one. Rank 0 is the leader: it
schedules, draws, and owns the block accounting. The others follow its messages in their order. A message that rank 0
sends after the end of its own step takes effect after theirs: see StepEnded. Rank 0 numbers the transfers.

msgspec is used because it checks every field's type while decoding and is faster than a generic unpacker.

ProbeTimes is the answer of a worker to the trial transfers of `twostroke doctor`.
"""

import hashlib
import sys
from collections.abc import Iterable
from functools import reduce
from operator import or_
from types import ModuleType
from typing import Annotated, Literal

import msgspec

from twostroke.protocol import kv_layout, requests, stats
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.kv_layout import Encoding, KVLayout
from twostroke.protocol.requests import (
    MAX_IN_MESSAGE,
    NO_REQUEST,
    Address,
    BlockedRequest,
    LogContext,
    Peer,
    SampledToken,
    Ticket,
    TokenEvent,
)
from twostroke.protocol.stats import StepRole, TransferStats, WorkerStats


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages, and each subclass is one: an array whose first element is the class's name."""


# --- token channel and transfer control connection ---


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """The kinds of data links that a rank supports."""

    transports: tuple[str, ...]  # by preference
    machine: str  # equal where two processes can share memory and local sockets
    device: str  # `cpu`, or a GPU's own name, equal for processes on the same GPU
    is_configured: bool = False  # its configuration names the one transport there is


class KVHello(msgspec.Struct, frozen=True, array_like=True):
    """The part of the source's Hello that a transfer control connection needs."""

    layout: KVLayout
    rank: int
    encoding: Encoding
    reach: Reach
    without: tuple[str, ...] = ()  # transports to avoid where there are others: the last link by them failed


class Hello(Message, frozen=True):
    """The first message of the connecting side: its name, and the peer that it means to reach."""

    sender: Peer
    receiver: Peer
    kv: KVHello | None = None  # None on a token channel


class KVWelcome(msgspec.Struct, frozen=True, array_like=True):
    """The part of the target's Welcome that a transfer control connection needs. The target chooses the transport."""

    layout: KVLayout
    rank: int
    transport: str
    why: str  # this transport, in words for people
    missing: tuple[str, ...]  # for each better transport: what it would need
    link: dict[str, str | int]  # how to join the data link, in the transport's own words


class Welcome(Message, frozen=True):
    """The connection is accepted."""

    receiver: Peer
    kv: KVWelcome | None = None  # None on a token channel


class Refuse(Message, frozen=True):
    """The connection is refused; the listener closes it after this."""

    reason: str


class Ping(Message, frozen=True):
    """Proof of life: each side sends one where it has been silent for a third of a lease."""


# --- token channel ---


class TokenFrame(Message, frozen=True):
    """Worker to router: all that one engine step produced for that router's requests."""

    events: tuple[TokenEvent, ...]


class StatsFrame(Message, frozen=True):
    """Worker to router: its numbers, now and then."""

    stats: WorkerStats


class KVNotSent(Message, frozen=True):
    """Prefill worker to router: its transfer of this request's KV has failed, and nothing of it will come any more."""

    request_id: str


class BlocksHeld(Message, frozen=True):
    """Worker to router: a part of all names in its prefix cache, in answer to ReportBlocks or where too much changed.

    With `is_tier` the names are those of its KV tiers, which are reported and numbered apart from the cache's.

    Names are 8 bytes each, one after the other: the first half of the block's hash, enough for a guess. Changes may
    pass between the parts: each message counts in all that came before it.
    """

    names: bytes
    is_first: bool  # forget what was known before
    is_last: bool
    sequence: int  # of the last BlocksChanged that this counts in
    is_tier: bool = False


class BlocksChanged(Message, frozen=True):
    """Worker to router: blocks that have got into its prefix cache, and that have left it, since the last one.

    With `is_tier` it tells of the worker's KV tiers, as BlocksHeld does.
    """

    sequence: int  # one more than the last; a gap means that something was missed
    stored: bytes  # names as in BlocksHeld
    removed: bytes
    is_tier: bool = False


class ReportBlocks(Message, frozen=True):
    """Router to worker: tell all names in the prefix cache and in KV tiers, and from then on each change.

    A router that has missed something of one asks for that one alone.
    """

    cache: bool = True
    tiers: bool = True  # a worker without tiers tells nothing of them


class Cancel(Message, frozen=True):
    """Router to worker: forget the request, free its blocks. Unknown ids are ignored."""

    request_id: str


class Drain(Message, frozen=True):
    """Router to worker: begin nothing new, and give back what has not begun, since the worker is being taken down.

    Where that was a mistake, the keeper of the worker lets it go on (`Worker.resume`), unless an operator has ordered
    it (`is_ordered`): then the worker drains until a Resume.
    """

    is_ordered: bool = False


class Resume(Message, frozen=True):
    """Router to worker: take requests again. It takes an operator's order back."""


class ChangeRole(Message, frozen=True):
    """Router to worker: let steps prefer prompts, streams or neither from now on."""

    role: StepRole


class PrefillFailed(Message, frozen=True):
    """Router to decode worker: no KV will come for this request; compute it yourself."""

    request_id: str


class SendPrefix(Message, frozen=True):
    """Router to any worker: send what the prefix cache holds of these tokens to the ticket's target.

    Where it holds nothing, the worker tells the target so, by an Abort.
    """

    ticket: Ticket
    token_ids: tuple[int, ...]
    cache_salt: bytes
    log_context: LogContext = NO_REQUEST


class RequestsBlocked(Message, frozen=True):
    """Either way: requests that have taken workers down. The worker passes on to its other routers what is news to it.

    It follows the worker's Welcome, even when it is empty: a router with a channel knows what the worker knows. A
    router sends what it has found out itself, and to a worker whose channel comes up what it knows.
    """

    requests: Annotated[tuple[BlockedRequest, ...], msgspec.Meta(max_length=MAX_IN_MESSAGE)]


# --- transfer control, source to target ---


class Offer(Message, frozen=True):
    """KV of `num_tokens` tokens is being computed; may it come?"""

    ticket: Ticket
    num_tokens: int


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive units of one layer; unit 0 holds the request's first tokens."""

    layer: int
    first_unit: int
    num_units: int


class Chunk(Message, frozen=True):
    """These runs follow on the data link, one after the other, sealed with `chunk_seal` of this message."""

    transfer_id: bytes
    sequence: int  # 0, 1, 2, ... within the transfer
    runs: tuple[Run, ...]
    num_bytes: int  # of KV on the wire, the seal not counted


class Commit(Message, frozen=True):
    """All chunks are out. From a prefill worker the first token follows; a pulled prefix has none."""

    transfer_id: bytes
    num_chunks: int
    first_token: SampledToken | None


# --- transfer control, target to source ---


class Grant(Message, frozen=True):
    """Blocks are reserved. KV of the first `skip_tokens` tokens is there already: don't send it."""

    transfer_id: bytes
    skip_tokens: int


class Awaited(Message, frozen=True):
    """The offer's request is here and waits for room: keep its KV. A Grant or an Abort will follow."""

    transfer_id: bytes


class Verified(Message, frozen=True):
    """Every byte arrived and its seal holds: the source may let go of its blocks."""

    transfer_id: bytes


# --- transfer control, either way ---


class Abort(Message, frozen=True):
    """The transfer is over, without success. Legal in every state."""

    transfer_id: bytes
    reason: str


# --- a rank to the leader ---


class RankHello(Message, frozen=True):
    """The first message: which rank of which worker connects."""

    worker: Peer
    rank: int


class RankLoaded(Message, frozen=True):
    """Its engine is ready to step, and it listens for KV."""

    transfer_address: Address


class RankFailed(Message, frozen=True):
    """It could not load, or a step failed: it ends, and the worker with it."""

    reason: str


class TransferEnded(Message, frozen=True):
    """The rank touches the transfer's blocks no more."""

    number: int
    failure: str | None  # None: verified
    first_token: SampledToken | None  # that came with an incoming one
    stats: TransferStats  # of the transfer's side on that rank


# --- the leader to every rank ---


class RankSequence(msgspec.Struct, frozen=True, array_like=True):
    """A SequenceStep as other ranks need it; the leader draws the tokens."""

    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    draws: bool
    takes_largest: bool = False  # as Draw.takes_largest: a step of such draws needs no more of a rank's logits
    scored_rows: int | None = None  # where something is read off the prompt: of so many tokens the logits, too
    follows: int | None = None  # the leader hands the token on between the ranks' engines
    copied_from: int | None = None


class RankCopy(msgspec.Struct, frozen=True, array_like=True):
    """A BlockCopy, which each rank makes between its own cache and its own host memory."""

    is_out: bool
    cache_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class RankStep(Message, frozen=True):
    """Run this step; the leader begins it now, perhaps with the one before still under way."""

    sequences: tuple[RankSequence, ...]
    tells_layers: bool  # as the leader's engine is asked to: engines may choose their way by it, and all must go one
    copies: tuple[RankCopy, ...] = ()  # to be made before


class StageExpertHits(Message, frozen=True):
    """Counts of how often each expert of the rank's layers was chosen, sent now and then by one rank of each stage."""

    layers: tuple[tuple[int, ...], ...]


NOBODY = -1
"""Expert number of a slot that holds none."""


class LayerCopies(msgspec.Struct, frozen=True, array_like=True):
    """The experts of a layer that a worker's ranks hold copies of. Each rank owns an equal part of the experts, which
    never move, and behind those has as many slots for copies as any other."""

    layer: int
    slots: tuple[tuple[int, ...], ...]  # by rank: the experts in its slots, or NOBODY

    def own_experts(self, rank: int, number: int) -> range:
        """Return the experts, of `number`, whose home the rank is."""
        ranks = len(self.slots)
        return range(rank * number // ranks, (rank + 1) * number // ranks)

    def holders(self, number: int) -> list[list[tuple[int, int]]]:
        """Return the ranks that hold each of `number` experts, and its slot there: its home first, then by rank."""
        homes = [self.own_experts(rank, number) for rank in range(len(self.slots))]
        found = [[(rank, expert - home.start)] for rank, home in enumerate(homes) for expert in home]
        for rank, slots in enumerate(self.slots):
            for place, expert in enumerate(slots):
                if expert != NOBODY:
                    found[expert].append((rank, len(homes[rank]) + place))
        return found


class ExpertMove(msgspec.Struct, frozen=True, array_like=True):
    """A piece of an expert, as one rank holds it, to be copied into a slot of another."""

    layer: int
    source: int  # rank
    source_slot: int
    target: int
    target_slot: int
    first_byte: int
    num_bytes: int


class ArrangeExperts(Message, frozen=True):
    """New places of experts between two steps: use `copies` first, then move experts into slots that no step reads."""

    copies: tuple[LayerCopies, ...]
    moves: tuple[ExpertMove, ...]


def most_step_bytes(*, max_tokens: int, max_sequences: int, blocks_of_one: int, host_blocks: int) -> int:
    """Return the most bytes of a RankStep, by its tokens, sequences with `blocks_of_one` blocks, and copies."""
    number = 5  # bytes of one below 2^32, or of a length
    sequences = max_sequences * number * (blocks_of_one + 10)  # with what names and counts their parts
    return 64 + number * (max_tokens + 2 * host_blocks) + sequences


class StepEnded(Message, frozen=True):
    """The leader's first step under way has ended: what follows is to be done once the rank's has, too.

    Until then the rank may still write into blocks that the leader has given to another request meanwhile.
    """


TransferMethod = Literal[
    "begin_transfer",
    "decline_transfer",
    "windows_moved",
    "layer_ready",
    "commit",
    "abort",
    "expect_transfer",
    "keep_offer",
    "refuse_offer",
]
"""Methods of KVSender, KVReceiver and their transfers. `layer_ready` says of all layers that KV of the first
`num_tokens` tokens is in the blocks: layer by layer as the rank's step under way computes them, or all of it where no
step is under way."""


class TransferCall(Message, frozen=True):
    """A call on KV transfer by the leader, which every rank repeats on its own part; the fields are its arguments.

    `begin_transfer` and `expect_transfer` are answered by a TransferEnded, once the rank's part has ended.
    """

    method: TransferMethod
    number: int = 0  # the transfer's; 0 where the call concerns none that has begun
    ticket: Ticket | None = None  # of calls on a KVSender or KVReceiver
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_here: int = 0  # tokens that need not be computed (begin_transfer) or sent (expect_transfer)
    first_token: SampledToken | None = None
    reason: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(reduce(or_, Message.__subclasses__()))


def encode_message(message: Message) -> bytes:
    """The message's bytes, without a frame around them."""
    return _encoder.encode(message)


def decode_message(payload: bytes | memoryview) -> Message:
    """The message in `payload`. Raises ProtocolError for anything that is not exactly one known message."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: values nested without end
        raise ProtocolError(f"not a message of this protocol: {error}") from error


class ProbeTimes(msgspec.Struct, frozen=True):
    """The times of a row of trial transfers, as their source has seen them."""

    seconds: tuple[float, ...]  # of each transfer, from its offer to its verification
    transport: str  # as in the configuration; of several ranks' links that differ, all of them
    why: str  # this transport, in words for people
    missing: tuple[str, ...]  # for each better transport: what it would need


_MEANING = 1
"""Version to raise where a message changes its meaning while its fields stay the same."""


def fingerprint(structs: Iterable[type[msgspec.Struct]]) -> str:
    """16 hexadecimal digits that change with the structs' names, and their fields' names, types and order."""
    lines = [f"meaning {_MEANING}"]
    for struct in sorted(structs, key=lambda one: (one.__module__, one.__qualname__)):
        config = struct.__struct_config__
        fields = ", ".join(f"{field.encode_name}: {field.type!r}" for field in msgspec.structs.fields(struct))
        lines.append(f"{struct.__qualname__} {config.array_like} {config.tag!r} ({fields})")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def structs_of(*modules: ModuleType) -> list[type[msgspec.Struct]]:
    """Those that the modules define."""
    return [
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and one.__module__ == module.__name__
    ]


PROTOCOL = fingerprint(structs_of(sys.modules[__name__], kv_layout, requests, stats))
"""The version of all that travels between processes: they understand each other where it is the same."""
