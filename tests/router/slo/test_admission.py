"""Single decisions of admission, by numbers. Admission under load: tests/simulation/policies."""

import pytest

from tests.router.routing.knowing import info
from twostroke.protocol.requests import GenerateRequest, Peer, Promise, SamplingParams
from twostroke.protocol.stats import QueuedWork, WorkerStats
from twostroke.router.request_state import ChoiceJob, Path, PathEstimate, RequestState
from twostroke.router.slo.admission import PROBE_S, Admission, Overloaded
from twostroke.router.slo.classes import MEMORY_S, SLOClass, SLOConfig

INTERACTIVE = SLOClass(name="interactive", ttft_s=0.5, tpot_s=0.06, priority=10, share=0.3)
BATCH = SLOClass(name="batch", ttft_s=5.0, tpot_s=0.1, priority=0, share=0.1)
FREE = SLOClass(name="free")
CLASSES = SLOConfig(classes=(INTERACTIVE, BATCH, FREE))

PREFILL, DECODE = info("p0"), info("d0")


def request_of(one: SLOClass, *, outputs: int = 20) -> GenerateRequest:
    promise = Promise(one.name, one.priority, one.share, one.ttft_s, one.tpot_s)
    return GenerateRequest("", "", (1,) * 100, 100, SamplingParams(), outputs, promise=promise)


class Scene:
    """Admission with a clock and a decode worker's numbers that a test sets."""

    def __init__(self, config: SLOConfig = CLASSES, num_routers: int = 1):
        self.now = 100.0
        self.stats: dict[Peer, WorkerStats] = {}
        self.admission = Admission(config=config, stats=self.stats.get, clock=lambda: self.now, num_routers=num_routers)

    def ask(
        self,
        one: SLOClass,
        *,
        queue_s: float = 0.0,
        prefill_s: float = 0.1,
        step_s: float = 0.02,
        tier_read_s: float = 0.0,
    ) -> RequestState:
        """Raises Overloaded."""
        estimate = PathEstimate(queue_s, 0.0, prefill_s, 0.0, 0.0, step_s, tier_read_s=tier_read_s)
        self.admission.admit(request_of(one), Path(PREFILL, DECODE, estimate=estimate), 0.0, False)
        return RequestState(ChoiceJob(request_of(one)), self.now, admit=self.now, expected=estimate)

    def retry_after_s(self, one: SLOClass, **times: float) -> int | None:
        """None: let in."""
        try:
            self.ask(one, **times)
        except Overloaded as error:
            return error.retry_after_s
        return None


def test_a_request_is_let_in_while_its_first_token_can_come_in_time() -> None:
    scene = Scene()
    scene.ask(INTERACTIVE, queue_s=0.3)
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.6) == 1
    assert scene.retry_after_s(BATCH, queue_s=0.6) is None


def test_a_read_from_tiers_counts_for_the_first_token() -> None:
    scene = Scene()
    scene.ask(INTERACTIVE, queue_s=0.1, tier_read_s=0.2)
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.1) is None
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.1, tier_read_s=0.35) is not None
    with pytest.raises(Overloaded, match=r"takes 0.7 s even alone"):
        scene.ask(INTERACTIVE, tier_read_s=0.6)


def test_where_nothing_is_known_or_admission_is_off_all_are_let_in() -> None:
    scene = Scene()
    scene.admission.admit(request_of(INTERACTIVE), Path(PREFILL, DECODE), 0.0, False)
    assert Scene(SLOConfig(classes=(INTERACTIVE,), admission=False)).retry_after_s(INTERACTIVE, queue_s=9.0) is None


def test_the_longer_the_queue_the_later_a_request_is_told_to_come_back() -> None:
    waits_s = []
    for queue_s in (1.0, 5.0, 20.0, 1000.0):
        scene = Scene()
        scene.ask(INTERACTIVE)
        waits_s.append(scene.retry_after_s(INTERACTIVE, queue_s=queue_s))
    assert waits_s[0] == 1
    assert 5 <= waits_s[1] <= 7
    assert 20 <= waits_s[2] <= 23
    assert waits_s[3] == 60


def test_the_more_were_refused_lately_the_later_the_next_is_told_to_come_back() -> None:
    scene = Scene()
    for _ in range(10):
        scene.ask(INTERACTIVE)
    waits_s = [scene.retry_after_s(INTERACTIVE, queue_s=1.0) for _ in range(21)]
    assert waits_s[0] == 1
    assert waits_s == sorted(waits_s)
    assert waits_s[20] == pytest.approx(20 * MEMORY_S / 11, abs=2), "at the pace of those that were let in"


def test_who_is_promised_nothing_is_refused_by_an_endless_queue_only() -> None:
    scene = Scene()
    assert scene.retry_after_s(FREE, queue_s=300.0, step_s=10.0) is None
    assert scene.retry_after_s(FREE, queue_s=630.0) == 30


def test_running_requests_keep_their_promise() -> None:
    scene = Scene()
    scene.stats[DECODE.peer] = WorkerStats(num_running=10, tightest_tpot_s=0.03)
    scene.ask(BATCH, step_s=0.029)
    assert scene.retry_after_s(BATCH, step_s=0.031) is not None


def test_a_lower_class_leaves_room_for_a_higher_one_that_asked_lately() -> None:
    scene = Scene()
    scene.ask(BATCH, step_s=0.08)  # within its own 0.1
    scene.ask(INTERACTIVE)
    assert scene.retry_after_s(BATCH, step_s=0.08) is not None  # beyond the 0.06 of interactive requests
    scene.now += 60
    assert scene.retry_after_s(BATCH, step_s=0.08) is None


SHARELESS = SLOClass(name="shareless", ttft_s=1.0, priority=5)


def test_a_lower_class_keeps_some_of_its_limit_free_for_those_above() -> None:
    config = SLOConfig(classes=(INTERACTIVE, SHARELESS))
    alone, beside = Scene(config), Scene(config)
    beside.ask(INTERACTIVE, prefill_s=0.001)
    for scene in (alone, beside):
        scene.ask(SHARELESS, prefill_s=0.001)
    assert alone.retry_after_s(SHARELESS, queue_s=0.9, prefill_s=0.01) is None
    assert beside.retry_after_s(SHARELESS, queue_s=0.9, prefill_s=0.01) is not None


def test_what_higher_classes_want_of_a_worker_delays_the_lower() -> None:
    scene = Scene(SLOConfig(classes=(INTERACTIVE, SHARELESS)))
    for _ in range(40):  # 0.08 s every 0.1 s
        scene.now += 0.1
        scene.ask(INTERACTIVE, prefill_s=0.08)
    assert scene.retry_after_s(SHARELESS, queue_s=0.05, prefill_s=0.05) is None  # 0.5 s, at a fifth of the worker
    assert scene.retry_after_s(SHARELESS, queue_s=0.25, prefill_s=0.05) is not None  # 1.5 s


def test_a_share_bounds_what_higher_classes_take() -> None:
    def wanted_by_higher(stats: WorkerStats) -> Scene:
        scene = Scene()
        scene.stats[PREFILL.peer] = stats
        for _ in range(40):  # all of the worker
            scene.now += 0.1
            scene.ask(INTERACTIVE, prefill_s=0.1)
        scene.ask(BATCH, prefill_s=0.001)  # so that the next is no probe
        return scene

    assert wanted_by_higher(WorkerStats()).retry_after_s(BATCH, queue_s=1.0) is None  # 0.1 s at a tenth of the worker
    waiting = WorkerStats(queued=(QueuedWork("batch", 0, 0.1, tokens=600, requests=6),))  # 0.6 s before it
    assert wanted_by_higher(waiting).retry_after_s(BATCH, queue_s=1.0) is not None


def test_a_class_below_its_share_may_use_all_of_its_limit() -> None:
    scene = Scene()
    for _ in range(20):
        scene.ask(INTERACTIVE, prefill_s=0.001)
    scene.ask(BATCH, prefill_s=0.001)  # so that the next is no probe
    assert scene.retry_after_s(BATCH, queue_s=4.4, prefill_s=0.1) is None
    for _ in range(20):
        scene.ask(BATCH, prefill_s=0.001)
    assert scene.retry_after_s(BATCH, queue_s=4.5, prefill_s=0.1) is not None


def test_a_class_that_was_refused_gets_in_only_when_there_is_some_room() -> None:
    scene = Scene(SLOConfig(classes=(INTERACTIVE,)))
    scene.ask(INTERACTIVE)
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.45) is not None
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.38) is not None
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.3) is None
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.38) is None


def test_after_long_refusal_one_is_let_in_to_see_whether_predictions_hold() -> None:
    scene = Scene(SLOConfig(classes=(SLOClass(name="a", ttft_s=0.1),)))
    one = scene.admission._config.classes[0]
    scene.ask(one, prefill_s=0.01)
    assert scene.retry_after_s(one, queue_s=1.0) is not None
    scene.now += PROBE_S + 1
    assert scene.retry_after_s(one, queue_s=1.0) is None
    assert scene.retry_after_s(one, queue_s=1.0) is not None


def test_a_worker_thought_too_slow_even_for_a_prompt_alone_is_tried_though_others_let_in_what_comes() -> None:
    scene = Scene()
    scene.ask(INTERACTIVE)
    waits_s = []
    for _ in range(20):  # 0.5 s each
        scene.now += 0.5
        quick = Path(None, DECODE, estimate=PathEstimate(0.0, 0.0, 0.01, 0.0, 0.0, 0.02))
        scene.admission.admit(request_of(INTERACTIVE), quick, 0.0, False)
        waits_s.append(scene.retry_after_s(INTERACTIVE, prefill_s=2.0))
    assert waits_s[:8] == [4, 3, 3, 2, 2, 1, 1, None], "4 s after the last prompt there, and until then told when"
    assert waits_s[8:] == [4, 3, 3, 2, 2, 1, 1, None, 4, 3, 3, 2]
    scene.now += 60
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.4, prefill_s=2.0) is None, "nothing was admitted for long"
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.4, prefill_s=2.0) == 4


def test_a_cost_probe_is_let_in_whatever_is_predicted_of_its_first_token_but_slows_no_other_request() -> None:
    scene = Scene()
    scene.ask(INTERACTIVE)

    def probe(prefill_s: float, step_s: float) -> None:
        path = Path(PREFILL, DECODE, estimate=PathEstimate(0.0, 0.0, prefill_s, 0.0, 0.0, step_s), is_cost_probe=True)
        scene.admission.admit(request_of(INTERACTIVE), path, 0.0, False)

    probe(2.0, 0.02)
    scene.stats[DECODE.peer] = WorkerStats(num_running=10, tightest_tpot_s=0.03)
    with pytest.raises(Overloaded):
        probe(0.1, 0.04)


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
    scene = Scene()
    for known in (INTERACTIVE, BATCH, FREE):
        scene.ask(known, prefill_s=0.001)  # so that the next is no probe
    with pytest.raises(Overloaded) as caught:
        scene.ask(one, **times)
    assert caught.value.limit == limit


def test_a_prompt_too_long_for_its_class_is_told_what_to_do() -> None:
    scene = Scene()
    scene.ask(INTERACTIVE)
    with pytest.raises(Overloaded, match="choose another class, or loosen the promise"):
        scene.ask(INTERACTIVE, prefill_s=2.0)


def test_predictions_that_proved_too_short_are_corrected_and_forgotten() -> None:
    scene = Scene()
    for _ in range(60):
        state = scene.ask(INTERACTIVE, queue_s=0.1)
        state.first_token = scene.now + 0.4
        scene.admission.ended(request_of(INTERACTIVE), state.num_output_tokens, state.predicted, state.tpot_s)
        scene.now += 0.1
    assert scene.admission.ttft_correction("interactive") > 1.5
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.3) is not None
    scene.now += 300
    assert scene.admission.ttft_correction("interactive") == pytest.approx(1.0, abs=0.01)
    assert scene.retry_after_s(INTERACTIVE, queue_s=0.3) is None


def test_each_of_many_routers_expects_the_others_to_send_as_much() -> None:
    def sent_at_once(num_routers: int) -> int:
        scene = Scene(num_routers=num_routers)
        while scene.retry_after_s(INTERACTIVE, queue_s=0.0, prefill_s=0.06) is None:
            pass  # what it sends itself is in the estimates of a real path; here it is not
        return int(scene.admission._classes["interactive"].admitted.value(scene.now))

    assert sent_at_once(2) == 8  # with 0.06 s of its own for the last, beside 0.42 s of the other router
    assert sent_at_once(4) == 3


def test_choices_of_an_admitted_response_are_not_judged_again() -> None:
    scene = Scene()
    late = Path(PREFILL, DECODE, estimate=PathEstimate(9.0, 0.0, 0.1, 0.0, 0.0, 0.02))
    scene.ask(INTERACTIVE)
    scene.admission.admit(request_of(INTERACTIVE), late, 0.0, True)


def test_estimates_of_what_requests_put_out_follow_what_they_do() -> None:
    scene = Scene()
    request: GenerateRequest = request_of(BATCH, outputs=1000)
    for _ in range(100):
        state = scene.ask(BATCH)
        state.tokens = [0] * 10
        scene.admission.ended(request, state.num_output_tokens, state.predicted, state.tpot_s)
    assert scene.admission._classes["batch"].expected_output(1000) == pytest.approx(10)
    assert scene.admission._classes["batch"].expected_output(5) == 5
