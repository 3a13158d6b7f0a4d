"""What `twostroke doctor` asks of two workers, and what it tells of the way between them."""

import msgspec

from twostroke.protocol.tickets import Peer


class ProbeTimes(msgspec.Struct, frozen=True):
    """What the source of a row of trial transfers has seen."""

    seconds: tuple[float, ...]  # of each transfer, from its offer to its verification
    transport: str  # as in the configuration; of several ranks' links that differ, all of them
    why: str  # this transport, in words for people
    missing: tuple[str, ...]  # for each better transport: what it would need


class ProbeReply(msgspec.Struct, frozen=True):
    """The way of KV from one worker to another, as measured; with an `error` nothing else was."""

    source: Peer
    target: Peer
    transport: str = ""
    why: str = ""
    missing: tuple[str, ...] = ()
    bytes_per_s: float = 0.0  # of KV as the source stores it, in the largest transfers tried
    round_trip_s: float = 0.0  # of a transfer of one block, from its offer to its verification: the median
    error: str | None = None
