"""`python3 -m tests.gpu.first.facts add FACTS STEP RC SECONDS LOG` appends what a step's log says, as one JSON object.

`... show FACTS` prints all of them. Imports nothing but the standard library: it runs where all else is broken.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

MOST_LINES, LINE_LENGTH = 60, 180  # that one fact takes where it is shown

_RESULT = r"(PASSED|FAILED|ERROR|SKIPPED)"
_BEHIND = re.compile(rf"^(?:\[gw\d+\] )?(?:\[ *\d+%\] )?{_RESULT} +(tests/\S.*?)(?: - .*)?$", re.M)
_BEFORE = re.compile(rf"^(tests/\S.*?) {_RESULT}(?: .*)?$", re.M)
_CRASHED = re.compile(r"crashed while running '([^']+)'")
_REPORT = re.compile(r"^_+ (?:ERROR at \w+ of )?(test_\S.*?) _+$", re.M)
_WORTH_NOTING = re.compile(r"^.*(?:prompts' attention|captured \d+ graphs|KV cache \d|sums of few tokens).*$", re.M)


def facts_of(log: str, rc: int) -> dict[str, Any]:
    """Return the facts in the log of a test run, of a bench or of one of these programs."""
    facts = _last_object(log)
    outcomes = _outcomes(log)
    if outcomes:
        kinds = sorted(set(outcomes.values()))
        facts["tests"] = {kind: sum(one == kind for one in outcomes.values()) for kind in kinds}
        errors = _errors(log)
        facts["not_passed"] = {
            name: f"{kind}: {errors.get(name, '')}".rstrip(": ")
            for name, kind in sorted(outcomes.items())
            if kind not in ("PASSED", "SKIPPED")
        }
        facts["skipped"] = sorted(name for name, kind in outcomes.items() if kind == "SKIPPED")
    if isinstance(ratios := facts.get("ratios"), dict):
        facts["rows"] = {name: _row(log, name, ratio) for name, ratio in ratios.items()}
    if noted := _WORTH_NOTING.findall(log):
        facts["log"] = [line[-400:] for line in noted[:6]]
    if rc and not facts:
        facts["end"] = log[-600:]
    return facts


def _last_object(log: str) -> dict[str, Any]:
    """The last line that is a JSON object."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return {}


def _outcomes(log: str) -> dict[str, str]:
    """PASSED, FAILED, ERROR, SKIPPED or CRASHED, by the test's name without its file."""
    outcomes = {_name(test): kind for kind, test in _BEHIND.findall(log)}
    outcomes |= {_name(test): kind for test, kind in _BEFORE.findall(log)}
    outcomes |= {_name(test): "CRASHED" for test in _CRASHED.findall(log)}
    return outcomes


def _name(test: str) -> str:
    return test.strip().split("::", 1)[-1]


def _errors(log: str) -> dict[str, str]:
    """Return the place and the first lines of each failing test's error."""
    errors = {}
    _, *parts = _REPORT.split(log)
    for test, text in zip(parts[::2], parts[1::2], strict=True):
        places = re.findall(r"^(\S+\.py:\d+): ", text, re.M)
        lines = re.findall(r"^E +(\S.*)$", text, re.M)[:2]
        errors[test] = "; ".join([*places[-1:], *lines])[:240]
    return errors


def _row(log: str, name: str, ratio: float) -> str:
    """A row's line behind its name, which may fill its column and more."""
    for line in log.splitlines():
        if line.startswith(name) and re.match(r" *-?[\d.]+ of ", rest := line[len(name) :]):
            return " ".join(rest.split())
    return f"{ratio:g}"


def shown(fact: dict[str, Any]) -> list[str]:
    """The lines to print for one step."""
    fact = dict(fact)
    lines = [f"{fact.pop('step')}: rc {fact.pop('rc')}, {fact.pop('s')} s"]
    for key, value in fact.items():
        if key in ("ratios", "predicted"):
            continue
        if key in ("rows", "not_passed", "log"):
            items = [f"{name}: {text}" for name, text in value.items()] if isinstance(value, dict) else value
            lines.append(f"  {key}: {len(items)}")
            lines += [f"    {item}"[:LINE_LENGTH] for item in items[:MOST_LINES]]
            if len(items) > MOST_LINES:
                lines.append(f"    and {len(items) - MOST_LINES} more")
        else:
            lines.append(f"  {key}: {json.dumps(value)[:1200]}")
    return lines


def main(arguments: list[str]) -> None:
    command, facts = arguments[0], Path(arguments[1])
    if command == "add":
        step, rc, seconds, log = arguments[2:]
        text = Path(log).read_text(errors="replace") if Path(log).exists() else ""
        with facts.open("a") as file:
            file.write(json.dumps({"step": step, "rc": int(rc), "s": int(seconds), **facts_of(text, int(rc))}) + "\n")
    else:
        for line in facts.read_text().splitlines():
            print(*shown(json.loads(line)), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
