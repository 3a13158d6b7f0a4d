"""Which workers serve a request, by load or in turn. Pure: nothing here does I/O or draws random numbers.

These two are what the kv_aware policy (cheapest_path.py) is compared with; by load it chooses itself until workers have
told what their steps cost.

What the router expects of a path before it takes it: for choosing, for admission, and to compare with what came.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from twostroke.protocol.errors import RequestError
from twostroke.protocol.kv_layout import incompatibility
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import WorkerInfo, WorkerStats


class Estimate(msgspec.Struct, frozen=True):
    """A request's times on a path, in seconds, by the cost models that its workers have fitted."""

    queue_s: float  # until its prompt is begun: work that goes first
    pull_s: float  # fetching the prompt's beginning from another worker
    prefill_s: float  # computing what is cached nowhere
    transfer_s: float  # of KV, as far as prefill doesn't hide it
    decode_slot_s: float  # until the decode worker's next step has room for it
    step_s: float  # of the decode worker with the request in it: its time between tokens

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.pull_s + self.prefill_s


class NoPath(RequestError):
    """No worker can serve the request now (503); the client may ask again in `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1):
        super().__init__(message, code="no_workers", status=503, retry_after_s=retry_after_s)


class Path(msgspec.Struct, frozen=True):
    """The workers of one attempt. Without a prefill worker, the decode worker computes the prompt itself."""

    prefill: WorkerInfo | None
    decode: WorkerInfo
    source: WorkerInfo | None = None  # who computes the prompt pulls its beginning from it
    estimate: Estimate | None = None  # None: the workers have not told their costs yet, or nobody asks for them
    new_tokens: int | None = None  # of the prompt, to be computed; known with the estimate
    cached_tokens: int = 0  # of the prompt, where it is to be computed, before anything is pulled; as far as is known
    is_trial: bool = False  # taken not for its costs but to see whether they are true

    @property
    def reader(self) -> WorkerInfo:
        """Who computes the prompt."""
        return self.prefill or self.decode


@dataclass(frozen=True)
class Candidate:
    """A worker and what is known of its load.

    The stats tell of all routers' requests but are a moment old; the in-flight counts are exact but only this
    router's. The larger of the two is the better guess.
    """

    info: WorkerInfo
    stats: WorkerStats | None = None
    in_flight_requests: int = 0  # this router's own
    in_flight_tokens: int = 0  # prompt tokens of those

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new requests."""
        return self.stats is not None and self.stats.is_draining

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that would be computed before a new request's."""
        return max(self.in_flight_tokens, self.stats.num_waiting_tokens if self.stats else 0)

    @property
    def requests(self) -> int:
        """Requests that a new one would share the worker with."""
        return max(self.in_flight_requests, self.stats.num_running + self.stats.num_waiting if self.stats else 0)

    @property
    def free_tokens(self) -> int:
        """Tokens of KV that find room now."""
        blocks = self.stats.free_blocks if self.stats else self.info.num_blocks
        return blocks * self.info.layout.block_size


def least_loaded(
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    *,
    num_tokens: int,
    avoid: Collection[Peer] = (),
    ejected: Collection[Peer] = (),
) -> Path:
    """The path for a request whose prompt has `num_tokens` tokens.

    Decode: one whose free blocks hold the prompt before one whose don't, then the fewest requests, then the most free
    blocks. Prefill: the fewest queued tokens among those whose KV the decode worker can take. The worker id
    breaks ties. Workers in `avoid` failed this request before, those in `ejected` many: a prefill worker among them is
    never taken, a decode worker only where there is no other. Raises NoPath where no decode worker is left.
    """
    able = _able_to_decode(decode, num_tokens, avoid, ejected)
    best = min(able, key=lambda one: _decode_order(one, num_tokens))
    partners = _partners(best, prefill, num_tokens, avoid, ejected)
    return Path(min(partners, key=_prefill_order).info if partners else None, best.info)


def round_robin(
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    *,
    num_tokens: int,
    turn: int,
    avoid: Collection[Peer] = (),
    ejected: Collection[Peer] = (),
) -> Path:
    """As `least_loaded`, but whatever the load: of each role the worker whose turn it is, in the order of their ids."""
    able = sorted(_able_to_decode(decode, num_tokens, avoid, ejected), key=_worker_id)
    best = able[turn % len(able)]
    partners = sorted(_partners(best, prefill, num_tokens, avoid, ejected), key=_worker_id)
    return Path(partners[turn % len(partners)].info if partners else None, best.info)


def choose_source(
    target: WorkerInfo,
    workers: Sequence[Candidate],
    *,
    held_tokens: Mapping[Peer, int],
    num_tokens: int,
    min_tokens: int,
    avoid: Collection[Peer] = (),
) -> WorkerInfo | None:
    """The worker of either role that `target` should pull the prompt's beginning from, if any.

    `held_tokens` is how much of the prompt's beginning each worker probably holds. The most wins, then the fewest
    requests, then the worker id; it must exceed what `target` itself holds by `min_tokens`. The prompt's last token is
    computed in any case. Never a worker in `avoid`, nor one whose KV `target` can't take.
    """
    if not target.transfer_addresses:
        return None
    most = num_tokens - 1
    enough = min(held_tokens.get(target.peer, 0), most) + min_tokens
    sources = [
        one
        for one in workers
        if min(held_tokens.get(one.info.peer, 0), most) >= enough
        and one.info.peer not in avoid
        and one.info.peer != target.peer
        and incompatibility(one.info.layout, target.layout) is None
    ]
    if not sources:
        return None
    return min(sources, key=lambda one: (-held_tokens[one.info.peer], one.requests, one.info.peer.worker_id)).info


def _able_to_decode(
    decode: Sequence[Candidate], num_tokens: int, avoid: Collection[Peer], ejected: Collection[Peer]
) -> list[Candidate]:
    """The decode workers to choose from: the least objectionable. Raises NoPath."""
    able = [one for one in decode if one.info.max_context >= num_tokens and not one.is_draining]
    if not able:
        raise NoPath("no decode worker is available; try again shortly")
    welcome = [one for one in able if one.info.peer not in avoid]
    return [one for one in welcome if one.info.peer not in ejected] or welcome or able


def _partners(
    decode: Candidate, prefill: Sequence[Candidate], num_tokens: int, avoid: Collection[Peer], ejected: Collection[Peer]
) -> list[Candidate]:
    """The prefill workers that can compute the prompt for `decode`."""
    if not decode.info.transfer_addresses:
        return []
    return [
        one
        for one in prefill
        if incompatibility(one.info.layout, decode.info.layout) is None
        and one.info.max_context >= num_tokens
        and not one.is_draining
        and one.info.peer not in avoid
        and one.info.peer not in ejected
    ]


def _worker_id(one: Candidate) -> str:
    return one.info.peer.worker_id


def _decode_order(one: Candidate, num_tokens: int) -> tuple[bool, int, int, str]:
    return one.free_tokens < num_tokens, one.requests, -one.free_tokens, one.info.peer.worker_id


def _prefill_order(one: Candidate) -> tuple[int, int, str]:
    return one.queued_tokens, one.requests, one.info.peer.worker_id
