"""From a plan to its sessions: what is sent, and when. Lazy, and the same on every machine."""

import random
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import Chat, Fixed, LongPrompts, Plan, Replay, SharedPrompt, Synthetic, TraceFile
from twostroke.loadtests.schedule import Piece, Session, Turn
from twostroke.loadtests.traces.trace import open_trace
from twostroke.loadtests.workloads.arrivals import arrival_times
from twostroke.loadtests.workloads.chat import conversations
from twostroke.loadtests.workloads.seeds import seed_of
from twostroke.loadtests.workloads.synthetic import shape_named, shape_times, shape_turns

Turns = tuple[Turn, ...]


def sessions(plan: Plan) -> Iterator[Session]:
    """All sessions of a plan in the order of their arrivals; of closed loops without an end.

    Raises LoadTestError, at once, for a plan that can't be carried out, or a trace file that is wrong.
    """
    if not plan.seconds > 0:
        raise LoadTestError(f"a run of {plan.seconds:g} s sends nothing: give seconds above 0")
    if isinstance(plan.arrivals, Replay):
        timed = _replayed(plan, plan.arrivals.speed)
    else:
        timed = zip(arrival_times(plan.arrivals, plan.seconds, plan.seed), _turns(plan), strict=False)
    return (Session(index, at_s, turns) for index, (at_s, turns) in enumerate(timed))


def _replayed(plan: Plan, speed: float) -> Iterator[tuple[float, Turns]]:
    """With the workload's own times."""
    if not speed > 0:
        raise LoadTestError(f"replay has speed {speed:g}: give one above 0")
    timed: Iterator[tuple[float, Turns]]
    match plan.workload:
        case Synthetic(shape=shape):
            timed = zip(shape_times(shape_named(shape), plan.seed), _turns(plan), strict=False)
        case TraceFile(path=path, format=format):
            trace = open_trace(Path(path), format)
            timed = ((at_s, (turn,)) for at_s, turn in trace.timed_turns(plan.max_context, plan.seed))
        case _:
            raise LoadTestError("only traces and synthetic shapes have times to replay: give arrivals with a rate")
    scaled = ((at_s / speed, turns) for at_s, turns in timed)
    return takewhile(lambda arrival: arrival[0] < plan.seconds, scaled)


def _turns(plan: Plan) -> Iterator[Turns]:
    """Each session's turns, endless."""
    match plan.workload:
        case Fixed() as fixed:
            return _fixed(plan, fixed)
        case Synthetic(shape=shape):
            return ((turn,) for turn in shape_turns(shape_named(shape), plan.max_context, plan.seed))
        case TraceFile(path=path, format=format):
            timed = open_trace(Path(path), format).timed_turns(plan.max_context, plan.seed)
            return ((turn,) for _, turn in timed)
        case Chat() as chat:
            return conversations(chat, plan.max_context, plan.seed)
        case SharedPrompt() as shared:
            return _shared(plan, shared)
        case LongPrompts() as mixture:
            return _long_prompts(plan, mixture)


def _fixed(plan: Plan, fixed: Fixed) -> Iterator[Turns]:
    _check_fits(plan, fixed.input_tokens, fixed.output_tokens)
    return ((Turn((_own(plan, index, fixed.input_tokens),), fixed.output_tokens),) for index in count())


def _shared(plan: Plan, shared: SharedPrompt) -> Iterator[Turns]:
    _check_fits(plan, shared.shared_tokens + shared.input_tokens, shared.output_tokens)
    if min(shared.prompts, shared.shared_tokens, shared.input_tokens) < 1:
        raise LoadTestError("shared-prompt: give at least 1 of prompts, shared_tokens and input_tokens")
    draw = random.Random(f"shared prompts {plan.seed}")
    prompts = [Piece(seed_of(plan.seed, "shared", index), shared.shared_tokens) for index in range(shared.prompts)]
    return (
        (Turn((draw.choice(prompts), _own(plan, index, shared.input_tokens)), shared.output_tokens),)
        for index in count()
    )


def _long_prompts(plan: Plan, mixture: LongPrompts) -> Iterator[Turns]:
    _check_fits(plan, mixture.input_tokens, mixture.output_tokens)
    _check_fits(plan, mixture.long_input_tokens, mixture.long_output_tokens)
    if not 0 <= mixture.long_share <= 1:
        raise LoadTestError(f"long-prompts: long_share is {mixture.long_share:g}: give a share from 0 to 1")
    draw = random.Random(f"long prompts {plan.seed}")

    def turn(index: int) -> Turn:
        if draw.random() < mixture.long_share:
            prompt = (_own(plan, index, mixture.long_input_tokens),)
            return Turn(prompt, mixture.long_output_tokens, kind="long")
        return Turn((_own(plan, index, mixture.input_tokens),), mixture.output_tokens, kind="short")

    return ((turn(index),) for index in count())


def _own(plan: Plan, index: int, tokens: int) -> Piece:
    """A prompt's part that no other has."""
    return Piece(seed_of(plan.seed, "prompt", index), tokens)


def _check_fits(plan: Plan, input_tokens: int, output_tokens: int) -> None:
    """Lengths that were asked for are not changed: they fit, or the plan is wrong."""
    if input_tokens < 1 or output_tokens < 1:
        raise LoadTestError(f"{input_tokens} tokens in, {output_tokens} out: give at least 1 of each")
    if input_tokens + output_tokens > plan.max_context:
        raise LoadTestError(
            f"{input_tokens} tokens in and {output_tokens} out don't fit into max_context {plan.max_context}: ask for "
            "fewer, or name the model's real context"
        )
