"""The policy in time: when it looks, what it keeps, what it tells, and what it does without anybody to tell it."""

import logging
from dataclasses import replace

import msgspec
import pytest

from twostroke.cluster.autoscaling import scaling_state
from twostroke.cluster.autoscaling.samples import Reason, RouterSample, ScalingDecision, Signals
from twostroke.cluster.autoscaling.scaling_decision import PolicyMemory
from twostroke.cluster.autoscaling.scaling_state import (
    STALE_S,
    ScalingOrder,
    ScalingState,
    ScalingView,
    home_targets,
    is_due,
    take_sample,
)
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits
from twostroke.protocol.settings import from_plain, to_plain
from twostroke.protocol.stats import Role

ORDER = ScalingOrder(
    AutoscalingConfig(
        enabled=True, prefill=RoleLimits(min=1, max=4), decode=RoleLimits(min=1, max=4), interval_s=2, cooldown_s=10
    ),
    {"prefill": 0.0, "decode": 0.0},
    ("prefill", "decode"),
)
NOW = 5000.0


def seen(at_s: float, *, prefill: int = 1, decode: int = 1, told_s: float | None = None) -> ScalingView:
    """A sample of an idle system; `told_s` is when its router told last, of the same clock."""
    numbers = {"prefill.running": float(prefill), "decode.running": float(decode)}
    told = RouterSample(100.0 + (at_s if told_s is None else told_s), numbers)
    return ScalingView({"r": told}, {"r"}, {"prefill": prefill, "decode": decode}, at_s, NOW + at_s)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[ScalingDecision]:
    """Replace the policy by one that returns the last of these decisions."""
    decisions = [ScalingDecision(1, 1, Reason.STEADY, Reason.STEADY, {"load": 0.5})]

    def decide(
        signals: Signals, memory: PolicyMemory, config: AutoscalingConfig
    ) -> tuple[ScalingDecision, PolicyMemory]:
        return decisions[-1], memory

    monkeypatch.setattr(scaling_state, "decide", decide)
    return decisions


def test_it_looks_about_once_a_second() -> None:
    assert is_due(None, 0.0)
    assert not is_due(10.0, 10.5)
    assert is_due(10.0, 11.0)


def test_a_change_is_logged_once_and_told_with_its_reason_and_time(
    decided: list[ScalingDecision], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        state, has_decided = take_sample(None, seen(0.0), ORDER)
        decided.append(ScalingDecision(1, 3, Reason.STEADY, Reason.DEMAND))
        state, _ = take_sample(state, seen(2.0), ORDER)
        decided.append(ScalingDecision(1, 3, Reason.STEADY, Reason.PENDING))
        state, _ = take_sample(state, seen(4.0, decode=3), ORDER)
    assert has_decided
    assert [record.message for record in caplog.records] == ["autoscaling: decode workers from 1 to 3 (demand)"]
    scaling = state.scaling
    assert scaling is not None
    assert scaling.targets == {"prefill": 1, "decode": 3}
    told = scaling.roles["decode"]
    assert (told.reason, told.change, told.changed_at) == ("pending", "demand", NOW + 2.0)
    assert scaling.roles["prefill"].change is None
    assert scaling.decisions == {"prefill": {"steady": 3}, "decode": {"steady": 1, "demand": 1, "pending": 1}}


@pytest.mark.parametrize(
    ("targets", "homes", "expected"),
    [
        ((1, 3), (2, 2), (2, 2)),  # one changes its role
        ((1, 4), (2, 2), (2, 3)),  # one changes its role, and one starts where more are missing
        ((1, 2), (3, 2), (1, 2)),  # two end, and none changes
        ((1, 3), (4, 1), (3, 1)),  # two change, and one of the many ends
        ((3, 3), (2, 2), (3, 3)),
        ((1, 1), (2, 2), (1, 1)),
    ],
)
def test_workers_change_their_roles_before_any_start(
    targets: tuple[int, int], homes: tuple[int, int], expected: tuple[int, int]
) -> None:
    roles: tuple[Role, Role] = ("prefill", "decode")
    found = home_targets(dict(zip(roles, targets, strict=True)), dict(zip(roles, homes, strict=True)))
    assert tuple(found.values()) == expected


def test_roles_that_have_changed_are_remembered_for_as_long_as_serve_keeps_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[tuple[int, int]] = []

    def decide(
        signals: Signals, memory: PolicyMemory, config: AutoscalingConfig
    ) -> tuple[ScalingDecision, PolicyMemory]:
        heard.append((signals.prefill.target, signals.decode.target))
        return ScalingDecision(1, 3, Reason.GIVEN, Reason.DEMAND), memory

    monkeypatch.setattr(scaling_state, "decide", decide)
    state, _ = take_sample(None, seen(0.0, prefill=2, decode=2), ORDER)
    assert state.scaling is not None
    assert (state.scaling.targets, state.scaling.replicas) == ({"prefill": 1, "decode": 3}, {"prefill": 2, "decode": 2})
    state, _ = take_sample(state, seen(2.0, prefill=2, decode=2), ORDER)
    take_sample(state, seen(4.0, prefill=2, decode=1), ORDER)
    assert heard == [(2, 2), (1, 3), (2, 1)]


def test_between_two_decisions_nothing_is_told(decided: list[ScalingDecision]) -> None:
    state, _ = take_sample(None, seen(0.0), ORDER)
    decided.append(ScalingDecision(1, 1, Reason.BETWEEN, Reason.BETWEEN))
    later, has_decided = take_sample(state, seen(1.0), ORDER)
    assert not has_decided
    assert later.scaling == state.scaling


def test_without_any_router_that_tells_of_demand_all_stays_and_this_is_said_once(
    decided: list[ScalingDecision], caplog: pytest.LogCaptureFixture
) -> None:
    state, _ = take_sample(None, seen(0.0), ORDER)
    decided.append(ScalingDecision(4, 4, Reason.DEMAND, Reason.DEMAND))
    for at_s in (STALE_S + 1, STALE_S + 2):
        state, has_decided = take_sample(state, seen(at_s, told_s=0.0), ORDER)
        assert not has_decided
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    _, has_decided = take_sample(state, seen(STALE_S + 3), ORDER)
    assert has_decided


def test_a_role_that_does_not_exist_is_not_decided_on(decided: list[ScalingDecision]) -> None:
    only = replace(ORDER, roles=("decode",))
    state, _ = take_sample(None, replace(seen(0.0), targets={"decode": 1}), only)
    assert state.scaling is not None
    assert state.scaling.targets == {"decode": 1}


def test_where_all_was_forgotten_nothing_shrinks_before_the_cooldown_is_over() -> None:
    """The real policy shrinks nothing after Serve's controller was started anew."""
    state: ScalingState | None = None
    targets: list[dict[str, int]] = []
    for second in range(20):
        state, has_decided = take_sample(state, seen(float(second), prefill=2, decode=3), ORDER)
        if has_decided and state.scaling is not None:
            targets.append(dict(state.scaling.targets))
            if targets[-1]["decode"] < 3:
                break
    assert targets[0] == {"prefill": 2, "decode": 3}
    assert targets[-1]["decode"] < 3
    assert second >= ORDER.config.cooldown_s - 1


def under_load(second: float, *, wall_s: float) -> ScalingView:
    """A sample of a system that prompts keep four prefill workers busy in; `wall_s` is how far the clocks are off."""
    costs = {"base_s": 0.001, "token_s": 0.001, "pair_s": 0.0, "row_s": 0.001, "context_s": 0.0, "num_samples": 9.0}
    workers = {"running": 4.0, "total_tokens": 1e6, **costs}
    arrived = {
        "requests": 3 * second,
        "prompt_tokens": 3000 * second,
        "output_tokens": 30 * second,
        "ended": 3 * second,
    }
    of_roles = {f"{role}.{name}": value for role in ("prefill", "decode") for name, value in workers.items()}
    numbers = {**arrived, "prompt_pairs": 0.0, "ttft_s": 2.0, "tpot_s": 0.1, **of_roles}
    return ScalingView(
        {"r": RouterSample(100.0 + second, numbers)}, {"r"}, {"prefill": 4, "decode": 1}, second, NOW + wall_s + second
    )


@pytest.mark.parametrize("step_s", [600.0, -600.0])
def test_a_clock_that_is_set_changes_no_decision(step_s: float) -> None:
    """The real policy ignores a clock that is set at second 30, of the head or of a router's node, under a constant
    load."""
    states: dict[float, ScalingState | None] = {0.0: None, step_s: None}
    told: dict[float, list[dict[str, int]]] = {0.0: [], step_s: []}
    for off_s in states:
        for second in range(60):
            state, has_decided = take_sample(
                states[off_s], under_load(second, wall_s=off_s if second >= 30 else 0.0), ORDER
            )
            states[off_s] = state
            if has_decided and state.scaling is not None:
                told[off_s].append(dict(state.scaling.targets))
    assert told[0.0] == told[step_s]
    assert told[0.0][-1]["prefill"] >= 3


def test_the_order_survives_its_way_through_serves_options() -> None:
    assert msgspec.convert(msgspec.to_builtins(ORDER, enc_hook=to_plain), ScalingOrder, dec_hook=from_plain) == ORDER
