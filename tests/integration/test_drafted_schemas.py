"""Answers to many schemas with drafts are those without, token by token, and what ends is of its schema.

Each schema is asked once and its answers are drawn hot, so most drafts are of text that the grammar forces.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.conftest import have_rows_pay
from tests.integration.local_fleet import Shape, serve
from tests.integration.schemas import Schema, all_schemas, takes
from tests.integration.test_speculation import Answer, ask
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import Grammars
from twostroke.protocol.requests import SamplingParams
from twostroke.router.text.grammar import GrammarChecks, of_schema
from twostroke.router.text.tokenizer import TextTokenizer

MOST_TOKENS = 120
AT_ONCE = 8
TOKENIZER = TextTokenizer.load(BUNDLED_MODEL_DIR)


async def grammars_of(schemas: Sequence[Schema]) -> dict[int, str]:
    """Return the grammars of those schemas that are taken, by their numbers; every second one without white space."""
    grammars, found = Grammars(lambda: TOKENIZER.vocabulary), dict[int, str]()
    for number, schema in enumerate(schemas):
        try:
            compact = number % 2 == 0
            followed = await GrammarChecks(grammars).schema(schema, "schema", lenient=False, compact=compact)
            found[number] = of_schema(followed, compact=compact)
        except RequestError:
            pass
    return found


async def answers_to(grammars: dict[int, str], decode: dict[str, Any]) -> tuple[dict[int, Answer], int, int]:
    """Return the answers by the schemas' numbers, the drafted tokens, and those accepted."""
    places = asyncio.Semaphore(AT_ONCE)
    async with serve(BUNDLED_MODEL_DIR, Shape(None, num_blocks=512, decode=decode)) as served:

        async def answer(number: int) -> Answer:
            sampling = SamplingParams(temperature=1.5, seed=number)
            kind = {"sampling": sampling, "grammar": grammars[number], "stop_token_ids": TOKENIZER.eos_token_ids}
            async with places:
                return await ask(served, (5, 6, 7), MOST_TOKENS, kind)

        answers = await asyncio.gather(*(answer(number) for number in grammars))
        stats = served.fleet.stats("decode")
        return dict(zip(grammars, answers, strict=True)), stats.draft_tokens, stats.accepted_tokens


@dataclass
class DraftTally:
    """Counts of answers and their tokens."""

    ended: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    wrong: list[tuple[Schema, str]] = field(default_factory=list)
    different: list[Schema] = field(default_factory=list)


async def compare(schemas: Sequence[Schema]) -> DraftTally:
    """Ask for an answer to each schema with drafts and without."""
    grammars = await grammars_of(schemas)
    plain, drafted, _ = await answers_to(grammars, {"speculation": {"method": "off"}})
    assert drafted == 0
    answers, drafted, accepted = await answers_to(grammars, {})
    tally = DraftTally(drafted=drafted, accepted=accepted)
    for number, answer in answers.items():
        token_ids = [token.token_id for token in answer.tokens]
        tally.tokens += len(token_ids)
        if not answer.is_like(plain[number]):
            tally.different.append(schemas[number])
        if token_ids[-1] in TOKENIZER.eos_token_ids:
            tally.ended += 1
            text = TOKENIZER.decode(token_ids)
            if not takes(schemas[number], text):
                tally.wrong.append((schemas[number], text))
    return tally


async def check(schemas: Sequence[Schema], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an answer differs or is not of its schema, or where drafts bring little."""
    have_rows_pay(monkeypatch)
    tally = await compare(schemas)
    steps = tally.tokens - tally.accepted
    print(
        f"{len(schemas)} schemas: {tally.ended} answers ended, {len(tally.wrong)} not of their schema,"
        f" {len(tally.different)} other than without drafts; {tally.tokens} tokens in {steps} steps,"
        f" {tally.accepted} of {tally.drafted} drafted tokens accepted"
    )
    assert tally.wrong == []
    assert tally.different == []
    assert tally.ended > 0.8 * len(schemas)
    assert tally.tokens > 1.2 * steps


async def test_drafts_change_no_answer_to_some_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    await check(all_schemas()[::20], monkeypatch)


@pytest.mark.wide
async def test_drafts_change_no_answer_to_all_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    await check(all_schemas(), monkeypatch)
