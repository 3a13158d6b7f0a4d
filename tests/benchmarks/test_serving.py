"""The serving bench computes figures of its streams."""

from twostroke.benchmarks.serving import summarise
from twostroke.loadtests.run_folder import Record


def test_whole_streams_make_the_figures() -> None:
    whole = Record(0, 0, 10.0, 10.0, 12.5, "ok", planned_output_tokens=3, output_tokens=3, token_s=(11.0, 12.0, 12.5))
    figures = summarise([whole], wall_s=2.0)
    assert figures["errors"] == 0
    assert figures["out_tok_s"] == 1.5
    assert figures["ttft_p50_s"] == 1.0
    assert figures["itl_p50_s"] == 0.5
    assert figures["itl_p99_s"] == 1.0


def test_refused_and_short_streams_are_errors_and_count_for_nothing() -> None:
    refused = Record(0, 0, 0.0, 0.0, 1.0, "refused", error="503 no")
    short = Record(0, 0, 0.0, 0.0, 1.0, "ok", planned_output_tokens=3, output_tokens=2, token_s=(0.5, 1.0))
    figures = summarise([refused, short], wall_s=1.0)
    assert (figures["errors"], figures["first_error"]) == (2, "503 no")
    assert figures["output_tokens"] == 0
    assert figures["ttft_p50_s"] is None
