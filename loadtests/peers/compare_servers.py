"""One HTTP workload against several OpenAI servers, in turns: how ours stands beside what a user could pick instead.

    python -m twostroke.loadtests.peers.compare_servers --model m --vocab-size 32000 \\
        --servers ours=http://127.0.0.1:8100/v1 vllm=http://127.0.0.1:8101/v1 openvino=http://127.0.0.1:8102/v1

The first server is the subject. A shared machine's memory bandwidth jumps from minute to minute, so in each round
every row goes to all servers one right after the other; a round's figures are divided by each other, and the median
of these ratios is what counts. Only one server computes at a time. All ratios read "above 1: the subject is better".
The last line is one JSON object.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twostroke.loadtests.peers.figures import (
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    Ratio,
    Turn,
    medians,
    ratio,
    worst,
)
from twostroke.loadtests.peers.http_workload import Row, Target, prompts, rows, send_row

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", type=target, required=True, metavar="NAME=URL", help="URL ends in /v1")
    parser.add_argument("--model", required=True, help="what every server calls the model")
    parser.add_argument("--vocab-size", type=int, required=True, help="prompts are random token ids below it")
    parser.add_argument("--output-tokens", type=int, default=128, help="of the rows of equal requests")
    parser.add_argument("--rows", nargs="+", default=(), help="only these: c1, c8, c32, mixed, prefill-1k")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server a row (default: %(default)s)")
    parser.add_argument("--time-limit-s", type=float, default=600.0, help="what would not end in time is left out")
    parser.add_argument("--request-limit-s", type=float, default=240.0, help="a slower answer is an error")
    arguments = parser.parse_args()
    plan = Plan(
        model=arguments.model,
        vocab_size=arguments.vocab_size,
        output_tokens=arguments.output_tokens,
        rounds=arguments.rounds,
        time_limit_s=arguments.time_limit_s,
        request_limit_s=arguments.request_limit_s,
        only_rows=tuple(arguments.rows),
    )
    report = compare(arguments.servers, plan)
    print(table(report))
    print(json.dumps(report))
    return 1 if has_errors(report) else 0


def target(text: str) -> Target:
    """NAME=URL of the command line."""
    name, separator, url = text.partition("=")
    if not name or not separator or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT/v1")
    return Target(name, url.rstrip("/"))


def compare(targets: Sequence[Target], plan: Plan) -> dict[str, Any]:
    """Measure; the first of `targets` is the subject."""
    return report_of(asyncio.run(measure(targets, plan)), [each.name for each in targets])


def has_errors(report: Mapping[str, Any]) -> bool:
    """Whether any request failed."""
    return any(figures["errors"] for row in report["rows"].values() for figures in row["servers"].values())


async def measure(targets: Sequence[Target], plan: Plan) -> Turns:
    """All rounds, as far as the time limit goes."""
    chosen = [row for row in rows(plan.output_tokens) if not plan.only_rows or row.name in plan.only_rows]

    async def turn(server: Target, row: Row, round_number: int) -> Turn:
        drawn = prompts(row, round_number, plan.vocab_size)
        figures, faults = await send_row(server, plan.model, row, drawn, plan.request_limit_s)
        for fault in faults:
            print(f"{server.name} {row.name}: {fault}", file=sys.stderr)
        await asyncio.sleep(plan.settle_s)
        return figures

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
                _say(round_number, row, server, figures)
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
        over: dict[str, dict[str, Ratio]] = {}
        over_best: dict[str, float] = {}
        for figure in HIGHER_IS_BETTER + LOWER_IS_BETTER:
            ratios = {peer: ratio(figure, by_server[subject], by_server[peer]) for peer in peers}
            over[figure] = {peer: each for peer, each in ratios.items() if each is not None}
            if (value := worst(ratios.values())) is not None:
                over_best[figure] = value
        result["rows"][row] = {
            "rounds": len(by_server[subject]),
            "servers": {name: medians(each) for name, each in by_server.items()},
            "over": {figure: {peer: asdict(each) for peer, each in by.items()} for figure, by in over.items() if by},
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


def _say(round_number: int, row: Row, server: Target, figures: Turn) -> None:
    """Progress, for who waits."""
    rate = figures.out_tok_s or 0.0
    print(f"round {round_number + 1} {row.name:<11}{server.name:<16}{rate:8.1f} tok/s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
