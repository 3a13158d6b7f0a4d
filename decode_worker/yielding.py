"""Who gives all of its blocks back where they run out, or where a higher class waits for them. Pure.

The youngest of the lowest class: so the oldest of the highest always gets on, and everyone in turn. Whoever was
admitted by its class's share while higher ones waited comes last: it would else be thrown out as often as it is let in.
"""

from collections.abc import Iterable, Sequence

from twostroke.decode_worker.jobs import DecodeJob
from twostroke.model.block_pool import BlockPool
from twostroke.model.giving_way import who_gives_way


def first_to_go(running: Iterable[DecodeJob]) -> DecodeJob:
    """Whose blocks others grow into. ValueError where nobody runs."""
    return min(running, key=_rank)


def who_yields(
    waiting: DecodeJob, running: Sequence[DecodeJob], missing_blocks: int, pool: BlockPool
) -> list[DecodeJob]:
    """Those of lower classes that together free so many blocks for one who waits; nobody where they can't."""
    priority = waiting.request.promise.priority
    lower = [job for job in running if job.request.promise.priority < priority and not job.keeps_blocks]
    return who_gives_way(sorted(lower, key=_rank), missing_blocks, pool)


def _rank(job: DecodeJob) -> tuple[bool, int, int]:
    return (job.keeps_blocks, job.request.promise.priority, -job.arrival)
