"""A server's status becomes profiles, and profiles become a simulation of it."""

from typing import Any

import pytest
from msgspec import structs

from twostroke.loadtests.plan import SLO, Fixed, Plan, Poisson
from twostroke.loadtests.run_folder import Record
from twostroke.planning.against import Cell, figures_of, layout_of, profiles_of, simulated
from twostroke.planning.costs.profiles import SMALL
from twostroke.planning.exact import record_of
from twostroke.protocol.errors import ConfigError

COSTS = [0.003, 0.0002, 0.0, 0.0002, 0.0, 50, 0.0, 0.0]


def worker(role: str, costs: list[float] | None = COSTS, sent: int = 0, computed: int = 0) -> dict[str, Any]:
    stats = {"costs": costs, "transfer_bytes": sent, "computed_tokens": computed}
    return {"role": role, "num_blocks": 100, "block_size": 16, "stats": stats}


def record(first_s: float, **stages: float) -> Record:
    return structs.replace(record_of(0, 0.0, 64, 4, (first_s, first_s + 0.3)), stages=stages)


def test_profiles_are_what_workers_and_stages_tell() -> None:
    told = record(0.100, ttft_s=0.090, admit_s=0.004, prefill_queue_s=0.020, prefill_s=0.060, e2e_s=0.4)
    status = {
        "model": "m",
        "workers": [worker("prefill", sent=64_000, computed=1000), worker("decode", [1.0, *COSTS[1:]])],
    }
    found = profiles_of(status, [told, record(0.2)])
    assert found["prefill"].costs.base_s == 0.003
    assert found["decode"].costs.base_s == 1.0
    for profile in found.values():
        assert profile.http_s == pytest.approx(0.010 + 0.004)
        assert profile.call_s == pytest.approx(0.090 - 0.004 - 0.020 - 0.060)
        assert (profile.kv_bytes, profile.kv_tokens) == (64.0, 1600)
    lazy = {"model": "m", "workers": [worker("prefill", None), worker("decode")]}
    assert profiles_of(lazy, [told])["prefill"].costs.base_s == 0.003, "decode workers read all its prompts"
    with pytest.raises(ConfigError, match="--learn"):
        profiles_of({"model": "m", "workers": [worker("decode", None)]}, [told])
    alone = {"model": "m", "workers": [worker("decode")]}
    step_s = 0.003 + 64 * 0.0002
    read = profiles_of(alone, [record(0.100, ttft_s=0.050 + step_s, decode_queue_s=0.030, decode_s=0.3)])["decode"]
    assert read.call_s == pytest.approx(2 * 0.020), "a first token comes one way"
    with pytest.raises(ConfigError, match="stages"):
        profiles_of(status, [record(0.2)])


def test_a_server_that_is_the_simulation_is_near_it() -> None:
    plan = Plan("simulated", "m", 4096, Poisson(4.0), Fixed(256, 16), SLO(), 20.0, warm_up_s=2.0, vocabulary=32_000)
    layout = layout_of({"prefill": SMALL, "decode": SMALL}, 1, 1, "disaggregated")
    measured, answers, failed = figures_of(simulated(plan, layout), plan.warm_up_s)
    cell = Cell("fixed", 4.0, answers, failed, measured, measured | {"ttft_p90_s": 1.2 * measured["ttft_p90_s"]})
    assert answers > 50
    assert failed == 0
    assert cell.near == ["ttft_mean_s", "tpot_mean_s", "tpot_p90_s"]
    assert f"{measured['ttft_p90_s'] * 1e3:.4g}: **1.20**" in cell.row()
    assert f"{measured['ttft_mean_s'] * 1e3:.4g}: 1.00" in cell.row()
