"""The workload: its rows, the requests of each, and how a server is sent one row."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.loadtests.generator.completions import Exchange, completion_body, exchange
from twostroke.loadtests.generator.sse import BadResponse
from twostroke.loadtests.peers.answers import Answer, read_answer
from twostroke.loadtests.peers.figures import Turn, summarise

FIRST_TOKEN_ID = 1000  # below it lie bytes and, in some vocabularies, control tokens
MIXED_SEED = 20


@dataclass(frozen=True)
class Length:
    """Of one request, in tokens."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Row:
    """Requests by length; `concurrency` clients take them in this order, each the next as soon as its last ended."""

    name: str
    lengths: tuple[Length, ...]
    concurrency: int


@dataclass(frozen=True)
class Target:
    """A server under test."""

    name: str
    base_url: str  # up to /v1


def rows(output_tokens: int) -> tuple[Row, ...]:
    """One request alone, 8 and 32 at a time, the mixed load, and prompts of 1k tokens alone."""
    mixed = random.Random(MIXED_SEED)
    return (
        Row("c1", (Length(256, output_tokens),) * 2, 1),
        Row("c8", (Length(256, output_tokens),) * 8, 8),
        Row("c32", (Length(256, output_tokens),) * 32, 32),
        Row("mixed", tuple(Length(mixed.randint(64, 1024), mixed.randint(16, 128)) for _ in range(32)), 32),
        Row("prefill-1k", (Length(1024, 1),) * 3, 1),
    )


def prompts(row: Row, round_number: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, others in each row and round, so that nobody's cache of prefixes helps.

    Every server gets the same in the same round.
    """
    draw = random.Random(f"{row.name} {round_number}")
    return [[draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(length.prompt)] for length in row.lengths]


async def send_row(
    target: Target, model: str, row: Row, prompts: Sequence[Sequence[int]], time_limit_s: float
) -> tuple[Turn, list[str]]:
    """Send a row's requests to one server; returns the figures and what went wrong."""
    waiting = [
        completion_body(model, prompt, length.output) for prompt, length in zip(prompts, row.lengths, strict=True)
    ]
    exchanges: list[tuple[Exchange, int]] = []
    waiting.reverse()

    async def client() -> None:
        while waiting:
            body = waiting.pop()
            exchanges.append((await exchange(target.base_url, body, time_limit_s), body["max_tokens"]))

    async with asyncio.TaskGroup() as clients:
        for _ in range(row.concurrency):
            clients.create_task(client())
    answers: list[Answer] = []
    asked: list[int] = []
    faults: list[str] = []
    for each, max_tokens in exchanges:
        try:
            answers.append(read_answer(each))
            asked.append(max_tokens)
        except BadResponse as error:
            faults.append(str(error))
    return summarise(answers, asked, len(faults)), faults
