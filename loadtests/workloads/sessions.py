"""Conversion of a plan to its sessions: what is sent, and when. Lazy, pure, and the same on every machine."""

import random
from collections.abc import Iterator
from itertools import count, islice, takewhile
from pathlib import Path
from string import Template as TextTemplate
from typing import Any

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import (
    Chat,
    Closed,
    Fixed,
    LongPrompts,
    Piece,
    Plan,
    Replay,
    Session,
    SessionTurn,
    SharedPrompt,
    Synthetic,
    Template,
    TraceFile,
    Uniform,
)
from twostroke.loadtests.workloads.arrivals import arrival_times, derive_seed
from twostroke.loadtests.workloads.synthetic import LogNormal, shape_named, shape_times, shape_turns, shrunk
from twostroke.loadtests.workloads.traces import open_trace

# Of the logarithms of lengths, as in Azure's conversation trace of 2023 (Patel et al., Splitwise, ISCA 2024).
INPUT_SIGMA = 0.985
OUTPUT_SIGMA = 0.859
TEMPLATE_TOKENS = 16  # that a chat template puts around a turn and its answer, about
# Words stand for tokens here, and a vocabulary may take more tokens for them: this share of the context is planned.
PLANNED_SHARE = 0.9


def conversations(chat: Chat, max_context: int, seed: int) -> Iterator[tuple[SessionTurn, ...]]:
    """Each session's turns, endless. A session ends early where the next turn would not fit into the context.

    Raises LoadTestError, at once, where not even the system prompt leaves room.
    """
    room = int(max_context * PLANNED_SHARE)
    if min(chat.input_tokens, chat.output_tokens, chat.system_prompts) < 1 or chat.turns < 1 or chat.think_s < 0:
        raise LoadTestError("chat: lengths, turns and system_prompts are to be at least 1, think_s at least 0")
    if chat.system_tokens + chat.input_tokens + chat.output_tokens + TEMPLATE_TOKENS > room:
        raise LoadTestError(
            f"chat: a first turn has {chat.system_tokens} + {chat.input_tokens} tokens in and {chat.output_tokens} "
            f"out, which is more than {PLANNED_SHARE:.0%} of max_context {max_context}: ask for fewer"
        )
    draw = random.Random(f"chat {seed}")
    return (_session(chat, room, seed, index, draw) for index in count())


def _session(chat: Chat, room: int, seed: int, index: int, draw: random.Random) -> tuple[SessionTurn, ...]:
    inputs, outputs = LogNormal(chat.input_tokens, INPUT_SIGMA), LogNormal(chat.output_tokens, OUTPUT_SIGMA)
    system = draw.randrange(chat.system_prompts)
    before = (Piece(derive_seed(seed, "system", system), chat.system_tokens),) if chat.system_tokens else ()
    left = room - chat.system_tokens
    turns: list[SessionTurn] = []
    while True:
        prompt, answer = max(1, round(inputs.at(draw.random()))), max(1, round(outputs.at(draw.random())))
        think_s = draw.expovariate(1 / chat.think_s) if chat.think_s and turns else 0.0
        if not turns:
            prompt, answer = shrunk(prompt, answer, left - TEMPLATE_TOKENS)
        elif prompt + answer + TEMPLATE_TOKENS > left:
            return tuple(turns)
        own = Piece(derive_seed(seed, "session", index, len(turns)), prompt)
        turns.append(SessionTurn((*before, own) if not turns else (own,), answer, think_s))
        left -= prompt + answer + TEMPLATE_TOKENS
        if draw.random() < 1 / chat.turns:
            return tuple(turns)


Turns = tuple[SessionTurn, ...]


def sessions(plan: Plan) -> Iterator[Session]:
    """All sessions of a plan in the order of their arrivals; of closed loops without an end.

    Raises LoadTestError, at once, for a plan that can't be carried out, or a trace file that is wrong.
    """
    if not plan.seconds > 0:
        raise LoadTestError(f"a run of {plan.seconds:g} s sends nothing: give seconds above 0")
    timed: Iterator[tuple[float, Turns]]
    if isinstance(plan.arrivals, Replay):
        timed = _replayed(plan, plan.arrivals.speed)
    else:
        timed = zip(arrival_times(plan.arrivals, plan.seconds, plan.seed), _turns(plan), strict=False)
    if isinstance(plan.arrivals, Closed) and plan.arrivals.requests:
        timed = islice(timed, plan.arrivals.requests)
    return (Session(index, at_s, turns) for index, (at_s, turns) in enumerate(timed))


def _replayed(plan: Plan, speed: float) -> Iterator[tuple[float, Turns]]:
    """Yield sessions at the workload's own times."""
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
        case Uniform() as uniform:
            return _uniform(plan, uniform)
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
        case Template() as template:
            return _templates(plan, template)


def _fixed(plan: Plan, fixed: Fixed) -> Iterator[Turns]:
    _check_fits(plan, fixed.input_tokens, fixed.output_tokens)
    tiers, draw = fixed.tiers or {"": 1.0}, random.Random(f"tiers {plan.seed}")

    def turn(index: int) -> SessionTurn:
        tier = draw.choices(list(tiers), list(tiers.values()))[0]
        prompt = (_own(plan, index, fixed.input_tokens),)
        return SessionTurn(prompt, fixed.output_tokens, kind=tier, service_tier=tier or None)

    return ((turn(index),) for index in count())


def _uniform(plan: Plan, uniform: Uniform) -> Iterator[Turns]:
    _check_fits(plan, max(uniform.input_tokens), max(uniform.output_tokens))
    draw = random.Random(f"uniform {plan.seed}")
    return (
        (SessionTurn((_own(plan, index, draw.randint(*uniform.input_tokens)),), draw.randint(*uniform.output_tokens)),)
        for index in count()
    )


def _shared(plan: Plan, shared: SharedPrompt) -> Iterator[Turns]:
    _check_fits(plan, shared.shared_tokens + shared.input_tokens, shared.output_tokens)
    if min(shared.shared_prompts, shared.shared_tokens, shared.input_tokens) < 1:
        raise LoadTestError("shared-prompt: give at least 1 of shared_prompts, shared_tokens and input_tokens")
    draw = random.Random(f"shared prompts {plan.seed}")
    prompts = [
        Piece(derive_seed(plan.seed, "shared", index), shared.shared_tokens) for index in range(shared.shared_prompts)
    ]
    return (
        (SessionTurn((draw.choice(prompts), _own(plan, index, shared.input_tokens)), shared.output_tokens),)
        for index in count()
    )


def _long_prompts(plan: Plan, mixture: LongPrompts) -> Iterator[Turns]:
    _check_fits(plan, mixture.input_tokens, mixture.output_tokens)
    _check_fits(plan, mixture.long_input_tokens, mixture.long_output_tokens)
    if not 0 <= mixture.long_share <= 1:
        raise LoadTestError(f"long-prompts: long_share is {mixture.long_share:g}: give a share from 0 to 1")
    draw = random.Random(f"long prompts {plan.seed}")

    def turn(index: int) -> SessionTurn:
        if draw.random() < mixture.long_share:
            prompt = (_own(plan, index, mixture.long_input_tokens),)
            return SessionTurn(prompt, mixture.long_output_tokens, kind="long")
        return SessionTurn((_own(plan, index, mixture.input_tokens),), mixture.output_tokens, kind="short")

    return ((turn(index),) for index in count())


def _templates(plan: Plan, template: Template) -> Iterator[Turns]:
    draw = random.Random(f"template {plan.seed}")

    def turn() -> SessionTurn:
        try:
            fields = _filled(template.body, _DrawnWords(template.words, draw))
        except (KeyError, ValueError) as error:
            known = ", ".join(template.words)
            raise LoadTestError(f"template: {error}: write ${{NAME_1}}, NAME being one of {known}") from error
        return SessionTurn((), template.output_tokens, fields=fields)

    return ((turn(),) for _ in count())


class _DrawnWords(dict[str, Any]):
    """Words by place, drawn when they are first asked for."""

    def __init__(self, words: dict[str, list[Any]], draw: random.Random):
        self._words = words
        self._draw = draw

    def __missing__(self, place: str) -> Any:
        known = self._words[place.rpartition("_")[0]]
        self[place] = self._draw.choice([word for word in known if word not in self.values()] or known)
        return self[place]


def _filled(raw: Any, words: _DrawnWords) -> Any:
    """Return a part of a body with words in their places. Raises KeyError and ValueError for places that are none."""
    if isinstance(raw, dict):
        return {_filled(name, words): _filled(value, words) for name, value in raw.items()}
    if isinstance(raw, list):
        return [_filled(value, words) for value in raw]
    return TextTemplate(raw).substitute(words) if isinstance(raw, str) else raw


def _own(plan: Plan, index: int, tokens: int) -> Piece:
    """A prompt's part that no other has."""
    return Piece(derive_seed(plan.seed, "prompt", index), tokens)


def _check_fits(plan: Plan, input_tokens: int, output_tokens: int) -> None:
    """Lengths that were asked for are not changed: they fit, or the plan is wrong."""
    if input_tokens < 1 or output_tokens < 1:
        raise LoadTestError(f"{input_tokens} tokens in, {output_tokens} out: give at least 1 of each")
    if input_tokens + output_tokens > plan.max_context:
        raise LoadTestError(
            f"{input_tokens} tokens in and {output_tokens} out don't fit into max_context {plan.max_context}: ask for "
            "fewer, or name the model's real context"
        )
