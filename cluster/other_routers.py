"""The numbers of the router's other replicas, for a scrape that has reached this one."""

import asyncio
import logging
from collections.abc import Sequence

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from twostroke.router.scrape import RouterReading

_log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""A router that takes longer is left out of the scrape: Prometheus, too, waits only so long."""


class OtherRouters:
    """Asks all replicas of the deployment behind `routers`, of which `own` is the one that asks."""

    def __init__(self, routers: DeploymentHandle, own: str):
        self._routers = routers
        self._own = own

    async def readings(self) -> Sequence[RouterReading]:
        """Of those that answer in time."""
        try:
            # What is public waits for all replicas, or fails with any of them.
            calls = await asyncio.wait_for(
                self._routers.broadcast("reading")._fetch_replica_results_async(), timeout=ANSWER_S
            )
        except (RayError, RayServeException, TimeoutError) as error:
            _log.warning("the other routers' numbers are missing in a scrape: %s", error or type(error).__name__)
            return ()
        answers = await asyncio.gather(
            *(asyncio.wait_for(call.get_async(), timeout=ANSWER_S) for call in calls), return_exceptions=True
        )
        readings: list[RouterReading] = []
        for answer in answers:
            if isinstance(answer, RouterReading):
                if answer.router != self._own:
                    readings.append(answer)
            elif isinstance(answer, BaseException):
                _log.warning("a router's numbers are missing in a scrape: %s", answer or type(answer).__name__)
        return readings
