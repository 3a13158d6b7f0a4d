"""`make compare BASE=REV`: the quick benches of this checkout in turns with those of another commit.

A machine's speed changes from minute to minute, so figures of two runs say little. Here the two commits take turns, the
second first in every other turn, and each turn gives a ratio of its own. What counts is the median of a figure's ratios
and their range: of five turns the range holds the true median in 15 of 16 cases. The other commit is checked out and
set up under build/compare/, where it stays for the next time.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHES: Mapping[str, tuple[str, ...]] = {
    "engine": ("engine", "--rounds", "2", "--steps", "8", "--prompt-tokens", "256"),
    "transfer": ("transfer", "--quick", "--parts", "handover"),
    "routing": ("routing", "--requests", "60"),
    "serving": ("run", "serving", "--loads", "streams", "--requests", "192"),
}
"""The quick form of each bench."""
BEFORE_PLANS: Mapping[str, tuple[str, ...]] = {"serving": ("serving", "--requests", "192")}
"""The same where a checkout has no `bench run`."""
TURNS = 5
LIMIT_S = 600
LEAST = 0.02  # of a figure, by which medians differ that are worth a word
LOWER_IS_BETTER = ("_s", "_ms", "_us", "_bytes", "_mib")
RATES = ("per_s", "tok_s", "tokens_s", "gb_s")

Figures = dict[str, float]
RunBench = Callable[[Path, str], Figures]
"""Give the figures of a checkout's bench. Raises CompareError."""


class CompareError(Exception):
    """A commit can't be had, or a bench fails."""


@dataclass(frozen=True)
class CommitRatio:
    """A figure of this checkout, divided by the other commit's of the same turn."""

    name: str
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> str:
        """Return better, worse or changed where all turns agree that it is not the same, by LEAST or more, else
        nothing."""
        if min(self.ratios) <= 1 <= max(self.ratios) or abs(self.median - 1) < LEAST:
            return ""
        if not self.name.endswith((*LOWER_IS_BETTER, *RATES)):
            return "changed"
        is_rate = self.name.endswith(RATES)
        return "better" if (self.median > 1) == is_rate else "worse"

    def __str__(self) -> str:
        span = f"{min(self.ratios):.3f} to {max(self.ratios):.3f}"
        return f"{self.name:60} {self.median:7.3f}  ({span})  {self.verdict}".rstrip()


def figures_of(found: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a bench's JSON with their paths, `a.b` or `a.0`."""
    if isinstance(found, bool):
        return
    if isinstance(found, int | float):
        yield name, float(found)
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from figures_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(found, Sequence) and not isinstance(found, str):
        for index, value in enumerate(found):
            yield from figures_of(value, f"{name}.{index}")


def run_bench(checkout: Path, bench: str) -> Figures:
    """Run one bench of a checkout that is set up; the last line that it prints is JSON."""
    quick = BENCHES[bench] if (checkout / "benchmarks" / "run.py").exists() else BEFORE_PLANS.get(bench, BENCHES[bench])
    command = [str(checkout / ".venv" / "bin" / "twostroke"), "bench", *quick]
    try:
        ran = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompareError(f"{' '.join(command)}: not ended after {LIMIT_S} s") from error
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        raise CompareError(f"{' '.join(command)} ended with {ran.returncode}: {ran.stderr.strip()[-600:]}")
    return dict(figures_of(json.loads(lines[-1])))


def in_turns(bench: str, ours: Path, base: Path, turns: int, run: RunBench) -> list[CommitRatio]:
    """Run a bench of both checkouts so many times; figures that one of them lacks, or that are 0, are left out."""
    pairs: list[tuple[Figures, Figures]] = []
    for turn in range(turns):
        order = (ours, base) if turn % 2 == 0 else (base, ours)
        found = {checkout: run(checkout, bench) for checkout in order}
        pairs.append((found[ours], found[base]))
    names = [name for name in pairs[0][0] if all(one.get(name) and other.get(name) for one, other in pairs)]
    return [CommitRatio(name, tuple(one[name] / other[name] for one, other in pairs)) for name in names]


def checked_out(revision: str) -> Path:
    """Return a checkout of the revision that is set up. Raises CompareError where git or the set-up fails."""
    commit = _ran("git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    folder = ROOT / "build" / "compare" / commit
    if not (folder / "Makefile").exists():
        _ran("git", "worktree", "prune")
        _ran("git", "worktree", "add", "--force", "--detach", str(folder), commit)
    _ran("make", "--no-print-directory", "-C", str(folder), "setup")
    return folder


def _ran(*command: str) -> str:
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise CompareError(
            f"{' '.join(command)} ended with {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-600:]}"
        )
    return ran.stdout


def compare(base: Path, benches: Sequence[str], turns: int, run: RunBench = run_bench) -> tuple[dict[str, Any], bool]:
    """Print each bench's comparisons as they are known; a bench that fails leaves the others. Return all of them, and
    whether none failed."""
    found: dict[str, Any] = {"ratios": {}, "worse": [], "failed": {}}
    for bench in benches:
        print(f"{bench}: this checkout over the other commit, median of {turns} turns (range)", flush=True)
        try:
            comparisons = in_turns(bench, ROOT, base, turns, run)
        except (CompareError, ValueError) as error:
            found["failed"][bench] = str(error)
            print(f"  failed: {error}", flush=True)
            continue
        for one in comparisons:
            print(f"  {one}", flush=True)
            found["ratios"][f"{bench}.{one.name}"] = round(one.median, 4)
            if one.verdict == "worse":
                found["worse"].append(f"{bench}.{one.name}")
    return found, not found["failed"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print one JSON object as the last line. Returns the exit code: 1 where a bench failed."""
    parser = argparse.ArgumentParser(prog="make compare", description="Benches of two commits in turns.")
    parser.add_argument("base", help="the other commit: whatever git knows it by")
    parser.add_argument("--benches", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--turns", type=int, default=TURNS, help="default: %(default)s")
    args = parser.parse_args(arguments)
    if args.turns < 1:
        parser.error(f"--turns: {args.turns} is below 1")
    try:
        base = checked_out(args.base)
    except CompareError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    found, is_whole = compare(base, args.benches, args.turns)
    print(json.dumps(found))
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
