"""One HTTP workload against several OpenAI servers, in turns: how ours stands beside what a user could pick instead.

The first server is the subject. A shared machine's memory bandwidth jumps from minute to minute, so in each round
every row goes to all servers one right after the other; a round's figures are divided by each other, and the median
of these ratios is what counts. Only one server computes at a time. All ratios read "above 1: the subject is better".

Of an answer only a whole one counts, with the server's own counts of tokens.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from twostroke.benchmarks.clients import completion_body, send_in_turn
from twostroke.benchmarks.console import say
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.run_folder import Record


@dataclass(frozen=True)
class Turn:
    """One row of the workload, sent once to one server."""

    out_tok_s: float | None  # output tokens a second, from the first request sent to the last token come
    prompt_tok_s: float | None  # prompt tokens a second of one request alone, up to its first token (median)
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None  # between events with tokens, as they came
    itl_p99_s: float | None
    tokens_per_event: float | None  # above 1 where a server puts several tokens into one event: its gaps are fewer
    errors: int
    wrong_length: int  # answers of another length than was asked for: they count with the tokens that they had


FIGURES = tuple(field.name for field in fields(Turn))
HIGHER_IS_BETTER = ("out_tok_s", "prompt_tok_s")
LOWER_IS_BETTER = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")


def summarise(came: Iterable[Record]) -> Turn:
    """The figures of one turn. Rates are None without answers.

    Output tokens are those of the servers' `usage`, never a count of events: an answer without it is an error.
    """
    came = list(came)
    answers = [answer for answer in came if fault_of(answer) is None]
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    tokens = sum(answer.output_tokens or 0 for answer in answers)
    events = sum(len(answer.token_s) for answer in answers)
    ttfts = [answer.ttft_s or 0.0 for answer in answers]
    reading = [(answer.input_tokens or 0) / ttft_s for answer, ttft_s in zip(answers, ttfts, strict=True)]
    out_tok_s = None
    if answers:
        out_tok_s = tokens / (max(each.token_s[-1] for each in answers) - min(each.sent_s for each in answers))
    return Turn(
        out_tok_s=out_tok_s,
        prompt_tok_s=statistics.median(reading) if answers else None,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        tokens_per_event=tokens / events if events else None,
        errors=len(came) - len(answers),
        wrong_length=sum(answer.output_tokens != answer.planned_output_tokens for answer in answers),
    )


def fault_of(answer: Record) -> str | None:
    """Why an answer doesn't count; another length than was asked for is no reason."""
    if answer.status == "ok" and (answer.input_tokens is None or answer.output_tokens is None):
        return "the stream tells no usage, which says how many tokens it had"
    return answer.error


def medians(turns: Sequence[Turn]) -> dict[str, float | None]:
    """Each figure's median over turns of one row with one server; errors and wrong lengths are summed."""
    result: dict[str, float | None] = {}
    for name in FIGURES:
        values = [value for turn in turns if (value := getattr(turn, name)) is not None]
        if name in ("errors", "wrong_length"):
            result[name] = sum(values)
        else:
            result[name] = statistics.median(values) if values else None
    return result


@dataclass(frozen=True)
class Ratio:
    """How much better the subject is than a peer: above 1 is better, for rates and for times."""

    median: float  # of the rounds' ratios
    low: float
    high: float
    rounds: int


def ratio(figure: str, subject: Sequence[Turn], peer: Sequence[Turn]) -> Ratio | None:
    """Each round's turns are compared with each other, since the machine changes between rounds; then the median.

    Takes turns of the same rounds in the same order. None where no round has both.
    """
    ratios = []
    for ours, theirs in zip(subject, peer, strict=True):
        mine, other = getattr(ours, figure), getattr(theirs, figure)
        if mine and other:
            ratios.append(mine / other if figure in HIGHER_IS_BETTER else other / mine)
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


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
    url: str  # without /v1


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
) -> list[Record]:
    """Send a row's requests to one server; returns what came of them."""
    bodies = [
        completion_body(model, prompt, length.output) for prompt, length in zip(prompts, row.lengths, strict=True)
    ]
    return await send_in_turn(target.url, bodies, row.concurrency, time_limit_s)


WARM_UP_ROUND = -1

Turns = dict[str, dict[str, list[Turn]]]
"""By row, then by server; the same rounds in the same order for all servers of a row."""


@dataclass(frozen=True)
class Plan:
    """What is sent, how often."""

    model: str  # what every server calls it
    vocab_size: int  # prompts are random token ids below it
    output_tokens: int  # of the rows of equal requests
    rounds: int  # turns of each server a row
    time_limit_s: float  # a row that would not end in time is left out of its round
    request_limit_s: float  # a slower answer is an error
    only_rows: tuple[str, ...] = ()  # empty: all
    settle_s: float = 0.3  # between turns: a server's threads may spin a while after their last step


def has_errors(report: Mapping[str, Any]) -> bool:
    """Whether any request failed."""
    return any(figures["errors"] for row in report["rows"].values() for figures in row["servers"].values())


async def measure(targets: Sequence[Target], plan: Plan) -> Turns:
    """All rounds, as far as the time limit goes."""
    chosen = [row for row in rows(plan.output_tokens) if not plan.only_rows or row.name in plan.only_rows]

    async def turn(server: Target, row: Row, round_number: int) -> Turn:
        drawn = prompts(row, round_number, plan.vocab_size)
        came = await send_row(server, plan.model, row, drawn, plan.request_limit_s)
        for fault in filter(None, map(fault_of, came)):
            say(f"{server.name} {row.name}: {fault}")
        await asyncio.sleep(plan.settle_s)
        return summarise(came)

    for row in rows(output_tokens=4):  # whatever is compiled or allocated at its first use
        for server in targets:
            if row.name != "mixed":
                await turn(server, row, WARM_UP_ROUND)
    deadline = time.monotonic() + plan.time_limit_s
    turns: Turns = {row.name: {server.name: [] for server in targets} for row in chosen}
    took_s: dict[str, float] = {}
    for round_number in range(plan.rounds):
        for row in chosen:
            began = time.monotonic()
            if began + took_s.get(row.name, 0.0) > deadline:
                continue
            for server in rotated(targets, round_number):
                figures = await turn(server, row, round_number)
                turns[row.name][server.name].append(figures)
                _tell(round_number, row, server, figures)
            took_s[row.name] = time.monotonic() - began
    return turns


def rotated(targets: Sequence[Target], round_number: int) -> list[Target]:
    """Each round begins with another server, so that none always comes after the same one."""
    first = round_number % len(targets)
    return [*targets[first:], *targets[:first]]


def report_of(turns: Mapping[str, Mapping[str, Sequence[Turn]]], servers: Sequence[str]) -> dict[str, Any]:
    """Medians of each row and server, and the subject's ratios to each peer and to the best of them."""
    subject, *peers = servers
    result: dict[str, Any] = {"subject": subject, "rows": {}}
    for row, by_server in turns.items():
        over: dict[str, dict[str, Any]] = {}
        over_best: dict[str, float] = {}
        for figure in HIGHER_IS_BETTER + LOWER_IS_BETTER:
            ratios = {peer: ratio(figure, by_server[subject], by_server[peer]) for peer in peers}
            known = {peer: each for peer, each in ratios.items() if each is not None}
            if known:
                over[figure] = {peer: asdict(each) for peer, each in known.items()}
                over_best[figure] = min(each.median for each in known.values())
        result["rows"][row] = {
            "rounds": len(by_server[subject]),
            "servers": {name: medians(each) for name, each in by_server.items()},
            "over": over,
            "over_best": over_best,
        }
    return result


_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("out_tok_s", "out tok/s", lambda value: f"{value:.1f}"),
    ("prompt_tok_s", "prompt tok/s", lambda value: f"{value:.0f}"),
    ("ttft_p50_s", "TTFT P50 ms", lambda value: f"{value * 1e3:.0f}"),
    ("ttft_p99_s", "P99", lambda value: f"{value * 1e3:.0f}"),
    ("itl_p50_s", "ITL P50 ms", lambda value: f"{value * 1e3:.1f}"),
    ("itl_p99_s", "P99", lambda value: f"{value * 1e3:.1f}"),
    ("tokens_per_event", "tok/event", lambda value: f"{value:.2f}"),
    ("errors", "errors", lambda value: f"{value:.0f}"),
    ("wrong_length", "wrong length", lambda value: f"{value:.0f}"),
)


def table(report: Mapping[str, Any]) -> str:
    """The report for people: figures, then ratios with their range over the rounds."""
    head = f"{'row':<11}{'server':<16}{'rounds':>7}" + "".join(f"{title:>14}" for _, title, _ in _COLUMNS)
    lines = ["", head]
    for row, part in report["rows"].items():
        for server, figures in part["servers"].items():
            cells = ["-" if figures[name] is None else show(figures[name]) for name, _, show in _COLUMNS]
            lines.append(f"{row:<11}{server:<16}{part['rounds']:>7}" + "".join(f"{cell:>14}" for cell in cells))
    lines += ["", f"{report['subject']} against each peer: median of the rounds' ratios (range); above 1 is better"]
    for row, part in report["rows"].items():
        for figure, by_peer in part["over"].items():
            if (row == "prefill-1k") != (figure == "prompt_tok_s"):
                continue  # a rate of prompts tells something only where nothing else runs
            cells = [
                f"{peer} {each['median']:.2f} ({each['low']:.2f}-{each['high']:.2f})" for peer, each in by_peer.items()
            ]
            lines.append(f"{row:<11}{figure:<13}" + "".join(f"{cell:>36}" for cell in cells))
    return "\n".join(lines)


def _tell(round_number: int, row: Row, server: Target, figures: Turn) -> None:
    """Progress, for who waits."""
    rate = figures.out_tok_s or 0.0
    say(f"round {round_number + 1} {row.name:<11}{server.name:<16}{rate:8.1f} tok/s")
