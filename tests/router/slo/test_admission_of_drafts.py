"""Admission counts tokens, not steps: where drafts are right, requests come in that plain steps would be late for."""

import random

import pytest
from msgspec.structs import replace

from twostroke.planning.costs.profiles import H100
from twostroke.protocol.requests import Promise
from twostroke.router.request_state import PathEstimate
from twostroke.router.slo import admission
from twostroke.router.slo.admission import Admission
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.simulator.deployment import TracedRequest, serve

CLASS = SLOClass(name="standard", ttft_s=3.0, tpot_s=0.006)
"""A step takes 7.3 ms on this worker."""


def test_requests_are_let_in_whose_promise_only_drafts_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[tuple[float, float]] = []  # predicted and real, per token
    learn = Admission.ended

    def ended(
        self: Admission, request: object, num_tokens: int, predicted: tuple[PathEstimate, float] | None, tpot_s: float
    ) -> None:
        if predicted is not None:
            times.append((admission._tpot_s(predicted[0], num_tokens), tpot_s))
        learn(self, request, num_tokens, predicted, tpot_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Admission, "ended", ended)
    promise, draw = Promise(CLASS.name, CLASS.priority, CLASS.share, CLASS.ttft_s, CLASS.tpot_s), random.Random(1)
    at_s, trace = 0.0, []
    for _ in range(80):
        at_s += draw.expovariate(6.0)
        prompt = tuple(draw.choices(range(30_000), k=150))
        trace.append(TracedRequest(at_s, prompt, draw.randrange(120, 300), promise))
    refused, kept = [], []
    for repeated in (0.0, 0.6):
        times.clear()
        run = serve(
            trace,
            "kv_aware",
            replace(H100, repeated=repeated),
            prefill=1,
            decode=1,
            prefill_cache_tokens=H100.kv_tokens,
            decode_cache_tokens=H100.kv_tokens,
            slo=SLOConfig(classes=(CLASS,)),
            warm=24,
        )
        answered = [one for one in run.served if not one.refused]
        refused.append(1 - len(answered) / len(trace))
        kept.append(sum(one.tpot_s <= 0.006 for one in answered) / len(answered))
    predicted, real = (sum(one) for one in zip(*times[-40:], strict=True))
    assert refused[0] > 0.6 > 0.2 > refused[1]
    assert kept == [0.0, 1.0]
    assert predicted == pytest.approx(real, rel=0.2)
