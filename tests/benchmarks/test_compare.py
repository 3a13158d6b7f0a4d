"""Benches of two commits in turns: with made-up benches, and of a repository's own commits up to their set-up."""

import json
from pathlib import Path

import pytest

from twostroke.benchmarks import compare
from twostroke.benchmarks.compare import CommitRatio, CompareError, Figures, figures_of, in_turns

OURS, BASE = Path("ours"), Path("base")


def test_numbers_are_found_by_their_paths_and_nothing_else() -> None:
    found = {"a": {"b": 1, "told": "fast"}, "rows": [2.5, {"c_s": 3}], "is_whole": True, "none": None}
    assert dict(figures_of(found)) == {"a.b": 1.0, "rows.0": 2.5, "rows.1.c_s": 3.0}


def test_commits_take_turns_and_each_turn_gives_a_ratio() -> None:
    ran: list[Path] = []

    def run(checkout: Path, bench: str) -> Figures:
        ran.append(checkout)
        slow_machine = len(ran) > 2  # from the second turn on
        return {
            "p50_s": (2.0 if checkout == OURS else 1.0) * (3 if slow_machine else 1),
            "zero": 0.0,
            checkout.name: 1.0,
        }

    (only,) = in_turns("engine", OURS, BASE, 3, run)
    assert ran == [OURS, BASE, BASE, OURS, OURS, BASE]
    assert only == CommitRatio("p50_s", (2.0, 2.0, 2.0))


@pytest.mark.parametrize(
    ("name", "ratios", "verdict"),
    [
        ("handover_p99_s", (1.2, 1.1, 1.3), "worse"),
        ("handover_p99_s", (0.8, 0.9, 0.7), "better"),
        ("handover_p99_s", (0.9, 1.1, 1.3), ""),
        ("handover_p99_s", (1.001, 1.01, 1.03), ""),
        ("tokens_per_s", (1.2, 1.1, 1.3), "better"),
        ("out_tok_s", (0.8, 0.9, 0.7), "worse"),
        ("pull_gb_s", (0.8, 0.9, 0.7), "worse"),
        ("prefill.of_gemm", (0.8, 0.9, 0.7), "changed"),
    ],
)
def test_a_verdict_is_what_all_turns_agree_on(name: str, ratios: tuple[float, ...], verdict: str) -> None:
    assert CommitRatio(name, ratios).verdict == verdict


def test_a_bench_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def run(checkout: Path, bench: str) -> Figures:
        if bench == "engine":
            raise CompareError("no room")
        return {"choice_us": 2.0 if checkout == compare.ROOT else 1.0}

    found, is_whole = compare.compare(BASE, ["engine", "routing"], 2, run)
    assert not is_whole
    assert found == {
        "ratios": {"routing.choice_us": 2.0},
        "worse": ["routing.choice_us"],
        "failed": {"engine": "no room"},
    }
    assert "failed: no room" in capsys.readouterr().out


SCRIPT = """#!/bin/sh
echo progress
{last}
"""


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("echo '{\"p50_s\": 2}'", None),
        ("echo no >&2; exit 3", "ended with 3: no"),
        ("printf ''; exit 1", "ended with 1"),
    ],
)
def test_a_benchs_last_line_has_its_figures(last: str, told: str | None, tmp_path: Path) -> None:
    command = tmp_path / ".venv" / "bin" / "twostroke"
    command.parent.mkdir(parents=True)
    command.write_text(SCRIPT.format(last=last))
    command.chmod(0o755)
    if told is None:
        assert compare.run_bench(tmp_path, "engine") == {"p50_s": 2.0}
    else:
        with pytest.raises(CompareError, match=told):
            compare.run_bench(tmp_path, "engine")


def test_an_unknown_commit_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["no-such-commit"]) == 1
    assert "no-such-commit" in capsys.readouterr().err


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare, "checked_out", lambda revision: BASE)
    monkeypatch.setattr(compare, "compare", lambda *arguments: ({"ratios": {}}, True))
    assert compare.main(["HEAD", "--benches", "routing", "--turns", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"ratios": {}}
