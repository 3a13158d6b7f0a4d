"""The exact simulation beside open loops on machines of their own: closed loops, conversations, neighbours."""

import asyncio
import logging
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from twostroke.loadtests.plan import SLO, Arrivals, Chat, Closed, Constant, Fixed, Plan, Workload
from twostroke.planning.coarse.fleet import day_rates
from twostroke.planning.costs.profiles import SMALL
from twostroke.planning.exact import simulate_plan
from twostroke.planning.layouts import Layout
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import StepCosts
from twostroke.simulator.deployment import SharedMachine, WorkerCrash
from twostroke.simulator.virtual_loop import run_virtually
from twostroke.worker.profile import WorkerProfile

AGGREGATED = Layout("aggregated", SMALL, 1)


def apart(profile: WorkerProfile, count: int) -> Layout:
    return Layout("disaggregated", profile, count, profile, count)


def make_plan(arrivals: Arrivals, workload: Workload, seconds: float) -> Plan:
    return Plan("simulated", "160m", 4096, arrivals, workload, SLO(), seconds, vocabulary=32_000)


def test_each_user_of_a_closed_loop_asks_again_when_answered() -> None:
    records = simulate_plan(make_plan(Closed(users=2, think_s=0.5), Fixed(64, 8), 4.0), AGGREGATED)
    first, second = sorted(records, key=lambda one: one.scheduled_s)[:2]
    assert first.scheduled_s == second.scheduled_s == 0.0
    under_way = [sum(one.scheduled_s <= at.scheduled_s < one.end_s for one in records) for at in records]
    assert max(under_way) == 2
    ends = sorted(one.end_s for one in records)
    for record in sorted(records, key=lambda one: one.scheduled_s)[2:]:
        # The call returns some milliseconds after the last token.
        assert any(0.5 <= record.scheduled_s - end_s < 0.6 for end_s in ends)
    assert all(one.scheduled_s < 4.0 for one in records)


def test_what_simulated_workers_warn_of_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    faults = [WorkerCrash(at_s, role) for role, at_s in (("prefill", 1.0), ("decode", 2.0))]  # type: ignore[arg-type]
    simulate_plan(make_plan(Constant(8.0), Fixed(512, 64), 4.0), apart(SMALL, 2), faults=faults)
    assert not caplog.records
    logging.getLogger("twostroke.kvtransfer").warning("heard again")
    assert [record.getMessage() for record in caplog.records] == ["heard again"]


def test_a_conversation_goes_on_from_what_was_said_and_finds_it_cached() -> None:
    chat = Chat(turns=4.0, think_s=1.0, system_tokens=64, input_tokens=40, output_tokens=30)
    records = simulate_plan(make_plan(Constant(0.2), chat, 20.0), AGGREGATED)
    assert any((one.cached_tokens or 0) > 64 + 16 for one in records)  # more than any system prompt
    assert len(records) > 4  # more turns than sessions
    assert all(one.scheduled_s < 20.0 for one in records)


def test_a_step_is_slower_only_while_somebody_computes_beside_it() -> None:
    async def both() -> list[float]:
        loop, machine, ends = asyncio.get_running_loop(), SharedMachine(), []

        async def compute(after_s: float, part: float) -> None:
            await asyncio.sleep(after_s)
            await machine.compute(1.0, 2.0, part)
            ends.append(loop.time())

        await asyncio.gather(compute(0.0, 1.0), compute(0.5, 0.25))
        return ends

    # Half of the first alone, then both at half their pace: the second's quarter takes 0.5, the first's rest 0.25 more.
    assert run_virtually(both()) == pytest.approx([1.0, 1.25])


def test_workers_of_one_machine_are_slower_together_than_apart() -> None:
    costs = SMALL.costs
    twice = StepCosts(2 * costs.base_s, 2 * costs.token_s, 2 * costs.pair_s, 2 * costs.row_s, 2 * costs.context_s)

    def mean_ttft_s(profile: WorkerProfile) -> float:
        records = simulate_plan(make_plan(Constant(4.0), Fixed(256, 64), 5.0), apart(profile, 1))
        return sum(one.ttft_s or 0.0 for one in records) / len(records)

    alone, together = mean_ttft_s(SMALL), mean_ttft_s(msgspec.structs.replace(SMALL, beside=twice))
    assert 1.2 * alone < together < 2.5 * alone


def test_measured_delays_are_part_of_a_first_token() -> None:
    asked = make_plan(Constant(1.0), Fixed(64, 4), 5.0)
    quick = msgspec.structs.replace(SMALL, call_s=0.0)
    slow = msgspec.structs.replace(SMALL, call_s=0.04, http_s=0.2)
    first, late = (simulate_plan(asked, Layout("aggregated", profile, 1))[-1] for profile in (quick, slow))
    assert (late.ttft_s or 0) - (first.ttft_s or 0) == pytest.approx(0.2 + 0.02, abs=0.002)  # the call one way
    assert late.tpot_s == pytest.approx(first.tpot_s or 0, abs=0.002)


def test_a_day_has_its_files_rates_scaled_to_the_mean(tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text("model,t_s,rate_rps\na,0,1\na,600,3\nb,0,5\nb,600,5\na,90000,7\n")
    assert day_rates(f"{path}:a", 10.0).steps == ((0.0, 5.0), (600.0, 15.0))
    with pytest.raises(ConfigError, match="name one after a colon, of a, b"):
        day_rates(str(path), 10.0)
    assert all(before[0] < after[0] for before, after in pairwise(day_rates(f"{path}:b", 1.0).steps))
