"""The line that tells how a run goes."""

from twostroke.loadtests.generator.progress import Progress, line_of

BEGINNING = Progress(0.5, 2, 2, 0, 0, 0, None, None, None, is_over=False, error=None)


def test_what_is_not_known_yet_and_what_did_not_happen_is_left_out() -> None:
    assert line_of(BEGINNING) == "2 sent, 2 under way, 0 ok"


def test_a_line_has_all_that_tells_whether_to_go_on() -> None:
    progress = Progress(30.0, 50, 4, 40, 5, 1, 0.875, 0.2512, 0.00312, is_over=False, error=None)
    assert line_of(progress) == (
        "50 sent, 4 under way, 40 ok, 5 refused, 1 failed, SLO met by 87.5%, TTFT P50 0.251 s, lag P99 3.12 ms"
    )
