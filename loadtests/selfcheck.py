"""`twostroke loadtest selfcheck`: can this machine's load generator be believed?

It sends real load to a stub server in a process of its own, whose every instant is known, and compares: how true its
times, its rate, its attainment and its verdict are. Both share this machine, so run it while nothing else runs there.
The last line of output is one JSON object.

What the stub does with a request follows from the prompt alone, so both sides know it. Bare asyncio, since every layer
between a timer and the socket would add to the errors that are to be measured.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Constant, Fixed, Plan, Poisson, Session
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.report.figures import Summary, summarise
from twostroke.loadtests.run_folder import Record, RunFolder
from twostroke.loadtests.workloads.arrivals import seed_of
from twostroke.loadtests.workloads.prompts import token_ids
from twostroke.loadtests.workloads.sessions import sessions

MODEL = "stub"
VOCABULARY = 32_000
END_LIMIT_S = 30.0
KEY_TOKENS = 16  # of the prompt's beginning, that tell requests apart

Ending = Literal["whole", "broken", "silent"]
"""broken: the connection is closed before the stream's end; silent: nothing more comes, and it stays open."""


@dataclass(frozen=True)
class Script:
    """One answer. Instants are planned; the stub stamps what they really were."""

    status: int = 200  # of HTTP; all but 200 are answered at once
    ttft_s: float = 0.0  # from the request's last byte
    gaps_s: tuple[float, ...] = ()  # between tokens, of which there is one more
    ending: Ending = "whole"

    def meets(self, slo: SLO) -> bool:
        """As the definitions have it: only a whole answer counts, and one token has no time between tokens."""
        if self.status != 200 or self.ending != "whole":
            return False
        in_time = slo.ttft_s is None or self.ttft_s <= slo.ttft_s
        flows = slo.tpot_s is None or not self.gaps_s or sum(self.gaps_s) / len(self.gaps_s) <= slo.tpot_s
        return in_time and flows


def key_of(prompt: Sequence[int]) -> int:
    """What tells a prompt from others."""
    return seed_of("script", *prompt[:KEY_TOKENS])


def steady(draw: random.Random, tokens: int) -> Script:
    """A healthy server: 50 tokens a second, unevenly, and never two streams in step."""
    return Script(ttft_s=draw.uniform(0.05, 0.5), gaps_s=tuple(draw.uniform(0.005, 0.035) for _ in range(tokens - 1)))


def immediate(draw: random.Random, tokens: int) -> Script:
    """As fast as can be: whoever finds this server slow is slow."""
    return Script(ttft_s=0.001, gaps_s=(0.001,) * (tokens - 1))


# What meets MIXED_SLO does so with more than half a second to spare, and what misses it has twice what is allowed.
MIXED_SLO = SLO(ttft_s=1.0, tpot_s=0.2)
MIXED_LIMIT_S = 4.0  # after which the client gives up a silent answer
_FAST = (0.05, 0.01)
_MIXED: tuple[tuple[int, Script], ...] = (
    (8, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 5)),
    (2, Script(ttft_s=0.3, gaps_s=(0.05,) * 4)),
    (2, Script(ttft_s=_FAST[0])),  # one token
    (1, Script(ttft_s=2.0)),  # one, late
    (2, Script(ttft_s=2.0, gaps_s=(_FAST[1],) * 5)),
    (2, Script(ttft_s=_FAST[0], gaps_s=(0.4,) * 4)),
    (1, Script(ttft_s=_FAST[0], gaps_s=(0.001,) * 4 + (2.1,))),  # a stall alone spoils the mean
    (1, Script(status=429)),
    (1, Script(status=503)),
    (1, Script(status=500)),
    (1, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 5, ending="broken")),
    (1, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 2, ending="silent")),
)


def mixed(draw: random.Random, tokens: int) -> Script:
    """All that can become of a request, whatever number of tokens it asks for."""
    return draw.choices([script for _, script in _MIXED], [weight for weight, _ in _MIXED])[0]


SCENARIOS: dict[str, Callable[[random.Random, int], Script]] = {
    "steady": steady,
    "immediate": immediate,
    "mixed": mixed,
}


def script_of(scenario: str, key: int, tokens: int) -> Script:
    """What becomes of the request with this key, which asks for `tokens` tokens."""
    return SCENARIOS[scenario](random.Random(key), tokens)


class Served(msgspec.Struct):
    """One request, by the machine's monotonic clock, which all processes share."""

    key: int
    arrived_s: float  # when its last byte was read
    token_s: list[float] = []  # when each token was handed to the socket


@contextmanager
def stub_server(scenario: str) -> Iterator[tuple[str, list[Served]]]:
    """Its URL, and what it served, which is known at the block's end. Raises LoadTestError where it can't be run."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_stub_process, args=(scenario, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        served: list[Served] = []
        yield f"http://127.0.0.1:{_told(ours)}", served
        ours.send("end")
        served += _told(ours)
    finally:
        process.kill()
        process.join()


def _told(stub: Connection) -> Any:
    if stub.poll(END_LIMIT_S):
        try:
            return stub.recv()
        except EOFError:
            pass
    raise LoadTestError("the stub server did not start, or end, as it should")


def _stub_process(scenario: str, control: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the generator's
    control.send(asyncio.run(_serve(scenario, control)))


async def _serve(scenario: str, control: Connection) -> list[Served]:
    """Tells its port, and serves until it is told something, or who started it is gone. Returns what was served."""
    served: list[Served] = []
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(control.fileno(), ended.set)
    server = await asyncio.start_server(partial(_converse, scenario, served), "127.0.0.1", 0, backlog=4096)
    control.send(server.sockets[0].getsockname()[1])
    gc.disable()  # a pause of the collector would be a token too late
    await ended.wait()
    server.close()
    return served


class _Body(msgspec.Struct):
    prompt: list[int]
    max_tokens: int


async def _converse(
    scenario: str, served: list[Served], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One request and its answer."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        now = time.monotonic()
        if head.startswith(b"GET /v1/models "):
            card = {"id": MODEL, "object": "model", "owned_by": "stub"}
            writer.write(_answer(200, {"object": "list", "data": [card]}))
        elif head.startswith(b"POST /v1/completions "):
            await _play(scenario, served, now, msgspec.json.decode(body, type=_Body), reader, writer)
        else:
            writer.write(_answer(404, {"error": {"message": "the stub has no such path"}}))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client is gone
    finally:
        writer.close()


async def _play(
    scenario: str,
    served: list[Served],
    now: float,
    body: _Body,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    request = Served(key_of(body.prompt), now)
    served.append(request)
    script = script_of(scenario, request.key, body.max_tokens)
    if script.status != 200:
        writer.write(_answer(script.status, {"error": {"message": "as the script says"}}))
        return
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\nX-Request-Id: %x\r\n\r\n" % request.key
    )
    due = now
    for wait_s in (script.ttft_s, *script.gaps_s):
        due += wait_s  # from the planned instant on, so that what is late once does not make all that follows late
        await asyncio.sleep(due - time.monotonic())
        if reader.at_eof():
            return
        request.token_s.append(time.monotonic())
        writer.write(_chunk({"choices": [{"index": 0, "text": " word", "finish_reason": None}]}))
    if script.ending == "silent":
        await reader.read()  # until the client gives up
    elif script.ending == "whole":
        usage = {"prompt_tokens": len(body.prompt), "completion_tokens": len(request.token_s)}
        writer.write(
            _chunk({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            + _chunk({"choices": [], "usage": usage | {"total_tokens": sum(usage.values())}})
            + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        )


def _answer(status: int, content: object) -> bytes:
    body = json.dumps(content).encode()
    head = b"HTTP/1.1 %d Stub\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(content: object) -> bytes:
    event = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def timing_errors(records: Iterable[Record], served: Sequence[Served]) -> tuple[list[float], list[float]]:
    """How far the generator's TTFT and ITL are from the stub's, whichever way, of all whole answers; seconds.

    TTFT: from the scheduled instant to the first token, against the stub's time from the request's last byte to that
    token, so that lateness in sending is an error too. ITL: each gap.
    Raises LoadTestError where a record has no request at the stub, or not as many tokens, and where there are no gaps.
    """
    by_key = {f"{each.key:x}": each for each in served}
    ttft_s: list[float] = []
    itl_s: list[float] = []
    for record in records:
        if record.status != "ok" or record.ttft_s is None:
            continue
        stub = by_key.get(record.request_id or "")
        if stub is None or len(stub.token_s) != len(record.token_s):
            raise LoadTestError(f"session {record.session} got another number of tokens than the stub has sent")
        ttft_s.append(abs(record.ttft_s - (stub.token_s[0] - stub.arrived_s)))
        itl_s += [abs(gap - (b - a)) for gap, (a, b) in zip(record.gaps_s, pairwise(stub.token_s), strict=True)]
    if not itl_s:
        raise LoadTestError("no answer of two tokens or more came whole: there are no times to compare")
    return ttft_s, itl_s


def rate_error(rate: float, served: Sequence[Served]) -> float:
    """How far the rate at which requests reached the stub is from `rate`, asked as a constant one; a share of it."""
    if len(served) < 2:
        raise LoadTestError(f"the stub got {len(served)} requests: nothing can be said of their rate")
    arrived = sorted(each.arrived_s for each in served)
    return abs((len(arrived) - 1) / (arrived[-1] - arrived[0]) / rate - 1)


def scripts(plan: Plan, scenario: str, sessions: Iterable[Session]) -> list[Script]:
    """What the stub does with each session's only request."""
    turns = [session.turns[0] for session in sessions]
    return [script_of(scenario, key_of(token_ids(turn.prompt, plan.vocabulary)), turn.output_tokens) for turn in turns]


def analytic_attainment(plan: Plan, scenario: str, sessions: Iterable[Session]) -> float:
    """The share of the requests scheduled after the warm-up whose script meets the plan's SLO."""
    judged = scripts(plan, scenario, (session for session in sessions if session.at_s >= plan.warm_up_s))
    return sum(script.meets(plan.slo) for script in judged) / len(judged)


INPUT_TOKENS = 64
STREAMS = 50  # at once, of each sending process
STREAM_TOKENS = 250  # 20 ms after each other, on average
STREAM_S = 0.275 + (STREAM_TOKENS - 1) * 0.02
STEADY_SLO = SLO(ttft_s=0.2)  # P99 of the lag may be 5% of it: 10 ms
MIXED_RATE = 20.0
FLOOD_RATE = 10_000.0  # requests a second, several times what one process can send
FLOOD_S = 1.0


MOST_TIME_ERROR_S = 0.010  # P99
MOST_RATE_ERROR = 0.01
MOST_LOAD = 0.25  # of the cores, by others, for the figures to be the generator's own


def check_accuracy(folder: Path, seconds: float, processes: int) -> dict[str, Any]:
    """`steady`: streams enough for each process's core. Raises LoadTestError where a run can't be carried out."""
    rate = processes * STREAMS / STREAM_S
    plan = msgspec.structs.replace(
        _PLAN,
        arrivals=Constant(rate),
        workload=Fixed(INPUT_TOKENS, STREAM_TOKENS),
        slo=STEADY_SLO,
        seconds=seconds,
        num_workers=processes,
        warm_up_s=STREAM_S,  # until then there are fewer streams
    )
    run, summary, served = _outcome(plan, "steady", folder)
    ttft_s, itl_s = timing_errors((each for each in run.records() if each.scheduled_s >= plan.warm_up_s), served)
    return {
        "ttft_error_p99_s": percentile(ttft_s, 99),
        "itl_error_p99_s": percentile(itl_s, 99),
        "rate_error": rate_error(rate, served),
        "lag_p99_s": summary.lag.p99.value if summary.lag else 0.0,
        "valid": summary.validity.valid,
        "streams": rate * STREAM_S,  # at once, on average, all processes together
        "processes": processes,
        "generator_cpu": max(each.cpu_seconds / each.wall_seconds for each in run.facts().generators),  # of a core
        "num_requests": len(served),
    }


def check_attainment(folder: Path, seconds: float) -> dict[str, Any]:
    """`mixed`: refused, failed, broken, silent, slow and single-token answers among good ones. Raises as above."""
    plan = msgspec.structs.replace(
        _PLAN,
        arrivals=Poisson(MIXED_RATE),
        slo=MIXED_SLO,
        seconds=seconds,
        warm_up_s=seconds / 10,
        request_limit_s=MIXED_LIMIT_S,
    )
    _, summary, _ = _outcome(plan, "mixed", folder)
    expected = analytic_attainment(plan, "mixed", sessions(plan))
    measured = summary.attainment.value if summary.attainment else 0.0
    return {
        "attainment": measured,
        "attainment_expected": expected,
        "attainment_error": abs(measured - expected),
        "num_requests": summary.counts.scheduled,
        "valid": summary.validity.valid,
    }


def check_saturation(folder: Path) -> dict[str, Any]:
    """`immediate`, at a rate beyond one process. Raises as above."""
    plan = msgspec.structs.replace(_PLAN, arrivals=Constant(FLOOD_RATE), slo=MIXED_SLO, seconds=FLOOD_S)
    _, summary, _ = _outcome(plan, "immediate", folder)
    return {
        "saturated_is_invalid": not summary.validity.valid,
        "saturated_reasons": summary.validity.reasons,
        # What would have been believed of a server that answers within 1 ms.
        "saturated_ttft_p50_s": summary.ttft.p50.value if summary.ttft else None,
    }


_PLAN = Plan(
    url="",
    model=MODEL,
    max_context=INPUT_TOKENS + STREAM_TOKENS,
    arrivals=Constant(1.0),
    workload=Fixed(INPUT_TOKENS, 2),
    slo=SLO(),
    seconds=1.0,
    vocabulary=VOCABULARY,
    request_limit_s=60.0,
)


def _outcome(plan: Plan, scenario: str, folder: Path) -> tuple[RunFolder, Summary, list[Served]]:
    """Run against a stub of this scenario, into a subfolder of its name."""
    with stub_server(scenario) as (url, served):
        run = run_plan(msgspec.structs.replace(plan, url=url, name=f"selfcheck {scenario}"), folder / scenario)
    return run, summarise(run), served


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="sending processes, 50 streams each; leave a core free for the stub (default: 1)",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="length of the two timed runs each (default: 60)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the runs' folders here (default: they go)")


def run(arguments: argparse.Namespace) -> int:
    """0 where all held, 1 where not. Raises LoadTestError where a run can't be carried out."""
    if arguments.workers < 1:
        raise LoadTestError(f"--workers {arguments.workers}: give at least 1")
    if arguments.seconds < 10:
        raise LoadTestError(f"--seconds {arguments.seconds:g}: give at least 10, or too little is measured")
    if arguments.output is not None:
        return _check(arguments.output, arguments.seconds, arguments.workers)
    with tempfile.TemporaryDirectory(prefix="twostroke-selfcheck-") as folder:
        return _check(Path(folder), arguments.seconds, arguments.workers)


def _check(folder: Path, seconds: float, processes: int) -> int:
    load_average, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load_average > MOST_LOAD * cores:
        _say(f"this machine is busy ({load_average:.1f} processes want its {cores} cores): the errors will be theirs")
    _say(f"1 of 3: times and rate; {processes} x 50 streams, by {processes} processes, {seconds:g} s")
    steady = check_accuracy(folder, seconds, processes)
    _say("2 of 3: attainment, with refused, failed, broken and silent answers among good ones")
    mixed = check_attainment(folder, seconds)
    _say("3 of 3: more than the generator can send, to a server that answers at once: this must come out as invalid")
    flood = check_saturation(folder)
    headline = {
        "ttft_error_p99_s": steady["ttft_error_p99_s"],
        "itl_error_p99_s": steady["itl_error_p99_s"],
        "rate_error": steady["rate_error"],
        "attainment_error": mixed["attainment_error"],
        "saturated_is_invalid": flood["saturated_is_invalid"],
    }
    verdicts = {
        f"TTFT error P99 {steady['ttft_error_p99_s'] * 1e3:.2f} ms": steady["ttft_error_p99_s"] <= MOST_TIME_ERROR_S,
        f"ITL error P99 {steady['itl_error_p99_s'] * 1e3:.2f} ms": steady["itl_error_p99_s"] <= MOST_TIME_ERROR_S,
        f"rate off by {steady['rate_error']:.3%}": steady["rate_error"] <= MOST_RATE_ERROR,
        f"attainment {mixed['attainment']:.4f}, by construction {mixed['attainment_expected']:.4f}": (
            mixed["attainment_error"] < 1e-9
        ),
        "the generator's saturation is told from a slow server": flood["saturated_is_invalid"],
    }
    for what, holds in verdicts.items():
        _say(f"{'holds' if holds else 'FAILS'}: {what}")
    ok = all(verdicts.values())
    runs = {"steady": steady, "mixed": mixed, "immediate": flood}
    print(json.dumps(headline | {"ok": ok, "cores": cores, "load_average": load_average} | runs))
    return 0 if ok else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
