"""Who gives blocks back to a request of a higher class, on both kinds of worker. Pure."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from twostroke.model.block_pool import BlockPool
from twostroke.model.sequence import SequenceState


class Holder(Protocol):
    """A job of either kind of worker."""

    sequence: SequenceState


Job = TypeVar("Job", bound=Holder)


def who_gives_way(candidates: Iterable[Job], missing_blocks: int, pool: BlockPool) -> list[Job]:
    """The first of the candidates that together free so many blocks; nobody where all of them would not.

    Those who turn out not to be needed are spared. So each one's blocks are needed, and none can come straight back.
    """
    chosen: list[tuple[Job, int]] = []
    freed = 0
    for job in candidates:
        if freed >= missing_blocks:
            break
        own = sum(pool.references(block_id) == 1 for block_id in job.sequence.block_ids)
        if own:
            chosen.append((job, own))
            freed += own
    if freed < missing_blocks:
        return []
    needed: list[Job] = []
    for job, own in chosen:
        if freed - own >= missing_blocks:
            freed -= own
        else:
            needed.append(job)
    return needed
