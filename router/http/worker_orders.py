"""Orders of an operator to one worker: `POST /workers/ID` has it drain, resume, or change its role.

The order goes over the token channel, so it holds at once and for all routers. Whoever ordered it hears of it when the
worker's own numbers say so. Ray Serve replaces no worker that drains: it keeps its place, and takes no requests.
"""

import asyncio
from typing import Any

from pydantic import ConfigDict, model_validator

from twostroke.protocol.errors import RequestError
from twostroke.protocol.messages import ChangeRole, Drain, Resume
from twostroke.protocol.stats import StepRole, WorkerInfo, WorkerStats, role_of
from twostroke.router.http.service import RouterService
from twostroke.router.openai.fields import FieldError, StrictModel

ANSWER_S = 5.0
"""Seconds in which a worker's numbers must confirm an order."""
SETTLED_S = 0.3
"""Seconds in which a router hears of the orders that other routers gave in the same moment."""
LOOK_S = 0.02


class WorkerOrder(StrictModel):
    """POST /workers/ID: the new role, whether the worker is to drain, or both."""

    model_config = ConfigDict(extra="forbid")

    role: StepRole | None = None
    draining: bool | None = None

    @model_validator(mode="after")
    def _one_of(self) -> "WorkerOrder":
        if self.role is None and self.draining is None:
            raise FieldError("role", "either role or draining must be given")
        return self

    def is_done(self, stats: WorkerStats | None) -> bool:
        """Return True where the worker's numbers say that it has obeyed."""
        if stats is None:
            return False
        return (self.role is None or stats.step_role == self.role) and (
            self.draining is None or stats.is_draining == self.draining
        )


async def carry_out(order: WorkerOrder, worker_id: str, service: RouterService) -> dict[str, Any]:
    """Have the worker obey; return its row of /status once it has.

    Raises RequestError: 404 for no such worker, 409 where nobody could write answers then or roles are fixed, 503
    where the worker does not answer.
    """
    info = next((one for one in service.fleet.workers() if one.peer.worker_id == worker_id), None)
    if info is None:
        raise RequestError(
            f"no worker has the id {worker_id[:100]!r}: /status lists them", code="worker_not_found", status=404
        )
    async with service.one_order:
        before = service.channels.stats(info.peer)
        _check(order, service)
        _check_last(order, info, before, service)
        await _obeyed(order, info, service)
        await _check_again(order, info, before, service)
    rows: list[dict[str, Any]] = service.status()["workers"]
    row = next((row for row in rows if row["worker_id"] == worker_id), None)
    if row is None:
        raise _silent(info)  # it has left the fleet meanwhile
    return row


async def _obeyed(order: WorkerOrder, info: WorkerInfo, service: RouterService) -> None:
    """Give the order, and wait until the worker's numbers confirm it. Raises RequestError (503)."""
    channels = service.channels
    if order.role is not None:
        channels.send(info.peer, ChangeRole(order.role))
    if order.draining is not None:
        channels.send(info.peer, Drain(is_ordered=True) if order.draining else Resume())
    try:
        async with asyncio.timeout(ANSWER_S):
            while not order.is_done(channels.stats(info.peer)):  # noqa: ASYNC110  (numbers call nobody back)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise _silent(info) from None


async def _check_again(
    order: WorkerOrder, info: WorkerInfo, before: WorkerStats | None, service: RouterService
) -> None:
    """Take an order back that, with one of another router at the same moment, leaves nobody to write answers.

    Raises RequestError (409) then. Both routers may take theirs back.
    """
    try:
        async with asyncio.timeout(SETTLED_S):
            while True:
                _check_last(order, info, before, service)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return
    except RequestError:
        if order.draining:
            service.channels.send(info.peer, Resume())
        if order.role is not None:
            service.channels.send(info.peer, ChangeRole((before and before.step_role) or role_of(info, before)))
        raise


def _silent(info: WorkerInfo) -> RequestError:
    return RequestError(
        f"worker {info.peer.worker_id} has not answered in {ANSWER_S:g} s: it is unreachable, or taken down",
        code="worker_silent",
        status=503,
    )


def _check(order: WorkerOrder, service: RouterService) -> None:
    """Raises RequestError (409) for an order that roles forbid."""
    if order.role is not None and not service.pipeline.is_flexible:
        raise RequestError(
            "role: the server's roles are fixed: set router.roles to flexible to change one",
            param="role",
            code="roles_are_fixed",
            status=409,
        )
    scaling = service.scaling()
    if order.role is not None and scaling is not None and scaling.homes is not None:
        raise RequestError(
            "role: the autoscaler decides on roles: set autoscaling.change_roles to false to do so yourself",
            param="role",
            code="autoscaler_decides",
            status=409,
        )


def _check_last(order: WorkerOrder, info: WorkerInfo, before: WorkerStats | None, service: RouterService) -> None:
    """Raises RequestError (409) for an order that leaves nobody to write answers.

    `before` it the worker had these numbers.
    """
    if not order.draining and order.role != "prefill":
        return
    ejected = service.pipeline.ejected()
    for other in service.fleet.workers():
        stats = service.channels.stats(other.peer)
        is_decoding = stats is not None and not stats.is_draining and role_of(other, stats) == "decode"
        if other.peer != info.peer and other.peer not in ejected and is_decoding:
            return
    if role_of(info, before) == "decode":
        raise RequestError(
            f"worker {info.peer.worker_id} is the last that writes answers: let another one decode first "
            "(`twostroke role WORKER decode`)",
            code="last_decode_worker",
            status=409,
        )
