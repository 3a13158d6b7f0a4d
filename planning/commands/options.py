"""Options that several planning commands have, of bytes and of KV tiers."""

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from twostroke.loadtests.commands.arguments import above_zero
from twostroke.loadtests.plan import Plan, TraceFile
from twostroke.loadtests.workloads.traces import open_trace
from twostroke.planning.costs.tier_hits import (
    CACHE,
    PrefixHits,
    PromptBlock,
    TierSize,
    found_shares,
    with_hits,
)
from twostroke.protocol.errors import ConfigError
from twostroke.worker.profile import WorkerProfile

_UNITS: dict[str, float] = {"": 1, **{letter: 10 ** (3 * power) for power, letter in enumerate("kMGTP", 1)}}
_UNITS |= {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("KMGTP", 1)}


def amount(text: str) -> float:
    """An argument's type: 80GB, 80GiB, 2TB, 312T, 2e12."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([kKMGTP]?i?)(?:B|B/s|FLOP/s)?", text)
    if found is None or (unit := _UNITS.get(found[2])) is None:
        raise argparse.ArgumentTypeError(f"{text}: write a number, as in 80GB, 80GiB, 2TB or 2e12")
    return above_zero(found[1]) * unit


# --- KV tiers ---

TIERS = (CACHE, "host", "disk", "shared")
"""Places that hold prompts' KV, in the order in which they are looked up."""
UNBOUNDED = "unbounded"


@dataclass(frozen=True)
class TierOption:
    """One `--tier`."""

    name: str
    num_bytes: float
    bytes_per_s: float  # infinite for the GPU cache, which is not read from


def tier_option(text: str) -> TierOption:
    """An argument's type: disk=1TB@2GB/s, shared=unbounded@500MB/s, gpu=40GB."""
    name, _, rest = text.partition("=")
    size, _, speed = rest.partition("@")
    if name not in TIERS or not size or bool(speed) != (name != CACHE):
        raise argparse.ArgumentTypeError(
            f"{text}: write NAME=BYTES@BYTES_PER_SECOND, as in disk=1TB@2GB/s or shared={UNBOUNDED}@1GB/s, with a NAME "
            f"of {', '.join(TIERS[1:])}; or gpu=BYTES"
        )
    num_bytes = math.inf if size == UNBOUNDED else amount(size)
    return TierOption(name, num_bytes, amount(speed) if speed else math.inf)


def tier_hit_shares(text: str) -> dict[str, float]:
    """An argument's type: disk=0.4,host=0.1."""
    try:
        found = {name: float(share) for name, _, share in (part.partition("=") for part in text.split(","))}
    except ValueError:
        found = {}
    if not found or not found.keys() <= set(TIERS) or not all(0 <= one <= 1 for one in found.values()):
        raise argparse.ArgumentTypeError(f"{text}: write shares of 0 to 1, as in disk=0.4,host=0.1")
    if sum(found.values()) > 1:
        raise argparse.ArgumentTypeError(f"{text}: the shares are more than 1 together")
    return found


def add_tiers(parser: argparse._ArgumentGroup) -> None:
    """Add the options of KV tiers."""
    parser.add_argument(
        "--tier",
        type=tier_option,
        action="append",
        default=[],
        metavar="NAME=BYTES@BYTES_PER_S",
        help=f"a place that keeps prompts' KV, as in disk=1TB@2GB/s, shared={UNBOUNDED}@1GB/s or gpu=40GB (its prefix "
        "cache): bytes of all workers together, and of each worker's reads; may be repeated",
    )
    parser.add_argument(
        "--tier-hits",
        type=tier_hit_shares,
        metavar="NAME=SHARE[,...]",
        help="shares of prompt tokens that are found there (default: found by replay of a trace with hash_ids)",
    )


@dataclass
class TierHits:
    """The tiers of a command, and what they hold of its workload's prompts."""

    tiers: tuple[TierOption, ...]
    shares: Mapping[str, float] | None  # as --tier-hits has them
    prompts: Sequence[Sequence[PromptBlock]] = ()  # of the trace
    _found: dict[float, Mapping[str, float]] = field(default_factory=dict, init=False)  # by bytes of a token's KV

    @classmethod
    def of(cls, arguments: argparse.Namespace, plan: Plan) -> "TierHits | None":
        """Return the tiers that were asked for; None without any. Raises ConfigError, LoadTestError."""
        tiers = tuple(sorted(arguments.tier, key=lambda one: TIERS.index(one.name)))
        names = [one.name for one in tiers]
        if len(set(names)) < len(names):
            raise ConfigError(f"--tier: two of one name among {', '.join(names)}; give each once")
        shares: Mapping[str, float] | None = arguments.tier_hits
        if shares is not None:
            if missing := [name for name in shares if name != CACHE and name not in names]:
                raise ConfigError(
                    f"--tier-hits {missing[0]}: say how quickly it is read: --tier {missing[0]}=1TB@2GB/s"
                )
            return cls(tiers, shares)
        return cls(tiers, None, list(_trace_prompts(plan))) if tiers else None

    def apply(self, profile: WorkerProfile, mean_prompt: float) -> tuple[WorkerProfile, PrefixHits]:
        """Return the worker that has these tiers, and what it finds in them."""
        bytes_per_s = {one.name: one.bytes_per_s for one in self.tiers if one.name != CACHE}
        return with_hits(profile, self._found_by(profile.kv_bytes), bytes_per_s, mean_prompt)

    def _found_by(self, token_bytes: float) -> Mapping[str, float]:
        if self.shares is not None:
            return self.shares
        if token_bytes not in self._found:
            cache_bytes = sum(one.num_bytes for one in self.tiers if one.name == CACHE)
            sizes = [TierSize(one.name, one.num_bytes) for one in self.tiers if one.name != CACHE]
            found = found_shares(self.prompts, token_bytes, cache_bytes, sizes)
            self._found[token_bytes] = {name: found[name] for name in (one.name for one in self.tiers)}
        return self._found[token_bytes]


def _trace_prompts(plan: Plan) -> Iterator[list[PromptBlock]]:
    """Yield the blocks of each of the trace's prompts, whose lengths are scaled as the plan's are."""
    workload = plan.workload
    trace = open_trace(Path(workload.path), workload.format) if isinstance(workload, TraceFile) else None
    if trace is None or not trace.format.block_tokens:
        raise ConfigError(
            "--tier: the workload does not say which prompts begin alike: name a trace with hash_ids (mooncake, "
            "bailian), or say what is found, as in --tier-hits disk=0.4"
        )
    for _, turn in islice(trace.timed_turns(plan.max_context, plan.seed), trace.num_requests):
        yield [(piece.seed, piece.tokens) for piece in turn.prompt]


def tier_lines(hits: PrefixHits) -> Iterator[str]:
    """Return what was found, for people."""
    shares = [f"{share:.1%} in {name}" for name, share in hits.found.items()]
    yield f"prompt tokens found: {', '.join(shares)}; {hits.computed:.1%} are computed"
    for name in hits.unread:
        yield f"  what {name} holds is computed: reading it takes longer"


def tiers_as_json(hits: PrefixHits) -> dict[str, object]:
    """Return what was found, for JSON."""
    shares = {name: round(share, 4) for name, share in hits.found.items()}
    return {"found": shares, "unread": list(hits.unread), "computed": round(hits.computed, 4)}
