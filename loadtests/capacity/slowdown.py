"""SLOs as multiples of what one request alone gets: what a machine of unknown speed can be asked for.

Splitwise (Patel et al., ISCA 2024) judges so; CPUs and tiny models have no other sensible limits.
"""

from pathlib import Path

import msgspec

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Closed, Plan
from twostroke.loadtests.report.figures import summarise

LEAST_ANSWERS = 5


class Multiples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the medians; None: nothing is asked."""

    ttft: float | None = None
    tpot: float | None = None


def parse_multiples(text: str) -> Multiples:
    """`ttft=5,tpot=2`, or one of them. Raises LoadTestError."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        multiples = msgspec.convert({name.strip(): float(value) for name, value in pairs}, Multiples)
    except (ValueError, msgspec.ValidationError) as error:
        raise LoadTestError(f"--slo-multiple {text}: write ttft=5,tpot=2, or one of them") from error
    if any(multiple is not None and not multiple > 0 for multiple in (multiples.ttft, multiples.tpot)):
        raise LoadTestError(f"--slo-multiple {text}: give multiples above 0")
    return multiples


def measure_slo(plan: Plan, multiples: Multiples, folder: Path, *, show: bool = True) -> SLO:
    """The multiples of the medians of an uncontended run, which lasts as long as the plan's and is left in `folder`.

    One user sends the plan's workload, each request when the one before is answered. Raises LoadTestError where fewer
    than 5 were answered, or the run can't be carried out.
    """
    alone = msgspec.structs.replace(
        plan,
        name=f"{plan.name}: uncontended",
        arrivals=Closed(users=1),
        slo=SLO(),
        num_workers=1,
        # Prompts of its own, lest the runs that follow find them cached.
        seed=plan.seed - 1,
    )
    summary = summarise(run_plan(alone, folder, show=show))
    if summary.counts.ok < LEAST_ANSWERS or summary.ttft is None:
        raise LoadTestError(
            f"the uncontended run had {summary.counts.ok} whole answers in {plan.seconds:g} s, too few for an SLO: "
            f"give more --seconds, or look into {folder}"
        )
    if multiples.tpot is not None and summary.tpot is None:
        raise LoadTestError("no answer of the uncontended run has two tokens, so there is no TPOT: leave tpot away")
    return SLO(
        ttft_s=None if multiples.ttft is None else multiples.ttft * summary.ttft.p50.value,
        tpot_s=None if multiples.tpot is None or summary.tpot is None else multiples.tpot * summary.tpot.p50.value,
    )
