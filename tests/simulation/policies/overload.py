"""Five times the load that two prefill and two decode workers can take, of two classes, and what became of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.policies.deployment import Run, Served, serve
from tests.simulation.policies.results import percentile
from tests.simulation.policies.traffic import TracedRequest, strangers
from twostroke.protocol.requests import Promise
from twostroke.router.slo.classes import SLOClass, SLOConfig

CAPACITY_PER_S = 15.0
"""The highest rate at which nine of ten requests get what they were promised."""
OVERLOAD = 5.0
INTERACTIVE = SLOClass(name="interactive", ttft_s=1.0, tpot_s=0.03, priority=10)
BATCH = SLOClass(name="batch", ttft_s=4.0, tpot_s=0.1, share=0.1)

WARM_UP_S, USUAL_S, OVERLOAD_S, AFTERWARDS_S = 10.0, 20.0, 15.0, 20.0
RECOVERED_S = 10.0


@dataclass(frozen=True)
class Phase:
    """What became of the requests of one span of time."""

    served: Sequence[Served]
    seconds: float

    def of(self, one: SLOClass) -> list[Served]:
        """Those of a class."""
        return [served for served in self.served if served.promise.class_name == one.name]

    def refused_share(self, one: SLOClass) -> float:
        """How many of a class's requests were refused, of all of them."""
        requests = self.of(one)
        return sum(served.refused for served in requests) / len(requests)

    def admitted(self, one: SLOClass) -> list[Served]:
        """A class's requests that were not refused."""
        return [served for served in self.of(one) if not served.refused]

    @property
    def goodput_per_s(self) -> float:
        """Requests a second that got what they were promised."""
        return sum(map(is_met, self.served)) / self.seconds

    @property
    def attainment(self) -> float:
        """The share of all requests that did."""
        return sum(map(is_met, self.served)) / len(self.served)

    @property
    def worst_ttft(self) -> float:
        """P99 of the admitted requests' times to first token, over what was promised, of the class that is worse."""
        return max(
            percentile([s.ttft_s / (s.promise.ttft_left_s or 1.0) for s in self.admitted(c)], 0.99) for c in _ALL
        )

    @property
    def worst_tpot(self) -> float:
        """The same of the time per token after the first."""
        return max(percentile([s.tpot_s / (s.promise.tpot_s or 1.0) for s in self.admitted(c)], 0.99) for c in _ALL)


@dataclass(frozen=True)
class Outcome:
    """The phases of a run."""

    usual: Phase
    overload: Phase
    recovered: Phase


_ALL = (INTERACTIVE, BATCH)


def run_overload(seed: int, *, batch: SLOClass = BATCH, admission: bool = True) -> Outcome:
    """Usual load, then five times that, then usual load again."""
    trace: list[TracedRequest] = []
    at_s = 0.0
    starts: list[float] = []
    for seconds, rate in ((WARM_UP_S, 0.3), (USUAL_S, 1.0), (OVERLOAD_S, OVERLOAD), (AFTERWARDS_S, 1.0)):
        starts.append(at_s)
        trace += _arrivals(f"{seed} {at_s}", at_s, seconds, rate * CAPACITY_PER_S, (INTERACTIVE, batch))
        at_s += seconds
    _, usual_s, overload_s, afterwards_s = starts
    run = serve(trace, "kv_aware", slo=SLOConfig(classes=(INTERACTIVE, batch), admission=admission))
    return Outcome(
        usual=_phase(run, usual_s, overload_s),
        overload=_phase(run, overload_s, afterwards_s),
        recovered=_phase(run, afterwards_s + RECOVERED_S, at_s),
    )


def is_met(served: Served) -> bool:
    """Whether a request got what it was promised."""
    promise = served.promise
    is_in_time = promise.ttft_left_s is None or served.ttft_s <= promise.ttft_left_s
    is_quick = promise.tpot_s is None or served.tpot_s <= promise.tpot_s
    return not served.refused and is_in_time and is_quick


def _arrivals(
    seed: str, begin_s: float, seconds: float, rate_per_s: float, classes: tuple[SLOClass, ...]
) -> list[TracedRequest]:
    draw = random.Random(seed)
    number = int(seconds * rate_per_s * 2)
    requests = strangers(
        draw.randrange(1 << 30), num_requests=number, rate_per_s=rate_per_s, prompt_tokens=600.0, sigma=0.4
    )
    return [
        TracedRequest(begin_s + one.at_s, one.token_ids, one.num_output_tokens, _promise(draw.choice(classes)))
        for one in requests
        if one.at_s < seconds
    ]


def _promise(one: SLOClass) -> Promise:
    return Promise(one.name, one.priority, one.share, one.ttft_s, one.tpot_s)


def _phase(run: Run, begin_s: float, end_s: float) -> Phase:
    return Phase([one for one in run.served if begin_s <= one.at_s < end_s], end_s - begin_s)
