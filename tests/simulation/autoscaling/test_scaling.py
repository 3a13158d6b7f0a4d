"""What the policy must hold on synthetic traces; `python -m tests.simulation.autoscaling` has the public ones."""

import pytest

from tests.simulation.autoscaling.compare import Setting, fleet_for_busiest, serve, serve_with_fleet
from tests.simulation.autoscaling.kinds import SMALL
from tests.simulation.autoscaling.outcome import Outcome
from tests.simulation.autoscaling.scalers import Fixed, Ours, RayServe
from tests.simulation.autoscaling.traffic import Trace, bursts, diurnal, steps
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits

SETTING = Setting(SMALL, ttft_s=5.0, tpot_s=0.02, startup_s=45.0)


def limited_to(fleet: tuple[int, int], cooldown_s: float) -> AutoscalingConfig:
    """No more workers than a fleet for the peak has."""
    return AutoscalingConfig(
        prefill=RoleLimits(min=1, max=fleet[0]), decode=RoleLimits(min=1, max=fleet[1]), cooldown_s=cooldown_s
    )


def for_the_busiest(trace: Trace) -> tuple[tuple[int, int], Outcome]:
    """An over-provisioned fixed fleet, and what comes of it."""
    fleet = fleet_for_busiest(trace, SETTING, AutoscalingConfig())
    return fleet, serve(trace, SETTING, Fixed(*fleet), fleet)


# Of an hour of bursts, the first 20 minutes go by before any worker may go.
@pytest.mark.parametrize(
    ("trace", "cooldown_s", "hours"),
    [(bursts(1, 3600.0), 1200.0, 0.8), (diurnal(1, 5400.0, 1.0, 12.0), 600.0, 0.6)],
    ids=["bursts", "diurnal"],
)
def test_nearly_as_much_is_in_time_as_with_a_fleet_for_the_peak_for_part_of_its_hours(
    trace: Trace, cooldown_s: float, hours: float
) -> None:
    fleet, fixed = for_the_busiest(trace)
    start = fleet if trace.name == "bursts" else (1, 1)
    ours = serve(trace, SETTING, Ours(limited_to(fleet, cooldown_s)), start)
    assert ours.attainment >= fixed.attainment - 0.03
    assert ours.worker_hours <= hours * fixed.worker_hours
    assert max(ours.prefill_reversals, ours.decode_reversals) <= 2
    rays = serve(trace, SETTING, RayServe(limited_to(fleet, cooldown_s), 2.0, 16.0), start)
    assert ours.attainment > rays.attainment
    assert ours.worker_hours < rays.worker_hours


def test_four_times_the_load_brings_both_roles_out_and_its_end_brings_them_back() -> None:
    trace = steps(0, ((0.0, 2.0), (300.0, 8.0), (900.0, 2.0)), 1800.0, prompt=920, output=250)
    scaler = Ours(limited_to((8, 8), 300.0))
    result, fleet = serve_with_fleet(trace, SETTING, scaler, (1, 1))
    growing = [one for one in scaler.decisions if 300 <= one[0] < 900]
    assert growing[0][0] < 340
    assert growing[-1][1].prefill >= 2
    assert growing[-1][1].decode >= 2
    assert (fleet.prefill_target, fleet.decode_target) == (1, 1)
    assert result.attainment > 0.85


def test_two_cooldowns_after_traffic_has_ended_the_fewest_workers_are_left() -> None:
    trace = steps(0, ((0.0, 12.0),), 900.0)
    config = limited_to((8, 8), 200.0)
    _, fleet = serve_with_fleet(trace, SETTING, Ours(config), (4, 3), after_s=2 * config.cooldown_s)
    assert (fleet.prefill_target, fleet.decode_target) == (1, 1)
    assert len(fleet.prefill) + len(fleet.decode) == 2
