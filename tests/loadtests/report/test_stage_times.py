"""Stages overlap; their parts must not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.loadtests.report.figures import CLIENT_PARTS, SERVER_PARTS, mean_parts, server_parts

DISAGGREGATED = {
    "admit_s": 0.01,
    "ttft_s": 0.5,
    "prefill_queue_s": 0.1,
    "prefill_s": 0.35,
    "transfer_s": 0.47,
    "decode_queue_s": 0.03,
    "decode_s": 1.0,
}


def parts(stages: dict[str, float], ttft_s: float, e2e_s: float) -> dict[str, float]:
    return dict(zip(SERVER_PARTS, server_parts(stages, ttft_s, e2e_s), strict=True))


def test_of_the_transfer_only_what_prefill_did_not_hide_is_a_part() -> None:
    found = parts(DISAGGREGATED, ttft_s=0.52, e2e_s=1.55)
    assert found == pytest.approx(
        {
            "to the server and back": 0.02,
            "admission": 0.01,
            "prefill queue": 0.1,
            "prefill": 0.35,
            "handing over": 0.04,  # of 0.5 to the first token
            "KV transfer after prefill": 0.02,  # of 0.47, 0.45 passed during queue and prefill
            "decode queue": 0.03,
            "decode": 0.98,  # what is left of 1.03 after the first token
        }
    )


def test_a_transfer_that_prefill_hid_is_no_part() -> None:
    assert parts(DISAGGREGATED | {"transfer_s": 0.4}, 0.5, 1.5)["KV transfer after prefill"] == 0.0


def test_a_prompt_that_the_decode_worker_computed_waited_in_its_queue_first() -> None:
    found = parts({"admit_s": 0.01, "ttft_s": 0.3, "decode_queue_s": 0.1, "decode_s": 1.0}, 0.3, 1.3)
    assert (found["prefill queue"], found["prefill"]) == pytest.approx((0.1, 0.19))
    assert (found["decode queue"], found["decode"]) == pytest.approx((0.0, 1.0))


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([*DISAGGREGATED]), st.floats(0, 5)),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_parts_add_up_to_the_whole_and_none_is_negative(
    stages: dict[str, float], ttft_s: float, after_s: float
) -> None:
    found = server_parts(stages, ttft_s, ttft_s + after_s)
    assert sum(found) == pytest.approx(ttft_s + after_s)
    assert min(found) >= -1e-9


def test_means_are_of_all_answers() -> None:
    found = mean_parts([(DISAGGREGATED, 0.5, 1.5), (DISAGGREGATED | {"prefill_s": 0.25}, 0.5, 1.5)])
    assert [part.name for part in found] == list(SERVER_PARTS)
    assert next(part.mean_s for part in found if part.name == "prefill") == pytest.approx(0.3)


def test_a_server_that_tells_no_stages_has_two_parts() -> None:
    found = mean_parts([(DISAGGREGATED, 0.5, 1.5), (None, 0.3, 0.8)])
    assert [(part.name, part.mean_s) for part in found] == [
        (CLIENT_PARTS[0], pytest.approx(0.4)),
        (CLIENT_PARTS[1], pytest.approx(0.75)),
    ]
    assert mean_parts([]) == []
