"""The regret of a plan: what its choice loses of the goodput of the best of all layouts, in simulation."""

import random

from twostroke.planning.costs.profiles import SMALL, among_busy
from twostroke.planning.layouts import Layout
from twostroke.planning.search import Budget, FleetSearch
from twostroke.planning.trials import decide, simulated_goodput
from twostroke.planning.workload import SLOTargets, Workload

WORKERS = 4
KIND = among_busy(SMALL)


def mixed_lengths(seed: int) -> Workload:
    """Prompts of 490 tokens and answers of 90, medians."""
    draw = random.Random(seed)
    return Workload(
        "mixed",
        tuple(
            (
                max(16, min(3000, int(draw.lognormvariate(6.2, 0.8)))),
                max(2, min(400, int(draw.lognormvariate(4.5, 0.7)))),
            )
            for _ in range(500)
        ),
    )


def layouts() -> list[Layout]:
    """Every way to spend the workers."""
    split = [(mode, readers) for mode in ("disaggregated", "hybrid") for readers in range(1, WORKERS)]
    return [
        Layout("aggregated", KIND, WORKERS),
        *(Layout(mode, KIND, WORKERS - readers, KIND, readers) for mode, readers in split),  # type: ignore[arg-type]
    ]


def test_the_plan_loses_little_of_what_the_best_of_all_layouts_serves_in_simulation() -> None:
    workload, promise = mixed_lengths(1), SLOTargets(0.5, 0.015)
    found = decide(
        FleetSearch([KIND], [KIND], workload, promise, Budget(gpus=WORKERS)), workload, promise, None, lambda line: None
    )
    served = {
        layout: simulated_goodput(
            layout, workload, promise, layout.goodput(workload, promise), lambda line: None, seed=5
        )
        for layout in layouts()
    }
    regret = 1 - served[found.answers[0].layout] / max(served.values())
    assert regret <= 0.05, served
    assert max(served.values()) > 1.1 * min(served.values()), "with layouts that are all alike there is nothing to lose"
