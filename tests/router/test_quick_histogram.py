"""The quick histogram says what prometheus_client's own would."""

import random

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.samples import Sample

from twostroke.router.observe.metrics import QuickHistogram

BOUNDS = (0.001, 0.01, 0.1, 1, 10)


def samples(registry: CollectorRegistry) -> list[Sample]:
    found = [sample for metric in registry.collect() for sample in metric.samples]
    return sorted((sample for sample in found if not sample.name.endswith("_created")), key=str)


def test_it_tells_what_the_ordinary_histogram_tells() -> None:
    mine, theirs = CollectorRegistry(), CollectorRegistry()
    quick = QuickHistogram("gaps_seconds", "Gaps.", "m", BOUNDS, mine)
    ordinary = Histogram("gaps_seconds", "Gaps.", ["model_name"], buckets=BOUNDS, registry=theirs).labels("m")
    draw = random.Random(0)
    for amount in (*BOUNDS, 0.0, 11.0, *(draw.lognormvariate(-3, 3) for _ in range(500))):
        quick.observe(amount)
        ordinary.observe(amount)
    assert samples(mine) == samples(theirs)
    assert len(samples(mine)) == len(BOUNDS) + 3
