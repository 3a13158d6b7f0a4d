"""Which workers serve a request, by load or in turn: what the kv_aware policy is compared with. Pure.

That policy chooses by load itself until workers have told what their steps cost.
"""

from collections.abc import Sequence

import msgspec

from twostroke.router.fleet import Path
from twostroke.router.routing.cheapest_path import NOBODY, Held, LeftOut, able_to_decode, able_to_prefill, best_source
from twostroke.router.routing.workers import KnownWorker


def least_loaded(
    prefill: Sequence[Held],
    decode: Sequence[Held],
    *,
    num_tokens: int,
    left_out: LeftOut = NOBODY,
) -> Path:
    """The path for a request whose prompt has `num_tokens` tokens.

    Decode: one whose free blocks hold the prompt before one whose don't, then the fewest requests, then the most free
    blocks. Prefill: the fewest queued tokens among those whose KV the decode worker can take. The worker id breaks
    ties. `left_out` is as `cheapest_path` has it. Raises NoPath.
    """
    able = [worker for worker, _ in able_to_decode(decode, num_tokens, left_out)]
    best = min(able, key=lambda one: (one.free_tokens < num_tokens, one.requests, -one.free_tokens, _name(one)))
    senders = _senders_to(best, prefill, num_tokens, left_out)
    sender = min(senders, key=lambda one: (one.queued_tokens(), one.requests, _name(one)), default=None)
    return Path(None if sender is None else sender.info, best.info)


def round_robin(
    prefill: Sequence[Held],
    decode: Sequence[Held],
    *,
    num_tokens: int,
    turn: int,
    left_out: LeftOut = NOBODY,
) -> Path:
    """As `least_loaded`, but whatever the load: of each role the worker whose turn it is, in the order of their ids."""
    able = sorted((worker for worker, _ in able_to_decode(decode, num_tokens, left_out)), key=_name)
    best = able[turn % len(able)]
    senders = sorted(_senders_to(best, prefill, num_tokens, left_out), key=_name)
    return Path(senders[turn % len(senders)].info if senders else None, best.info)


def with_source(
    path: Path,
    workers: Sequence[Held],
    *,
    num_tokens: int,
    min_tokens: int,
    left_out: LeftOut = NOBODY,
) -> Path:
    """The path with the worker that whoever computes its prompt pulls the prompt's beginning from, if any.

    It must hold `min_tokens` more than the puller, whatever the prompt's last token, which is computed in any case.
    """
    target, own = next(one for one in workers if one[0].info.peer == path.reader.peer)
    able = [(one, min(held, num_tokens - 1)) for one, held in workers if one.kind in target.takes]
    source = best_source(able, min(own, num_tokens - 1) + min_tokens, left_out)
    return path if source is None else msgspec.structs.replace(path, source=source.worker.info)


def _senders_to(
    decode: KnownWorker,
    prefill: Sequence[Held],
    num_tokens: int,
    left_out: LeftOut,
) -> list[KnownWorker]:
    """The prefill workers that can compute the prompt for `decode`."""
    able = able_to_prefill(prefill, num_tokens, left_out)
    return [worker for worker, _ in able if worker.kind in decode.takes]


def _name(worker: KnownWorker) -> str:
    return worker.info.peer.worker_id
