"""SLO classes, their promises, and how these are kept: for admission, queues, schedulers, metrics and the
autoscaler. Pure.

`promise_of` tells what a request is promised: its class, by header, `service_tier`, API key or default, and what else
it asks for.

`verdict_of` says whether a request got what it was promised, `SLOAttainment` which part of each class did.
`Correction` makes the next predictions right nine times out of ten, `ClassHistory` is what a class has asked for and
got lately. `DecayingSum` forgets: it tells what was added lately, and how much of it comes a second.

`Demand` is the demand on the whole server, as one router sees it, for the autoscaler. It counts what *arrives*, also
what is turned away: what was served tells of the workers that there are, not of those that there should be. All
numbers are flat, since that is how they travel; several routers' counters add up, and what each tells of the workers
is of the same workers (`cluster/autoscaling/samples.py` puts them together).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from annotated_types import Ge, Le, Lt
from pydantic import Field, PositiveFloat, field_validator, model_validator

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Promise
from twostroke.protocol.settings import Interval, Section
from twostroke.protocol.stats import ROLES, WorkerInfo, WorkerStats, role_of, typical

STANDARD = "standard"
MAX_PRIORITY = 1000


_MIN_S = 0.5
"""A rate over a shorter time would be that of a single event."""


class DecayingSum:
    """A sum whose parts fade away exponentially, to a third or so after `memory_s` seconds."""

    __slots__ = ("_at", "_began", "_memory_s", "_value")

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._value = 0.0
        self._at = 0.0
        self._began: float | None = None

    def add(self, amount: float, now: float) -> None:
        """Add what has come at `now`; times never go back."""
        if self._began is None:
            self._began = now
        self._value = self.value(now) + amount
        self._at = now

    def value(self, now: float) -> float:
        """Return what is left of all that was added."""
        return self._value * math.exp(min(0.0, self._at - now) / self._memory_s)

    def rate(self, now: float) -> float:
        """Return the rate a second over the last `memory_s` or so; at first, over the time that has passed."""
        if self._began is None:
            return 0.0
        remembered = 1.0 - math.exp(-max(now - self._began, _MIN_S) / self._memory_s)
        return self.value(now) / (self._memory_s * remembered)


class SLOClass(Section):
    """One class of requests."""

    name: str
    """Letters, digits, `-` and `_`; what requests name in `service_tier` or `x-slo-class`."""
    ttft_s: PositiveFloat | None = None
    """Promised time to first token; null: nothing is promised, so nothing is refused for being late."""
    tpot_s: PositiveFloat | None = None
    """Mean time between tokens after the first; the tightest that runs limits a decode worker's batch."""
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] = 0
    """A class with a higher one goes first, gives way last, and is shed last."""
    share: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the workers' tokens that the class gets even where higher classes want all of them; 0: it may get
    nothing then. All together 1 at most."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r} must be letters, digits, - and _")
        return name


class SLOConfig(Section):
    """SLO classes and admission (docs/slo-classes.md).

    Without classes there is one, `standard`, that promises nothing.
    """

    classes: tuple[SLOClass, ...] = Field(default=(SLOClass(name=STANDARD),), strict=False)
    """The SLO classes."""
    default: str | None = None
    """The class of requests that name none, and whose API key has none; null: the first."""
    admission: bool = True
    """Refuse what would be late (429); `false`: serve it late. Queues keep their order either way."""
    max_queue_s: Interval = 600.0
    """Work before a request that is promised nothing; a longer queue refuses it. As long as clients wait."""

    @model_validator(mode="after")
    def _check(self) -> "SLOConfig":
        names = [one.name for one in self.classes]
        if not names:
            raise ValueError("classes: there must be one at least")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"classes: {name} is there twice")
        if self.default is not None and self.default not in names:
            raise ValueError(f"default: {self.default} is none of the classes {', '.join(names)}")
        if sum(one.share for one in self.classes) > 1:
            raise ValueError("classes: the shares of all together are over 1")
        return self

    @property
    def default_class(self) -> SLOClass:
        return self.classes[0] if self.default is None else self.named(self.default)

    def named(self, name: str) -> SLOClass:
        """One of those that there are."""
        return next(one for one in self.classes if one.name == name)

    @property
    def is_set(self) -> bool:
        """Return whether classes are configured."""
        return [one.name for one in self.classes] != [STANDARD]


CLASS_HEADER = "x-slo-class"
TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
PRIORITY_HEADER = "x-slo-priority"

MAX_MS = 3_600_000.0
MAX_ASKED_PRIORITY = 100
"""Largest priority, in either direction, that a request may add to that of its class."""

_DEFAULT_TIERS = ("auto", "default")
"""Service tiers of OpenAI's clients that mean the default class. `flex` means the class of the lowest priority,
`priority` that of the highest. A class of such a name goes first.
"""


def promise_of(
    config: SLOConfig,
    headers: Mapping[str, str],
    service_tier: str | None = None,
    priority: int | None = None,
    *,
    has_key: bool = False,
    key_class: str | None = None,
) -> Promise:
    """The promise of a request with these headers (names in lower case) and body fields.

    `priority` is vLLM's: the lower goes first. Where an API key asks (`has_key`), `key_class` is its class, if it has
    one. Raises RequestError: 400 for what can't be understood, 403 for what the request's API key may not have.
    """
    chosen, param = _chosen(config, key_class, headers, service_tier)
    if PRIORITY_HEADER in headers:
        priority = _whole(headers[PRIORITY_HEADER], PRIORITY_HEADER)
    ttft_s = _seconds(headers, TTFT_HEADER, chosen.ttft_s)
    tpot_s = _seconds(headers, TPOT_HEADER, chosen.tpot_s)
    result = chosen.priority - (priority or 0)
    if has_key:
        own = chosen if key_class is None else config.named(key_class)
        if chosen.priority > own.priority:
            raise _forbidden(param, f"{chosen.name} goes before {own.name}, the class of this API key")
        if result > own.priority:
            raise _forbidden("priority", f"an API key's requests can't go before those of its class, {own.name}")
        for name, asked_s, promised_s in (
            (TTFT_HEADER, ttft_s, chosen.ttft_s),
            (TPOT_HEADER, tpot_s, chosen.tpot_s),
        ):
            if asked_s is not None and (promised_s is None or asked_s < promised_s):
                raise _forbidden(name, f"an API key's requests may loosen what {chosen.name} promises, not tighten it")
    return Promise(chosen.name, result, chosen.share, ttft_s, tpot_s)


def _chosen(
    config: SLOConfig, key_class: str | None, headers: Mapping[str, str], service_tier: str | None
) -> tuple[SLOClass, str]:
    """The class, and which field or header named it."""
    default = config.default_class
    if key_class is not None:
        default = config.named(key_class)
    by_header = headers.get(CLASS_HEADER)
    # The header decides, but a tier that nobody knows is a mistake all the same.
    by_tier = default if service_tier is None else _named(config, default, service_tier, "service_tier")
    if by_header is None:
        return by_tier, "service_tier"
    return _named(config, default, by_header, CLASS_HEADER), CLASS_HEADER


def _named(config: SLOConfig, default: SLOClass, name: str, param: str) -> SLOClass:
    """The class that a client means by `name`. Raises RequestError (400) that names `param`."""
    for one in config.classes:
        if one.name == name:
            return one
    if name in _DEFAULT_TIERS:
        return default
    if name == "flex":
        return min(config.classes, key=lambda one: one.priority)
    if name == "priority":
        return max(config.classes, key=lambda one: one.priority)
    known = ", ".join(one.name for one in config.classes)
    shown = "".join(char if char.isprintable() else "?" for char in name[:80])
    raise RequestError(f"{param}: {shown!r} is none of the classes {known}", param=param)


def _seconds(headers: Mapping[str, str], name: str, otherwise_s: float | None) -> float | None:
    if name not in headers:
        return otherwise_s
    try:
        value = float(headers[name])
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_MS:  # NaN is not
        raise RequestError(f"{name}: must be milliseconds, above 0 and at most {MAX_MS:.0f}", param=name)
    return value / 1000


def _whole(text: str, name: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = MAX_ASKED_PRIORITY + 1
    if abs(value) > MAX_ASKED_PRIORITY:
        raise RequestError(
            f"{name}: must be a whole number from {-MAX_ASKED_PRIORITY} to {MAX_ASKED_PRIORITY}", param=name
        )
    return value


def _forbidden(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="not_allowed", status=403)


SLOVerdict = Literal["met", "missed", "refused"]

ATTAINMENT_S = 120.0
"""Seconds over which `SLOAttainment.of` fades."""


def verdict_of(promise: Promise, ttft_s: float | None, tpot_s: float | None) -> SLOVerdict:
    """Return whether a request that has ended met its promises. One that failed without its first token did not."""
    if promise.ttft_left_s is not None and (ttft_s is None or ttft_s > promise.ttft_left_s):
        return "missed"
    if promise.tpot_s is not None and tpot_s is not None and tpot_s > promise.tpot_s:
        return "missed"
    return "met"


class SLOAttainment:
    """The part of requests, refused and failed ones included, that met both promises, by class."""

    def __init__(self) -> None:
        self._met: dict[str, DecayingSum] = {}
        self._all: dict[str, DecayingSum] = {}

    def record(self, class_name: str, verdict: SLOVerdict, now: float) -> None:
        """Count a request that is over."""
        self._met.setdefault(class_name, DecayingSum(ATTAINMENT_S)).add(float(verdict == "met"), now)
        self._all.setdefault(class_name, DecayingSum(ATTAINMENT_S)).add(1.0, now)

    def of(self, class_name: str, now: float) -> float:
        """Return the attainment over the last minutes, 0 to 1; 1 where there were no requests."""
        if class_name not in self._all:
            return 1.0
        asked = self._all[class_name].value(now)
        return self._met[class_name].value(now) / asked if asked > 1e-9 else 1.0


LEAST, MOST = 0.5, 4.0
_GAIN = 0.05
"""Weight of the newest ratio in the mean: the last 20 or so count."""
_DEVIATIONS = 1.5
"""Mean absolute deviations that are added, to about the 90th percentile."""
_FORGET_S = 10.0
_PART_OF_LIMIT = 0.25


class Correction:
    """The recent error of predictions of one kind of time for one class.

    The mean of actual over predicted times alone would be too short for every second request; like TCP's timers (RFC
    6298), some deviations are added to it. Times that are short against the limit are dominated by what no cost model
    knows (HTTP, the wait for the running step), and their ratio says nothing of long ones: so both sides are taken with
    a part of the limit added. As time passes the factor goes back to 1, so that what was learnt under one load does not
    rule another, and a wrong one can't refuse all requests for good.
    """

    def __init__(self) -> None:
        self._mean = 1.0
        self._deviation = 0.0
        self._at: float | None = None

    def learn(self, predicted_s: float, actual_s: float, limit_s: float, now: float) -> None:
        """A request for which `predicted_s` was expected took `actual_s`; `limit_s` was its promise."""
        added = _PART_OF_LIMIT * limit_s
        ratio = min(max((actual_s + added) / (predicted_s + added), LEAST), MOST)
        mean, deviation = self._now(now)
        self._mean = mean + _GAIN * (ratio - mean)
        self._deviation = deviation + _GAIN * (abs(ratio - mean) - deviation)
        self._at = now

    def factor(self, now: float) -> float:
        """Within LEAST and MOST."""
        mean, deviation = self._now(now)
        return min(max(mean + _DEVIATIONS * deviation, LEAST), MOST)

    def corrected(self, predicted_s: float, limit_s: float, now: float) -> float:
        """Return the time that nine requests out of ten will stay below."""
        added = _PART_OF_LIMIT * limit_s
        return (predicted_s + added) * self.factor(now) - added

    def _now(self, now: float) -> tuple[float, float]:
        if self._at is None:
            return 1.0, 0.0
        kept = math.exp((self._at - now) / _FORGET_S)
        return 1.0 + (self._mean - 1.0) * kept, self._deviation * kept


MEMORY_S = 10.0
_OUTPUT_GAIN = 0.05


def _lately() -> DecayingSum:
    return DecayingSum(MEMORY_S)


@dataclass(slots=True)
class ClassHistory:
    """The recent history of one class, which `admission.py` keeps."""

    priority: int
    share: float
    offered: DecayingSum = field(default_factory=_lately)  # requests that were judged
    admitted: DecayingSum = field(default_factory=_lately)  # requests
    tokens: DecayingSum = field(default_factory=_lately)  # of the admitted: prompts and expected outputs
    ttft: Correction = field(default_factory=Correction)
    tpot: Correction = field(default_factory=Correction)
    mean_output: float | None = None  # tokens, of the last requests
    admitted_at: float = -1e9
    refused_at: float = -1e9
    is_refusing: bool = False  # the newest request was refused

    def expected_output(self, max_tokens: int) -> float:
        """Tokens that a request will probably have, where it may have `max_tokens`."""
        return float(max_tokens) if self.mean_output is None else min(self.mean_output, float(max_tokens))

    def has_put_out(self, num_tokens: int) -> None:
        """A request has ended with so many tokens."""
        if self.mean_output is None:
            self.mean_output = float(num_tokens)
        self.mean_output += _OUTPUT_GAIN * (num_tokens - self.mean_output)

    def backlog_s(self, now: float) -> float:
        """Return the time that earlier refused requests would take at the pace of those admitted lately."""
        refused = self.offered.value(now) - self.admitted.value(now) - 1
        return max(0.0, refused) * MEMORY_S / (self.admitted.value(now) + 1)


ASKED_S = 600.0
"""Seconds after its last request for which a class's promises count."""


class Demand:
    """Counters of one router since its start."""

    def __init__(self, classes: Sequence[SLOClass], clock: Clock):
        self._classes = classes
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        counted = ("requests", "prompt_tokens", "prompt_pairs", "cached_tokens", "output_tokens", "ended")
        self._counts = dict.fromkeys(counted, 0.0)
        self._spared_pairs = 0.0  # of prompts found in a cache, not taken off yet

    def arrived(self, request: GenerateRequest) -> None:
        """A sequence is asked for, whatever becomes of it."""
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += request.num_prompt_tokens
        self._count_pairs(request.num_prompt_tokens**2 / 2)
        self._asked_at[request.promise.class_name] = self._clock()

    def turned_away(self, num_choices: int) -> None:
        """Count choices that are refused before their prompts are known: they are taken to be like the others."""
        counts = self._counts
        if counts["requests"]:
            self._count_pairs(num_choices * counts["prompt_pairs"] / counts["requests"])
            counts["prompt_tokens"] += num_choices * counts["prompt_tokens"] / counts["requests"]
        counts["requests"] += num_choices

    def ended(self, num_cached_tokens: int, num_output_tokens: int) -> None:
        """The answer to a sequence is over: by itself, or because the client left."""
        self._counts["ended"] += 1
        self._counts["cached_tokens"] += num_cached_tokens
        self._counts["output_tokens"] += num_output_tokens
        self._spared_pairs += num_cached_tokens**2 / 2

    def numbers(self) -> dict[str, float]:
        """The counters, and the tightest promises among the classes that are asked for; 0 where nothing is promised."""
        now = self._clock()
        asked = [one for one in self._classes if now - self._asked_at.get(one.name, now - 2 * ASKED_S) < ASKED_S]
        return self._counts | {
            "ttft_s": min((one.ttft_s for one in asked if one.ttft_s is not None), default=0.0),
            "tpot_s": min((one.tpot_s for one in asked if one.tpot_s is not None), default=0.0),
        }

    def _count_pairs(self, num_pairs: float) -> None:
        """Pairs of a token and one that it attends to; those that a cache has spared are taken off later prompts'.

        A prompt of L tokens has L^2 / 2, of which the first p have p^2 / 2. What is cached is known when all is over,
        and a counter can't go back.
        """
        spared = min(self._spared_pairs, num_pairs)
        self._spared_pairs -= spared
        self._counts["prompt_pairs"] += num_pairs - spared


def fleet_numbers(workers: Iterable[tuple[WorkerInfo, WorkerStats]]) -> dict[str, float]:
    """Return the numbers of the workers that can take requests, summed up by role; names begin with the role and a dot.

    `base_s` and the other costs are those of the worker in the middle; they are absent while no worker knows its own.
    """
    serving = [(info, stats) for info, stats in workers if not stats.is_draining]
    numbers: dict[str, float] = {}
    for role in ROLES:
        of_role = [(info, stats) for info, stats in serving if role_of(info, stats) == role]
        numbers |= {f"{role}.{name}": value for name, value in _role_numbers(of_role).items()}
    return numbers


def _tokens(blocks: Iterable[tuple[int, WorkerInfo]]) -> float:
    """Return the tokens of typical requests that so many blocks hold."""
    return float(sum(count * info.layout.groups.tokens_a_block(info.layout.block_size) for count, info in blocks))


def _role_numbers(workers: Sequence[tuple[WorkerInfo, WorkerStats]]) -> dict[str, float]:
    queued = sum(one.requests for _, stats in workers for one in stats.queued)
    present = sum(stats.num_waiting + stats.num_running for _, stats in workers)
    numbers = {
        "running": float(len(workers)),
        "queued_requests": float(queued),
        "queued_tokens": float(sum(stats.num_waiting_tokens for _, stats in workers)),
        "num_decoding": float(max(0, present - queued)),
        "context_tokens": float(sum(stats.context_tokens for _, stats in workers)),
        "owned_tokens": _tokens((stats.owned_blocks, info) for info, stats in workers),
        "total_tokens": _tokens((stats.total_blocks, info) for info, stats in workers),
    }
    if workers:
        numbers["max_batch"] = float(statistics.median_low(info.max_batch for info, _ in workers))
        numbers["step_tokens"] = float(statistics.median_low(info.max_step_tokens for info, _ in workers))
    costs = typical(stats.costs for _, stats in workers)
    if costs is not None:
        numbers |= {name: float(value) for name, value in msgspec.structs.asdict(costs).items()}
    return numbers
