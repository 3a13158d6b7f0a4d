"""From a plan to its sessions: what is sent, and when. Pure, lazy, and the same on every machine."""

from collections.abc import Iterator
from itertools import count

from loadtests.arrivals import arrival_times
from loadtests.errors import LoadTestError
from loadtests.plan import Fixed, Plan, Synthetic
from loadtests.schedule import Piece, Session, Turn
from loadtests.seeds import seed_of
from loadtests.synthetic import shape_named, shape_turns


def sessions(plan: Plan) -> Iterator[Session]:
    """All sessions of a plan in the order of their arrivals; of closed loops without an end.

    Raises LoadTestError, at once, for a plan that can't be carried out.
    """
    times = arrival_times(plan.arrivals, plan.seconds, plan.seed)
    return (Session(index, at_s, turns) for index, (at_s, turns) in enumerate(zip(times, _turns(plan), strict=False)))


def _turns(plan: Plan) -> Iterator[tuple[Turn, ...]]:
    """Each session's turns, endless."""
    match plan.workload:
        case Synthetic(shape=shape):
            return ((turn,) for turn in shape_turns(shape_named(shape), plan.max_context, plan.seed))
        case Fixed(input_tokens=input_tokens, output_tokens=output_tokens):
            _check_fits(plan, input_tokens, output_tokens)
            return (
                (Turn((Piece(seed_of(plan.seed, "prompt", index), input_tokens),), output_tokens),) for index in count()
            )
        case _:
            raise LoadTestError(f"workload {type(plan.workload).__name__} can't be sent yet")


def _check_fits(plan: Plan, input_tokens: int, output_tokens: int) -> None:
    if input_tokens < 1 or output_tokens < 1:
        raise LoadTestError(f"{input_tokens} tokens in, {output_tokens} out: give at least 1 of each")
    if input_tokens + output_tokens > plan.max_context:
        raise LoadTestError(
            f"{input_tokens} tokens in and {output_tokens} out don't fit into max_context {plan.max_context}: ask for "
            "fewer, or name the model's real context"
        )
