"""What is told on the console of a server that runs: which workers are lost, and when all are there again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


class FleetWatch:
    """Compares one answer of GET /status with the one before.

    `expected` is how many workers each role is to have, until the autoscaler says otherwise.
    """

    def __init__(self, expected: Mapping[str, int]):
        self._expected = dict(expected)
        self._known: dict[str, tuple[str, str]] | None = None  # by epoch: role, worker id
        self._is_silent = False

    def look(self, status: Mapping[str, Any]) -> list[str]:
        """A line for each role that is to have more or fewer workers, and for each worker that is gone or new."""
        lines = ["The server answers again"] if self._is_silent else []
        self._is_silent = False
        lines += self._targets(status.get("autoscaling"))
        known = {one["epoch"]: (one["role"], one["worker_id"]) for one in status["workers"] if one["reachable"]}
        if self._known is None:
            self._known = known
            return lines
        before = Counter(role for role, _ in self._known.values())
        lost = [worker for epoch, worker in self._known.items() if epoch not in known]
        new = [worker for epoch, worker in known.items() if epoch not in self._known]
        self._known = known
        there = Counter(role for role, _ in known.values())
        too_many = before - Counter(self._expected)
        for worker in lost:
            lines.append(self._line(worker, "has left" if too_many[worker[0]] > 0 else "is lost", there))
            too_many[worker[0]] -= 1
        return lines + [self._line(worker, "is up", there) for worker in new]

    def no_answer(self, reason: str) -> list[str]:
        """The server did not tell its status; said once, until it answers again."""
        lines = [] if self._is_silent else [f"The server does not answer: {reason}"]
        self._is_silent = True
        return lines

    def _targets(self, autoscaling: Mapping[str, Any] | None) -> list[str]:
        lines: list[str] = []
        for role, told in (autoscaling or {"roles": {}})["roles"].items():
            target, before = told["target"], self._expected.get(role)
            if target != before:
                noun = "worker" if target == 1 else "workers"
                lines.append(
                    f"The autoscaler asks for {target} {role} {noun} instead of {before} ({told['last_change']})"
                )
            self._expected[role] = target
        return lines

    def _line(self, worker: Sequence[str], what: str, there: Mapping[str, int]) -> str:
        role, worker_id = worker
        count, expected = there.get(role, 0), self._expected.get(role, 0)
        return f"{role.capitalize()} worker {worker_id} {what}: {count} of {expected} {role} workers are there"
