"""Answers to many schemas, drawn hot from the bundled model: whatever ends is of its schema, or that was refused."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from tests.integration.schemas import Schema, all_schemas, takes
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
from twostroke.model.step import Constraint, Draw, Engine, SequenceStep
from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import Grammars
from twostroke.protocol.requests import SamplingParams
from twostroke.router.text.grammar import GrammarChecks, of_schema
from twostroke.router.text.tokenizer import TextTokenizer

PROMPT = (5, 6, 7)
MOST_TOKENS = 120
AT_ONCE = 200
PARTS = 5  # of the wide run, for as many processes
BLOCKS = -(-(len(PROMPT) + MOST_TOKENS) // 16)


@dataclass
class Answer:
    """One answer on its way."""

    schema: Schema
    tokens: list[int]
    constraint: Constraint
    sampling: SamplingParams

    def step(self, place: int) -> SequenceStep:
        new = self.tokens if len(self.tokens) == len(PROMPT) else self.tokens[-1:]
        blocks = range(place * BLOCKS, (place + 1) * BLOCKS)
        draw = Draw(self.sampling, self.tokens, len(PROMPT), constraint=self.constraint)
        return SequenceStep(list(new), len(self.tokens) - len(new), blocks, draw)


async def write(engine: Engine, answers: Sequence[Answer], ends: Sequence[int]) -> None:
    """Draw until each has ended, or is too long."""
    waiting = iter(answers)
    running: dict[int, Answer] = dict(enumerate(itertools.islice(waiting, AT_ONCE)))
    while running:
        drawn = await engine.step([answer.step(place) for place, answer in running.items()])
        for (place, answer), token in zip(list(running.items()), drawn, strict=True):
            assert token is not None
            assert not answer.constraint.has_failed(len(answer.tokens)), answer.schema
            answer.tokens.append(token.token_id)
            if token.token_id in ends or len(answer.tokens) == len(PROMPT) + MOST_TOKENS:
                del running[place]
                if (following := next(waiting, None)) is not None:
                    running[place] = following


@dataclass
class Tally:
    """Counts of answers by outcome."""

    refused: int = 0  # schemas
    ended: int = 0
    too_long: int = 0
    wrong: list[tuple[Schema, str]] = field(default_factory=list)  # of those that ended


async def of_schemas(schemas: Sequence[Schema], num_seeds: int) -> Tally:
    """Answers to each schema, as many as there are seeds."""
    tokenizer = TextTokenizer.load(BUNDLED_MODEL_DIR)
    grammars = Grammars(lambda: tokenizer.vocabulary)
    answers: list[Answer] = []
    tally = Tally()
    for number, schema in enumerate(schemas):
        try:
            compact = number % 2 == 0
            followed = await GrammarChecks(grammars).schema(schema, "schema", lenient=False, compact=compact)
            grammar = of_schema(followed, compact=compact)
        except RequestError:
            tally.refused += 1
            continue
        for seed in range(num_seeds):
            constraint = Constraint(await grammars.matcher(grammar), partial(grammars.renewed, grammar))
            sampling = SamplingParams(temperature=1.5, seed=1000 * number + seed)
            answers.append(Answer(schema, list(PROMPT), constraint, sampling))
    loaded = load_engine(EngineConfig(model_dir=BUNDLED_MODEL_DIR, num_blocks=AT_ONCE * BLOCKS))
    try:
        await write(loaded.engine, answers, tokenizer.eos_token_ids)
    finally:
        await asyncio.to_thread(loaded.engine.close)
        loaded.kv_cache.close()
    for answer in answers:
        if answer.tokens[-1] not in tokenizer.eos_token_ids:
            tally.too_long += 1
            continue
        tally.ended += 1
        text = tokenizer.decode(answer.tokens[len(PROMPT) :])
        if not takes(answer.schema, text):
            tally.wrong.append((answer.schema, text))
    return tally


async def test_answers_to_some_schemas_are_of_them() -> None:
    schemas = all_schemas()
    assert len(schemas) == 500
    tally = await of_schemas(schemas[::25], 2)
    assert tally.wrong == []
    assert tally.refused <= 2
    assert tally.ended > 4 * tally.too_long


@pytest.mark.wide
@pytest.mark.parametrize("part", range(PARTS))
async def test_answers_to_all_schemas_are_of_them(part: int) -> None:
    tally = await of_schemas(all_schemas()[part::PARTS], 20)
    print(f"{tally.refused} schemas refused; {tally.ended} answers ended, {tally.too_long} were too long")
    assert tally.wrong == []
    assert tally.refused <= 8
    assert tally.ended > 4 * tally.too_long
