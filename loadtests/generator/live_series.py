"""A run's live figures as curves over its time: what the live page draws."""

from typing import Any

from twostroke.loadtests.generator.live import Histogram, LiveFigures, Second, percentile

WINDOW_S = 5  # percentiles and shares are of so many seconds together: single ones have too few values


def series(live: LiveFigures, first: int, end: int) -> list[dict[str, Any]]:
    """A point for each of the seconds `first` to `end - 1`. Times in seconds; None where nothing happened."""
    before = [second for at_s, second in live.seconds.items() if at_s < first]
    under_way = sum(second.sent - second.over for second in before)
    points = []
    for at_s in range(first, end):
        now = live.seconds.get(at_s, Second())
        under_way += now.sent - now.over
        window = [live.seconds[each] for each in range(at_s - WINDOW_S + 1, at_s + 1) if each in live.seconds]
        judged = sum(second.judged for second in window)
        points.append(
            {
                "at_s": at_s + 1,
                "ttft": _both([second.ttft for second in window]),
                "itl": _both([second.itl for second in window]),
                "tpot": _both([second.tpot for second in window]),
                "lag": [percentile([second.lag for second in window], 99)],
                "attainment": [sum(second.met for second in window) / judged if judged else None],
                "under_way": [under_way],
                "rates": [now.sent, now.ok],
                "errors": [now.refused, now.failed],
                "tokens": [sum(second.output_tokens for second in window) / max(1, len(window))],
            }
        )
    return points


def _both(histograms: list[Histogram]) -> list[float | None]:
    """P50 and P99."""
    return [percentile(histograms, 50), percentile(histograms, 99)]
