"""`twostroke bench autoscaling`: what it counts, and when it is satisfied."""

import pytest

from twostroke.benchmarks.autoscaling import MachinePace, Sight, Story, holds, scaled_config, summarise
from twostroke.cluster.config.config import read_config
from twostroke.loadtests.plan import Fixed
from twostroke.loadtests.run_folder import Record, Status


def sight(at: float, running: tuple[int, int], target: tuple[int, int], change: str | None = None) -> Sight:
    roles = {
        role: {"running": running[i], "target": target[i], "last_change": change}
        for i, role in enumerate(("prefill", "decode"))
    }
    return Sight.of(at, roles)


def answer(ttft_s: float) -> Record:
    return Record(0, 0, 0.0, 0.0, ttft_s, "ok", token_s=(ttft_s,))


def story(*more: Record) -> Story:
    return Story(
        calm=[answer(0.1)],
        step=[answer(0.2), answer(0.4), *more],
        after=[answer(0.1)],
        sights=[
            sight(0.0, (1, 1), (1, 1)),
            sight(12.0, (1, 1), (1, 2), "demand"),
            sight(15.0, (1, 2), (2, 2), "demand"),
            sight(18.0, (2, 2), (2, 2), "demand"),
            sight(50.0, (1, 1), (1, 1), "spare"),
        ],
        rose_at=10.0,
        fell_at=40.0,
    )


def test_a_step_is_followed_out_and_in() -> None:
    figures = summarise(story())
    assert (figures["answers"], figures["lost"]) == (4, 0)
    assert (figures["decode_asked_after_s"], figures["decode_there_after_s"]) == (2.0, 5.0)
    assert (figures["prefill_asked_after_s"], figures["prefill_there_after_s"]) == (5.0, 8.0)
    assert (figures["prefill_ran_most"], figures["prefill_at_end"], figures["prefill_changes"]) == (2, 1, 2)
    assert figures["decode_reasons"] == ["demand", "spare"]
    assert figures["back_after_s"] == pytest.approx(10.0)
    assert (figures["ttft_p50_step_s"], figures["ttft_p99_step_s"]) == (0.2, 0.4)
    assert holds(figures)


@pytest.mark.parametrize("status", ["failed", "refused"])
def test_an_answer_that_did_not_come_is_lost(status: Status) -> None:
    figures = summarise(story(Record(0, 0, 0.0, 0.0, 1.0, status, error="HTTP 500")))
    assert (figures["lost"], figures["first_failure"]) == (1, "HTTP 500")
    assert not holds(figures)


def test_workers_that_never_came_or_never_left_are_no_success() -> None:
    never_came, never_left = story(), story()
    never_came.sights = [sight(0.0, (1, 1), (1, 1)), sight(20.0, (1, 1), (2, 2)), sight(50.0, (1, 1), (1, 1))]
    never_left.sights = never_left.sights[:-1]
    assert not holds(summarise(never_came))
    assert not holds(summarise(never_left))
    assert summarise(never_left)["back_after_s"] is None


def test_the_servers_configuration_is_a_sound_one() -> None:
    pace = MachinePace(rate=4.0, ttft_s=0.06, tpot_s=0.004)
    config = read_config(scaled_config(pace, Fixed(512, 256), most=3, cooldown_s=30))
    assert config.counts == {"prefill": (1, 1, 3), "decode": (1, 1, 3)}
    assert config.decode.num_blocks == 9 * (768 // 16 + 1)  # for twice 4 * 256 * 0.004 requests
