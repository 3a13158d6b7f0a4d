"""The promise of a request: by header, field, API key and default."""

import pytest

from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import Promise
from twostroke.router.slo.classes import SLOClass, SLOConfig, promise_of

GOLD = SLOClass(name="gold", ttft_s=0.5, tpot_s=0.05, priority=10, share=0.3)
PLAIN = SLOClass(name="plain", ttft_s=2.0, priority=5)
BULK = SLOClass(name="bulk", priority=-5, share=0.1)
CLASSES = SLOConfig(classes=(GOLD, PLAIN, BULK), default="plain")


def class_of(tier: str | None = None, key_class: str | None = None, **headers: str) -> str:
    given = {name.replace("_", "-"): text for name, text in headers.items()}
    return promise_of(CLASSES, given, tier, has_key=key_class is not None, key_class=key_class).class_name


def test_a_class_carries_its_promises() -> None:
    assert promise_of(CLASSES, {}, "gold") == Promise("gold", 10, 0.3, 0.5, 0.05)
    assert promise_of(SLOConfig(), {}) == Promise()


def test_header_goes_before_tier_before_key_before_default() -> None:
    assert class_of() == "plain"
    assert class_of(key_class="gold") == "gold"
    assert class_of("bulk", key_class="gold") == "bulk"
    assert class_of("plain", key_class="gold", x_slo_class="bulk") == "bulk"


def test_openais_own_tiers_mean_a_class() -> None:
    assert class_of("auto") == class_of("default") == "plain"
    assert class_of("default", key_class="bulk") == "bulk"
    assert class_of("flex") == "bulk"
    assert class_of("priority") == "gold"
    assert class_of(x_slo_class="auto") == class_of("bulk", x_slo_class="default") == "plain"
    assert class_of(key_class="bulk", x_slo_class="auto") == "bulk"
    assert (class_of(x_slo_class="flex"), class_of(x_slo_class="priority")) == ("bulk", "gold")
    own = SLOConfig(classes=(SLOClass(name="flex", priority=3), GOLD))
    assert promise_of(own, {}, "flex").priority == 3


@pytest.mark.parametrize(
    ("tier", "headers", "param"),
    [
        ("silver", {}, "service_tier"),
        ("silver", {"x-slo-class": "gold"}, "service_tier"),
        (None, {"x-slo-class": "silver\n"}, "x-slo-class"),
        (None, {"x-slo-class": "automatic"}, "x-slo-class"),
        (None, {"x-slo-ttft-ms": "0"}, "x-slo-ttft-ms"),
        (None, {"x-slo-ttft-ms": "nan"}, "x-slo-ttft-ms"),
        (None, {"x-slo-tpot-ms": "inf"}, "x-slo-tpot-ms"),
        (None, {"x-slo-tpot-ms": "soon"}, "x-slo-tpot-ms"),
        (None, {"x-slo-priority": "101"}, "x-slo-priority"),
        (None, {"x-slo-priority": "1.5"}, "x-slo-priority"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_its_name(tier: str | None, headers: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        promise_of(CLASSES, headers, tier)
    assert (caught.value.status, caught.value.param) == (400, param)
    if "class" in param or "tier" in param:
        assert "gold, plain, bulk" in str(caught.value)


def test_headers_tighten_and_loosen_the_promise_of_one_request() -> None:
    promise = promise_of(CLASSES, {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "1e2"}, "gold")
    assert (promise.ttft_left_s, promise.tpot_s) == (0.25, 0.1)


def test_a_lower_priority_number_goes_first_as_in_vllm() -> None:
    assert promise_of(CLASSES, {}, "gold", 3).priority == 7
    assert promise_of(CLASSES, {"x-slo-priority": "-3"}, "gold", 3).priority == 13


def test_a_key_gets_no_more_than_its_class() -> None:
    for tier, headers, priority, param in (
        ("gold", {}, None, "service_tier"),
        (None, {"x-slo-class": "gold"}, None, "x-slo-class"),
        (None, {}, -1, "priority"),
        (None, {"x-slo-priority": "-1"}, None, "priority"),
        (None, {"x-slo-ttft-ms": "1999"}, None, "x-slo-ttft-ms"),
        (None, {"x-slo-tpot-ms": "100"}, None, "x-slo-tpot-ms"),  # nothing is promised: any time is tighter
    ):
        with pytest.raises(RequestError) as caught:
            promise_of(CLASSES, headers, tier, priority, has_key=True, key_class="plain")
        assert (caught.value.status, caught.value.code, caught.value.param) == (403, "not_allowed", param)
    loosened = promise_of(CLASSES, {"x-slo-ttft-ms": "3000"}, None, 2, has_key=True, key_class="plain")
    assert (loosened.ttft_left_s, loosened.priority) == (3.0, 3)
    assert promise_of(CLASSES, {}, "bulk", -10, has_key=True, key_class="plain").priority == 5


def test_a_key_without_a_class_may_choose_any() -> None:
    assert promise_of(CLASSES, {}, "gold", has_key=True).priority == 10
    with pytest.raises(RequestError):
        promise_of(CLASSES, {}, "gold", -1, has_key=True)
