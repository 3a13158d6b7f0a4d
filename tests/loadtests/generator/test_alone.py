"""A plan that one process carries out without Locust."""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.alone import send
from twostroke.loadtests.plan import SLO, Closed, Constant, Fixed, Plan


def plan(url: str, **more: Any) -> Plan:
    return Plan(url, "m", 100, Closed(2, requests=5), Fixed(3, 2), SLO(), 60.0, vocabulary=4000, **more)


async def test_all_requests_of_a_closed_loop_are_answered_and_told() -> None:
    def answer(body: dict[str, Any]) -> list[bytes]:
        return [HEAD, token_event("a"), token_event("b"), end(3, 2)]

    extra = {"extra": {"guided_json": {}}, "extra_share": 0.4}
    async with scripted_server(answer) as server:
        sent = await asyncio.to_thread(send, plan(server.url, **extra))
    assert [(record.status, record.output_tokens) for record in sent.records] == [("ok", 2)] * 5
    assert server.most_open <= 2
    assert sum("guided_json" in body for body in server.bodies) == 2
    assert sent.cpu_s > 0
    assert all(0 <= record.sent_s <= record.end_s <= sent.wall_s for record in sent.records)


async def test_when_it_is_over_nothing_more_is_sent_and_what_is_under_way_is_awaited() -> None:
    asked = asyncio.Event()

    def answer(body: dict[str, Any]) -> list[bytes]:
        asked.set()
        return [HEAD, token_event("a"), token_event("b"), end(3, 2)]

    async with scripted_server(answer) as server:
        endless = msgspec.structs.replace(plan(server.url), arrivals=Constant(20.0), seconds=600.0)
        sent = await asyncio.wait_for(asyncio.to_thread(send, endless, asked.is_set), 60)
    assert len(sent.records) == len(server.bodies) > 0
    assert {record.status for record in sent.records} == {"ok"}
    at_once = await asyncio.to_thread(send, endless, lambda: True)
    assert len(at_once.records) < 20, "it hears of the end as soon as it can"


def test_a_plan_that_can_not_be_sent_is_refused_at_once() -> None:
    with pytest.raises(LoadTestError, match="vocabulary"):
        send(Plan("http://127.0.0.1:1", "m", 100, Closed(1), Fixed(3, 2), SLO(), 60.0))
