"""Load-test plans against several OpenAI servers, in turns: how ours stands beside what a user could pick instead.

The first server is the subject. A shared machine's memory bandwidth jumps from minute to minute, so in each round
every row goes to all servers one right after the other; a round's figures are divided by each other, and the median
of these ratios is what counts. Only one server computes at a time. All ratios read "above 1: the subject is better".

Of an answer only a whole one counts, with the server's own counts of tokens.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from twostroke.benchmarks.clients import latencies
from twostroke.benchmarks.console import say
from twostroke.loadtests.generator.alone import send
from twostroke.loadtests.plan import SLO, Closed, Fixed, Plan, Uniform
from twostroke.loadtests.report.comparison import ratio_of
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.run_folder import Record

HIGHER_IS_BETTER = ("out_tok_s", "prompt_tok_s")
LOWER_IS_BETTER = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
COUNTED = ("errors", "wrong_length")  # summed over rounds
WARM_UP_ROUND = -1
SETTLE_S = 0.3  # between turns: a server's threads may spin a while after their last step
MIXED = "mixed"

Figures = dict[str, float | None]
Turns = dict[str, dict[str, list[Figures]]]
"""Figures by row, then by server, with the same rounds in the same order for all servers of a row."""


@dataclass(frozen=True)
class PeerServer:
    """A server under test."""

    name: str
    url: str  # without /v1


@dataclass(frozen=True)
class PeerLoad:
    """The requests of a comparison, and its rounds."""

    model: str  # what every server calls it
    vocab_size: int  # prompts are random token ids below it
    output_tokens: int  # of the rows of equal requests
    rounds: int  # turns of each server a row
    time_limit_s: float  # a row that would not end in time is left out of its round
    request_limit_s: float  # a slower answer is an error
    only_rows: tuple[str, ...] = ()  # empty: all


def plans(comparison: PeerLoad, output_tokens: int) -> dict[str, Plan]:
    """Return one request alone, 8 and 32 at a time, the mixed load, and prompts of 1k tokens alone."""

    def plan(users: int, requests: int, workload: Fixed | Uniform) -> Plan:
        return Plan(
            url="",
            model=comparison.model,
            max_context=2048,
            arrivals=Closed(users, requests=requests),
            workload=workload,
            slo=SLO(),
            seconds=comparison.time_limit_s,
            request_limit_s=comparison.request_limit_s,
            vocabulary=comparison.vocab_size,
        )

    equal = Fixed(256, output_tokens)
    return {
        **{f"c{users}": plan(users, max(2, users), equal) for users in (1, 8, 32)},
        MIXED: plan(32, 32, Uniform((64, 1024), (16, 128))),
        "prefill-1k": plan(1, 3, Fixed(1024, 1)),
    }


def measure(targets: Sequence[PeerServer], comparison: PeerLoad) -> Turns:
    """Take all rounds, as far as the time limit goes."""

    def turn(server: PeerServer, row: str, plan: Plan, round_number: int) -> Figures:
        # Other prompts in each round, so that nobody's cache of prefixes helps; all servers get the same.
        sent = send(msgspec.structs.replace(plan, url=server.url, seed=round_number))
        for fault in filter(None, map(fault_of, sent.records)):
            say(f"{server.name} {row}: {fault}")
        time.sleep(SETTLE_S)
        return figures_of(sent.records)

    for row, plan in plans(comparison, 4).items():  # whatever is compiled or allocated at its first use
        for server in targets:
            if row != MIXED:
                turn(server, row, plan, WARM_UP_ROUND)
    deadline = time.monotonic() + comparison.time_limit_s
    rows = plans(comparison, comparison.output_tokens)
    chosen = {row: plan for row, plan in rows.items() if not comparison.only_rows or row in comparison.only_rows}
    turns: Turns = {row: {server.name: [] for server in targets} for row in chosen}
    took_s: dict[str, float] = {}
    for number in range(comparison.rounds):
        first = number % len(targets)  # so that none always comes after the same one
        for row, plan in chosen.items():
            began = time.monotonic()
            if began + took_s.get(row, 0.0) > deadline:
                continue
            for server in (*targets[first:], *targets[:first]):
                figures = turn(server, row, plan, number)
                turns[row][server.name].append(figures)
                say(f"round {number + 1} {row:<11}{server.name:<16}{figures['out_tok_s'] or 0.0:8.1f} tok/s")
            took_s[row] = time.monotonic() - began
    return turns


def figures_of(records: Iterable[Record]) -> Figures:
    """Return the figures of one turn. Rates are None without answers.

    Output tokens are those of the servers' `usage`, never a count of events: an answer without it is an error.
    """
    records = list(records)
    answers = [record for record in records if fault_of(record) is None]
    tokens = sum(answer.output_tokens or 0 for answer in answers)
    events = sum(len(answer.token_s) for answer in answers)
    figures: Figures = {
        "out_tok_s": None,  # from the first request sent to the last token come
        "prompt_tok_s": None,  # of one request alone, up to its first token
        **latencies(answers),
        "tokens_per_event": tokens / events if events else None,
        "errors": len(records) - len(answers),
        "wrong_length": sum(answer.output_tokens != answer.planned_output_tokens for answer in answers),
    }
    if answers:
        lasted_s = max(each.token_s[-1] for each in answers) - min(each.sent_s for each in answers)
        rates = [(each.input_tokens or 0) / each.ttft_s for each in answers if each.ttft_s]
        figures |= {"out_tok_s": tokens / lasted_s, "prompt_tok_s": statistics.median(rates)}
    return figures


def fault_of(record: Record) -> str | None:
    """Return why an answer doesn't count; another length than was asked for is no reason."""
    if record.status == "ok" and (record.input_tokens is None or record.output_tokens is None):
        return "the stream tells no usage, which says how many tokens it had"
    return record.error


def report_of(turns: Mapping[str, Mapping[str, Sequence[Figures]]], servers: Sequence[str]) -> dict[str, Any]:
    """Return medians of each row and server, and the subject's ratios to each peer and to the best of them."""
    subject, *peers = servers
    result: dict[str, Any] = {"subject": subject, "rows": {}}
    for row, by_server in turns.items():
        over: dict[str, dict[str, Any]] = {}
        for figure in HIGHER_IS_BETTER + LOWER_IS_BETTER:
            for peer in peers:
                pair = [_estimates(figure, by_server[name]) for name in (subject, peer)]
                better, other = pair if figure in HIGHER_IS_BETTER else reversed(pair)
                if (ratio := ratio_of(better, other)) is not None:
                    rounds = sum(None not in of_round for of_round in zip(*pair, strict=True))
                    over.setdefault(figure, {})[peer] = {**msgspec.to_builtins(ratio), "rounds": rounds}
        result["rows"][row] = {
            "rounds": len(by_server[subject]),
            "servers": {name: _over_rounds(each) for name, each in by_server.items()},
            "over": over,
            "over_best": {name: min(each["median"] for each in by_peer.values()) for name, by_peer in over.items()},
        }
    return result


def _estimates(figure: str, turns: Sequence[Figures]) -> list[Estimate | None]:
    return [Estimate(value) if (value := turn[figure]) else None for turn in turns]


def _over_rounds(turns: Sequence[Figures]) -> Figures:
    """Return each figure's median over turns of one row with one server; what is counted is summed."""
    result: Figures = {}
    for name in figures_of([]):
        values = [value for turn in turns if (value := turn[name]) is not None]
        result[name] = sum(values) if name in COUNTED else statistics.median(values) if values else None
    return result


def has_errors(report: Mapping[str, Any]) -> bool:
    """Return whether any request failed."""
    return any(figures["errors"] for row in report["rows"].values() for figures in row["servers"].values())


def table(report: Mapping[str, Any]) -> str:
    """Write the report for people: figures, then ratios with their range over the rounds."""
    names = list(figures_of([]))
    lines = ["", f"{'row':<11}{'server':<18}{'rounds':>6}" + "".join(f"{name:>17}" for name in names)]
    for row, part in report["rows"].items():
        for server, figures in part["servers"].items():
            cells = ["-" if figures[name] is None else f"{figures[name]:.4g}" for name in names]
            lines.append(f"{row:<11}{server:<18}{part['rounds']:>6}" + "".join(f"{cell:>17}" for cell in cells))
    lines += ["", f"{report['subject']} against each peer: median of the rounds' ratios (range); above 1 is better"]
    for row, part in report["rows"].items():
        for figure, by_peer in part["over"].items():
            if (row == "prefill-1k") == (figure == "prompt_tok_s"):  # a rate of prompts tells something only alone
                cells = [
                    f"{peer} {each['median']:.2f} ({each['low']:.2f}-{each['high']:.2f})"
                    for peer, each in by_peer.items()
                ]
                lines.append(f"{row:<11}{figure:<13}" + "".join(f"{cell:>36}" for cell in cells))
    return "\n".join(lines)
