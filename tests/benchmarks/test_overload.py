"""`twostroke bench overload`: what it promises."""

from twostroke.benchmarks.overload import BATCH, INTERACTIVE, classes_for

CLASSES = classes_for(0.5, 0.05)


def test_a_batch_class_has_more_time_and_goes_last() -> None:
    interactive, batch = CLASSES[INTERACTIVE], CLASSES[BATCH]
    assert interactive.priority > batch.priority
    assert (batch.ttft_s, batch.tpot_s) == (2.0, 0.2)
