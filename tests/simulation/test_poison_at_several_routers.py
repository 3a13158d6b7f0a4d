"""A request that kills engines is sent to one router after the other: the first one's verdict holds at all of them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest

from tests.rigs.played import played_by
from tests.simulation.blind_router import BlindRouter
from tests.simulation.fake_model import POISON, FakeEngine, expected_tokens
from tests.simulation.scenarios.scenario import ROUTER_LEASE_S, Scenario, make_scenario
from twostroke.decode_worker.config import DecodeConfig
from twostroke.protocol.requests import GenerateRequest, SamplingParams
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.request_state import ChoiceJob, RequestState
from twostroke.router.worker_health import PoisonRequest, SuspectsConfig
from twostroke.simulator.memory_network import MemoryFabric
from twostroke.simulator.memory_transport import LinkFabric
from twostroke.simulator.sim_fleet import SimFleet
from twostroke.simulator.virtual_loop import run_virtually
from twostroke.worker.token_server import TokenServerConfig

NUM_WORKERS = 4
CONFIG = PipelineConfig(suspects=SuspectsConfig(refuse_s=30.0))


def request(*token_ids: int) -> GenerateRequest:
    return GenerateRequest("template", "", token_ids, len(token_ids), SamplingParams(seed=9), 5)


GUILTY, INNOCENT = request(3, POISON, 1), request(3, 4, 1)


@dataclass
class Site:
    """Decode workers, and routers that share nothing but them."""

    scenario: Scenario
    fabric: MemoryFabric
    fleet: SimFleet
    routers: list[BlindRouter]

    def another_router(self) -> BlindRouter:
        router = BlindRouter(len(self.routers), self.fleet, self.fabric, CONFIG)
        self.routers.append(router)
        return router

    async def ask(self, router: BlindRouter, asked: GenerateRequest) -> list[int]:
        return await router.spawn(self._read(router, asked))

    async def refuses(self, router: BlindRouter, asked: GenerateRequest = GUILTY) -> float:
        """Return the virtual seconds until the router refuses."""
        began = asyncio.get_running_loop().time()
        with pytest.raises(PoisonRequest) as caught:
            await self.ask(router, asked)
        assert (caught.value.status, caught.value.code) == (422, "poison_request")
        return asyncio.get_running_loop().time() - began

    @property
    def num_killed(self) -> int:
        return sum(process.engine.was_poisoned for process in (*self.fleet.processes.values(), *self.fleet.departed))

    async def _read(self, router: BlindRouter, asked: GenerateRequest) -> list[int]:
        tokens: list[int] = []
        async with aclosing(
            router.pipeline.generate(RequestState(ChoiceJob(asked), asyncio.get_running_loop().time()))
        ) as events:
            async for event in events:
                tokens += [token.token_id for token in event.tokens]
        return tokens


def play(script: Callable[[Site], Awaitable[None]], *, num_decode: int = NUM_WORKERS) -> None:
    async def main() -> None:
        scenario = replace(
            make_scenario(0),
            num_prefill=0,
            num_decode=num_decode,
            decode_blocks=100,
            decode=DecodeConfig(token_channel=TokenServerConfig(lease_s=ROUTER_LEASE_S)),
        )
        fabric = MemoryFabric(seed=1)
        links = LinkFabric(bytes_per_s=1e6)
        fleet = SimFleet(scenario, FakeEngine.of_role, fabric, links, lambda line: None)
        for _ in range(num_decode):
            await fleet.start("decode")
        site = Site(scenario, fabric, fleet, [])
        site.another_router()
        site.another_router()
        await script(site)
        await asyncio.sleep(1.0)
        await fleet.close()
        for router in site.routers:
            await router.close()
        for process in list(fleet.processes.values()):
            await fleet.end(process)

    run_virtually(main())


async def is_served(site: Site, router: BlindRouter) -> bool:
    return await site.ask(router, INNOCENT) == expected_tokens(INNOCENT, site.scenario.windows)


@played_by(play)
async def test_a_router_that_comes_later_hears_of_it_from_any_worker(site: Site) -> None:
    await site.refuses(site.routers[0])
    await asyncio.sleep(1.0)
    await site.routers[0].close()
    assert await site.refuses(site.another_router()) < 0.1
    assert site.num_killed == 2


@played_by(play)
async def test_workers_that_were_all_replaced_hear_of_it_from_the_routers(site: Site) -> None:
    first, second = site.routers
    await site.refuses(first)
    for process in list(site.fleet.processes.values()):
        await site.fleet.replace(process)
    assert await is_served(site, second)
    assert await is_served(site, first)
    await asyncio.sleep(1.0)
    third = site.another_router()
    assert await site.refuses(third) < 0.1
    assert site.num_killed == 2


@played_by(play)
async def test_after_its_time_it_is_tried_again(site: Site) -> None:
    first, second = site.routers
    await site.refuses(first)
    await asyncio.sleep(CONFIG.suspects.refuse_s + 1.0)
    assert await site.refuses(second) > 0.0
    assert site.num_killed == 4


@played_by(play, num_decode=6)
async def test_two_routers_that_try_it_at_once_lose_two_workers_each_at_most_and_refuse_nobody_else(site: Site) -> None:
    beside = [request(5, number, 1) for number in range(12)]
    asking = [asyncio.create_task(site.ask(site.routers[one.token_ids[1] % 2], one)) for one in beside]
    await asyncio.gather(*(site.refuses(router) for router in site.routers))
    assert await asyncio.gather(*asking) == [expected_tokens(one, site.scenario.windows) for one in beside]
    assert 2 <= site.num_killed <= 4
    for router in site.routers:
        assert await site.refuses(router) == 0.0
