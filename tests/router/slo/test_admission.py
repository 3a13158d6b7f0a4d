"""Single decisions of admission, by numbers. Admission under load: tests/simulation/policies."""

import pytest

from tests.router.routing.knowing import info
from twostroke.protocol.requests import GenerateRequest, Peer, Promise, SamplingParams
from twostroke.protocol.stats import QueuedWork, WorkerStats
from twostroke.router.fleet import Path, PathEstimate
from twostroke.router.observe.stages import SequenceStages
from twostroke.router.slo.admission import PROBE_S, Admission, Overloaded
from twostroke.router.slo.attainment import MEMORY_S
from twostroke.router.slo.classes import SLOClass, SLOConfig

INTERACTIVE = SLOClass(name="interactive", ttft_s=0.5, tpot_s=0.06, priority=10, share=0.3)
BATCH = SLOClass(name="batch", ttft_s=5.0, tpot_s=0.1, priority=0, share=0.1)
FREE = SLOClass(name="free")
CLASSES = SLOConfig(classes=(INTERACTIVE, BATCH, FREE))

PREFILL, DECODE = info("p0"), info("d0")


def request_of(one: SLOClass, *, outputs: int = 20) -> GenerateRequest:
    promise = Promise(one.name, one.priority, one.share, one.ttft_s, one.tpot_s)
    return GenerateRequest("", "", (1,) * 100, 100, SamplingParams(), outputs, promise=promise)


class Door:
    """Admission with a clock and a decode worker's numbers that a test sets."""

    def __init__(self, config: SLOConfig = CLASSES, num_routers: int = 1):
        self.now = 100.0
        self.stats: dict[Peer, WorkerStats] = {}
        self.admission = Admission(config=config, stats=self.stats.get, clock=lambda: self.now, num_routers=num_routers)

    def ask(
        self, one: SLOClass, *, queue_s: float = 0.0, prefill_s: float = 0.1, step_s: float = 0.02
    ) -> SequenceStages:
        """Raises Overloaded."""
        estimate = PathEstimate(queue_s, 0.0, prefill_s, 0.0, 0.0, step_s)
        self.admission.admit(request_of(one), Path(PREFILL, DECODE, estimate=estimate), 0.0, False)
        return SequenceStages(self.now, admit=self.now, expected=estimate)

    def retry_after_s(self, one: SLOClass, **times: float) -> int | None:
        """None: let in."""
        try:
            self.ask(one, **times)
        except Overloaded as error:
            return error.retry_after_s
        return None


def test_a_request_is_let_in_while_its_first_token_can_come_in_time() -> None:
    door = Door()
    door.ask(INTERACTIVE, queue_s=0.3)
    assert door.retry_after_s(INTERACTIVE, queue_s=0.6) == 1
    assert door.retry_after_s(BATCH, queue_s=0.6) is None


def test_where_nothing_is_known_or_admission_is_off_all_are_let_in() -> None:
    door = Door()
    door.admission.admit(request_of(INTERACTIVE), Path(PREFILL, DECODE), 0.0, False)
    assert Door(SLOConfig(classes=(INTERACTIVE,), admission=False)).retry_after_s(INTERACTIVE, queue_s=9.0) is None


def test_the_longer_the_queue_the_later_a_request_is_told_to_come_back() -> None:
    told = []
    for queue_s in (1.0, 5.0, 20.0, 1000.0):
        door = Door()
        door.ask(INTERACTIVE)
        told.append(door.retry_after_s(INTERACTIVE, queue_s=queue_s))
    assert told[0] == 1
    assert 5 <= told[1] <= 7
    assert 20 <= told[2] <= 23
    assert told[3] == 60


def test_the_more_were_refused_lately_the_later_the_next_is_told_to_come_back() -> None:
    door = Door()
    for _ in range(10):
        door.ask(INTERACTIVE)
    told = [door.retry_after_s(INTERACTIVE, queue_s=1.0) for _ in range(21)]
    assert told[0] == 1
    assert told == sorted(told)
    assert told[20] == pytest.approx(20 * MEMORY_S / 11, abs=2), "at the pace of those that were let in"


def test_who_is_promised_nothing_is_refused_by_an_endless_queue_only() -> None:
    door = Door()
    assert door.retry_after_s(FREE, queue_s=300.0, step_s=10.0) is None
    assert door.retry_after_s(FREE, queue_s=630.0) == 30


def test_running_requests_keep_their_promise() -> None:
    door = Door()
    door.stats[DECODE.peer] = WorkerStats(num_running=10, tightest_tpot_s=0.03)
    door.ask(BATCH, step_s=0.029)
    assert door.retry_after_s(BATCH, step_s=0.031) is not None


def test_a_lower_class_leaves_room_for_a_higher_one_that_asked_lately() -> None:
    door = Door()
    door.ask(BATCH, step_s=0.08)  # within its own 0.1
    door.ask(INTERACTIVE)
    assert door.retry_after_s(BATCH, step_s=0.08) is not None  # beyond the 0.06 of interactive requests
    door.now += 60
    assert door.retry_after_s(BATCH, step_s=0.08) is None


SHARELESS = SLOClass(name="shareless", ttft_s=1.0, priority=5)


def test_a_lower_class_keeps_some_of_its_limit_free_for_those_above() -> None:
    config = SLOConfig(classes=(INTERACTIVE, SHARELESS))
    alone, beside = Door(config), Door(config)
    beside.ask(INTERACTIVE, prefill_s=0.001)
    for door in (alone, beside):
        door.ask(SHARELESS, prefill_s=0.001)
    assert alone.retry_after_s(SHARELESS, queue_s=0.9, prefill_s=0.01) is None
    assert beside.retry_after_s(SHARELESS, queue_s=0.9, prefill_s=0.01) is not None


def test_what_higher_classes_want_of_a_worker_delays_the_lower() -> None:
    door = Door(SLOConfig(classes=(INTERACTIVE, SHARELESS)))
    for _ in range(40):  # 0.08 s every 0.1 s
        door.now += 0.1
        door.ask(INTERACTIVE, prefill_s=0.08)
    assert door.retry_after_s(SHARELESS, queue_s=0.05, prefill_s=0.05) is None  # 0.5 s, at a fifth of the worker
    assert door.retry_after_s(SHARELESS, queue_s=0.25, prefill_s=0.05) is not None  # 1.5 s


def test_a_share_bounds_what_higher_classes_take() -> None:
    def wanted_by_higher(stats: WorkerStats) -> Door:
        door = Door()
        door.stats[PREFILL.peer] = stats
        for _ in range(40):  # all of the worker
            door.now += 0.1
            door.ask(INTERACTIVE, prefill_s=0.1)
        door.ask(BATCH, prefill_s=0.001)  # so that the next is no probe
        return door

    assert wanted_by_higher(WorkerStats()).retry_after_s(BATCH, queue_s=1.0) is None  # 0.1 s at a tenth of the worker
    waiting = WorkerStats(queued=(QueuedWork("batch", 0, 0.1, tokens=600, requests=6),))  # 0.6 s before it
    assert wanted_by_higher(waiting).retry_after_s(BATCH, queue_s=1.0) is not None


def test_a_class_below_its_share_may_use_all_of_its_limit() -> None:
    door = Door()
    for _ in range(20):
        door.ask(INTERACTIVE, prefill_s=0.001)
    door.ask(BATCH, prefill_s=0.001)  # so that the next is no probe
    assert door.retry_after_s(BATCH, queue_s=4.4, prefill_s=0.1) is None
    for _ in range(20):
        door.ask(BATCH, prefill_s=0.001)
    assert door.retry_after_s(BATCH, queue_s=4.5, prefill_s=0.1) is not None


def test_a_class_that_was_refused_gets_in_only_when_there_is_some_room() -> None:
    door = Door(SLOConfig(classes=(INTERACTIVE,)))
    door.ask(INTERACTIVE)
    assert door.retry_after_s(INTERACTIVE, queue_s=0.45) is not None
    assert door.retry_after_s(INTERACTIVE, queue_s=0.38) is not None
    assert door.retry_after_s(INTERACTIVE, queue_s=0.3) is None
    assert door.retry_after_s(INTERACTIVE, queue_s=0.38) is None


def test_after_long_refusal_one_is_let_in_to_see_whether_predictions_hold() -> None:
    door = Door(SLOConfig(classes=(SLOClass(name="a", ttft_s=0.1),)))
    one = door.admission._config.classes[0]
    door.ask(one, prefill_s=0.01)
    assert door.retry_after_s(one, queue_s=1.0) is not None
    door.now += PROBE_S + 1
    assert door.retry_after_s(one, queue_s=1.0) is None
    assert door.retry_after_s(one, queue_s=1.0) is not None


def test_a_worker_thought_too_slow_even_for_a_prompt_alone_is_tried_though_others_let_in_what_comes() -> None:
    door = Door()
    door.ask(INTERACTIVE)
    verdicts = []
    for _ in range(20):  # 0.5 s each
        door.now += 0.5
        quick = Path(None, DECODE, estimate=PathEstimate(0.0, 0.0, 0.01, 0.0, 0.0, 0.02))
        door.admission.admit(request_of(INTERACTIVE), quick, 0.0, False)
        verdicts.append(door.retry_after_s(INTERACTIVE, prefill_s=2.0))
    assert verdicts[:8] == [4, 3, 3, 2, 2, 1, 1, None], "4 s after the last prompt there, and until then told when"
    assert verdicts[8:] == [4, 3, 3, 2, 2, 1, 1, None, 4, 3, 3, 2]
    door.now += 60
    assert door.retry_after_s(INTERACTIVE, queue_s=0.4, prefill_s=2.0) is None, "nothing was admitted for long"
    assert door.retry_after_s(INTERACTIVE, queue_s=0.4, prefill_s=2.0) == 4


def test_a_path_on_trial_is_let_in_whatever_is_thought_of_its_first_token_but_slows_nobody_down() -> None:
    door = Door()
    door.ask(INTERACTIVE)

    def trial(prefill_s: float, step_s: float) -> None:
        path = Path(PREFILL, DECODE, estimate=PathEstimate(0.0, 0.0, prefill_s, 0.0, 0.0, step_s), is_cost_probe=True)
        door.admission.admit(request_of(INTERACTIVE), path, 0.0, False)

    trial(2.0, 0.02)
    door.stats[DECODE.peer] = WorkerStats(num_running=10, tightest_tpot_s=0.03)
    with pytest.raises(Overloaded):
        trial(0.1, 0.04)


@pytest.mark.parametrize(
    ("one", "times", "limit"),
    [
        (INTERACTIVE, {"queue_s": 0.6}, "ttft"),
        (INTERACTIVE, {"prefill_s": 2.0}, "ttft"),
        (INTERACTIVE, {"step_s": 1.0}, "tpot"),
        (FREE, {"queue_s": 1000.0}, "queue"),
    ],
)
def test_a_refusal_tells_which_limit_it_is_about(one: SLOClass, times: dict[str, float], limit: str) -> None:
    door = Door()
    for known in (INTERACTIVE, BATCH, FREE):
        door.ask(known, prefill_s=0.001)  # so that the next is no probe
    with pytest.raises(Overloaded) as caught:
        door.ask(one, **times)
    assert caught.value.limit == limit


def test_a_prompt_too_long_for_its_class_is_told_what_to_do() -> None:
    door = Door()
    door.ask(INTERACTIVE)
    with pytest.raises(Overloaded, match="choose another class, or loosen the promise"):
        door.ask(INTERACTIVE, prefill_s=2.0)


def test_predictions_that_proved_too_short_are_corrected_and_forgotten() -> None:
    door = Door()
    for _ in range(60):
        stages = door.ask(INTERACTIVE, queue_s=0.1)
        stages.attempts += 1
        stages.first_token = door.now + 0.4
        door.admission.ended(request_of(INTERACTIVE), stages.num_output_tokens, stages.predicted, stages.tpot_s)
        door.now += 0.1
    assert door.admission.ttft_correction("interactive") > 1.5
    assert door.retry_after_s(INTERACTIVE, queue_s=0.3) is not None
    door.now += 300
    assert door.admission.ttft_correction("interactive") == pytest.approx(1.0, abs=0.01)
    assert door.retry_after_s(INTERACTIVE, queue_s=0.3) is None


def test_each_of_many_routers_expects_the_others_to_send_as_much() -> None:
    def sent_at_once(num_routers: int) -> int:
        door = Door(num_routers=num_routers)
        while door.retry_after_s(INTERACTIVE, queue_s=0.0, prefill_s=0.06) is None:
            pass  # what it sends itself is in the estimates of a real path; here it is not
        return int(door.admission._classes["interactive"].admitted.value(door.now))

    assert sent_at_once(2) == 8  # with 0.06 s of its own for the last, beside 0.42 s of the other router
    assert sent_at_once(4) == 3


def test_choices_of_an_admitted_response_are_not_judged_again() -> None:
    door = Door()
    late = Path(PREFILL, DECODE, estimate=PathEstimate(9.0, 0.0, 0.1, 0.0, 0.0, 0.02))
    door.ask(INTERACTIVE)
    door.admission.admit(request_of(INTERACTIVE), late, 0.0, True)


def test_estimates_of_what_requests_put_out_follow_what_they_do() -> None:
    door = Door()
    request: GenerateRequest = request_of(BATCH, outputs=1000)
    for _ in range(100):
        stages = door.ask(BATCH)
        stages.num_output_tokens = 10
        door.admission.ended(request, stages.num_output_tokens, stages.predicted, stages.tpot_s)
    assert door.admission._classes["batch"].expected_output(1000) == pytest.approx(10)
    assert door.admission._classes["batch"].expected_output(5) == 5
