"""Plan of a load test. The plan and its seed determine all requests, on whichever machine they are sent.

A plan is a JSON file (`plan.json` of a run's folder), so that every Locust worker, and whoever repeats the run,
reads the same. Times are in seconds; rates are requests (sessions, where they have several turns) a second.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec


class Poisson(msgspec.Struct, frozen=True, tag="poisson", forbid_unknown_fields=True):
    """Arrivals that know nothing of each other."""

    rate: float


class Gamma(msgspec.Struct, frozen=True, tag="gamma", forbid_unknown_fields=True):
    """Gaps of a gamma distribution: `cv` above 1 is burstier than Poisson, below more regular."""

    rate: float
    cv: float


class Constant(msgspec.Struct, frozen=True, tag="constant", forbid_unknown_fields=True):
    """Equal gaps."""

    rate: float


class Ramp(msgspec.Struct, frozen=True, tag="ramp", forbid_unknown_fields=True):
    """Poisson arrivals whose rate grows, or falls, evenly over the run."""

    rate: float
    to_rate: float


class RateSteps(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    """Poisson arrivals whose rate jumps: (from when on, rate), the first at 0."""

    steps: tuple[tuple[float, float], ...]


class Replay(msgspec.Struct, frozen=True, tag="replay", forbid_unknown_fields=True):
    """The trace's own times, divided by `speed`: 2 sends its requests twice as fast. Needs a workload with times."""

    speed: float = 1.0


class Closed(msgspec.Struct, frozen=True, tag="closed", forbid_unknown_fields=True):
    """Closed loop of `users`; each sends its next request `think_s` after the answer. A slow server is asked less."""

    users: int
    think_s: float = 0.0
    requests: int = 0  # in all; 0: as many as the run's time allows


Arrivals = Poisson | Gamma | Constant | Ramp | RateSteps | Replay | Closed


class Synthetic(msgspec.Struct, frozen=True, tag="synthetic", forbid_unknown_fields=True):
    """Lengths drawn from distributions fitted to a public trace; prompts that share nothing, but for `shape`'s own."""

    shape: str  # azure-conv, azure-code, mooncake-conversation, ... : loadtests/workloads/synthetic.py


class Fixed(msgspec.Struct, frozen=True, tag="fixed", forbid_unknown_fields=True):
    """All requests alike, but for their SLO classes where `tiers` has several, each with its part of all requests."""

    input_tokens: int = 512
    output_tokens: int = 128
    tiers: dict[str, float] = {}


class Uniform(msgspec.Struct, frozen=True, tag="uniform", forbid_unknown_fields=True):
    """Lengths that are each as likely as another: least and most of a prompt's tokens, and of an answer's."""

    input_tokens: tuple[int, int] = (64, 1024)
    output_tokens: tuple[int, int] = (16, 128)


class TraceFile(msgspec.Struct, frozen=True, tag="trace", forbid_unknown_fields=True):
    """Requests of a trace, in its order; again from the beginning where the run is longer."""

    path: str
    format: Literal["auto", "azure", "mooncake", "burstgpt", "bailian"] = "auto"


class Chat(msgspec.Struct, frozen=True, tag="chat", forbid_unknown_fields=True):
    """Sessions of several turns over the chat API, the server's own answers in the next turn's prompt."""

    turns: float = 4.0  # mean of a geometric number
    think_s: float = 5.0  # mean of an exponential time, from an answer's end to the next turn
    system_tokens: int = 200  # shared by all sessions with the same system prompt
    system_prompts: int = 4
    input_tokens: int = 80  # of a turn; medians of log-normal lengths, here and below
    output_tokens: int = 120


class SharedPrompt(
    msgspec.Struct,
    frozen=True,
    tag="shared-prompt",
    forbid_unknown_fields=True,
    rename={"shared_prompts": "prompts"},
):
    """One of a few long system prompts, and something of each request's own."""

    shared_tokens: int = 1024
    shared_prompts: int = 4
    input_tokens: int = 128  # of the request's own
    output_tokens: int = 128


class LongPrompts(msgspec.Struct, frozen=True, tag="long-prompts", forbid_unknown_fields=True):
    """Short requests that stream for long, and now and then a long prompt between them: who feels it?"""

    input_tokens: int = 64
    output_tokens: int = 256
    long_input_tokens: int = 4096
    long_output_tokens: int = 16
    long_share: float = 0.1  # of all requests


class Template(msgspec.Struct, frozen=True, tag="template", forbid_unknown_fields=True):
    """Requests made from one body, in whose texts and keys `${name_1}`, `${name_2}`, ... are words drawn from `name`,
    others in each request and, while there are enough, in each place."""

    body: dict[str, Any]  # fields of the request beside the plan's, or in their place; `prompt` among them
    words: dict[str, list[Any]]
    output_tokens: int = 128


Workload = Synthetic | Fixed | Uniform | TraceFile | Chat | SharedPrompt | LongPrompts | Template


MAX_LAG_OF_SLO = 0.05


class SLO(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times that a request must meet, in seconds. None means that nothing is required."""

    ttft_s: float | None = None  # from the scheduled arrival to the first text
    tpot_s: float | None = None  # (last token - first token) / (tokens - 1)

    @property
    def lag_limit_s(self) -> float | None:
        """Largest P99 of the generator's lag in a valid run, in seconds; None without an SLO. A late request adds
        its lag to its TTFT alone, so the limit follows the TTFT where there is one."""
        limit_s = self.tpot_s if self.ttft_s is None else self.ttft_s
        return None if limit_s is None else MAX_LAG_OF_SLO * limit_s


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run against one server at one load."""

    url: str  # of the server, without /v1
    model: str
    max_context: int  # tokens; longer requests of a workload are rescaled to it
    arrivals: Arrivals
    workload: Workload
    slo: SLO
    seconds: float  # arrivals are scheduled so long, the warm-up included
    name: str = "run"  # in reports
    seed: int = 0
    warm_up_s: float = 0.0  # of `seconds`: sent, but not judged
    service_tier: str | None = None  # sent with each request
    request_limit_s: float = 300.0  # a slower answer is a failure
    num_workers: int = 1  # Locust processes that send; each sends every num_workers-th session
    prompts: Literal["ids", "text"] = "ids"  # completions with token ids, for servers that take them, or with text
    vocabulary: int = 0  # token ids are drawn below it; 0: the server's vocabulary isn't known, text only
    ignore_eos: bool = True  # ask for exactly the planned tokens, where the server can
    extra: dict[str, Any] = {}  # fields of some requests' bodies beside these, or in their place
    extra_share: float = 1.0  # of all requests, that have them


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt. Equal pieces are equal tokens, so prompts that begin with equal pieces share a prefix."""

    seed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One request of a session."""

    prompt: tuple[Piece, ...]  # what is new in this turn; what was said before goes before it
    output_tokens: int
    think_s: float = 0.0  # from the end of the answer before; of a first turn 0
    kind: str = ""  # what reports tell apart: `long`, `short`, or the SLO class
    service_tier: str | None = None  # of the request, where the plan names none for all
    fields: dict[str, Any] | None = None  # of its body, beside the plan's or in their place


@dataclass(frozen=True, slots=True)
class Session:
    """One turn mostly; several are sent one after another, over the chat API, with the answers in between."""

    index: int  # from 0, in the order of arrivals
    at_s: float  # after the run's beginning; of closed loops 0, since users take the next when they are free
    turns: tuple[SessionTurn, ...]
