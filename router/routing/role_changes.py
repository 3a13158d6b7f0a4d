"""The choice of workers that change their roles, so that there are as many of each role as the autoscaler wants. Pure.

Each router computes it from what the workers tell, and all come to the same: a worker that is told twice changes once.
"""

from collections.abc import Iterable, Mapping

from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import ROLES, Role, WorkerInfo, WorkerStats, role_of


def role_changes(workers: Iterable[tuple[WorkerInfo, WorkerStats]], targets: Mapping[Role, int]) -> dict[Peer, Role]:
    """Return the new roles of those that change.

    Workers leave a role that has more than its target for the other one, if that has fewer. First those go that return
    to the role they began with, then by their ids: loads differ from moment to moment, and routers must not.
    """
    present: dict[Role, list[WorkerInfo]] = {role: [] for role in ROLES}
    for info, stats in workers:
        if not stats.is_draining:
            present[role_of(info, stats)].append(info)
    for giver, taker in (ROLES, ROLES[::-1]):
        spare = len(present[giver]) - targets.get(giver, 0)
        missing = targets.get(taker, 0) - len(present[taker])
        if (count := min(spare, missing)) > 0:
            ranked = sorted(present[giver], key=lambda info: (info.role != taker, info.peer.worker_id))
            return {info.peer: taker for info in ranked[:count]}
    return {}
