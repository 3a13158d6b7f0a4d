"""What the generator recorded against what the stub did. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.records import Record
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.schedule import Session
from twostroke.loadtests.selfcheck.script import Script, key_of, script_of
from twostroke.loadtests.selfcheck.stub_server import Served
from twostroke.loadtests.workloads.prompts import token_ids


@dataclass(frozen=True)
class Errors:
    """How far the generator's times are from the stub's, in seconds, whichever way."""

    ttft_s: list[float]
    itl_s: list[float]

    def ttft_p99_s(self) -> float:
        return percentile(self.ttft_s, 99) or 0.0

    def itl_p99_s(self) -> float:
        return percentile(self.itl_s, 99) or 0.0


def timing_errors(records: Iterable[Record], served: Sequence[Served]) -> Errors:
    """Of all whole answers. TTFT: from the scheduled instant to the first token, against the stub's time from the
    request's last byte to that token, so that lateness in sending is an error too. ITL: each gap.

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
        sent = zip(stub.token_s, stub.token_s[1:], strict=False)
        itl_s += [abs(gap - (after - before)) for gap, (before, after) in zip(record.gaps_s, sent, strict=True)]
    if not itl_s:
        raise LoadTestError("no answer of two tokens or more came whole: there are no times to compare")
    return Errors(ttft_s, itl_s)


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
