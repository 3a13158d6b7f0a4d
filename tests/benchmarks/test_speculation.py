"""The bench of drafts writes the same prompts in every run, and divides rates within one turn."""

import argparse
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from twostroke.benchmarks.turns import speculation
from twostroke.benchmarks.turns.speculation import LOADS, OFF, ON, body_of, edit_prompt


@pytest.mark.parametrize("kind", ["edit", "plain", "schema", "schemas", "mixed"])
def test_a_body_depends_on_its_seed_alone(kind: str) -> None:
    assert body_of(kind, random.Random("1")) == body_of(kind, random.Random("1"))
    assert body_of(kind, random.Random("1")) != body_of(kind, random.Random("2"))


def test_an_edit_shows_how_and_leaves_the_rest_to_be_written() -> None:
    prompt = edit_prompt(random.Random("1"))
    assert prompt.count("### Original") == 2
    assert prompt.endswith("### The same with values renamed to numbers\n")
    assert prompt.count("numbers") > 3


def test_ratios_are_of_one_turn_and_all_that_failed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server with drafts takes half the time; one of its answers differs, one fails."""
    drafted = {OFF: 0, ON: 0}

    async def send_all(url: str, bodies: Sequence[Mapping[str, Any]], users: int) -> tuple[float, list[Any]]:
        answers: list[Any] = [[1, 2, 3, 1, 2, 3]] * len(bodies)
        if url == ON:
            drafted[ON] += 10
            answers[0] = [1, 2, 3, 1, 2, 4]
            answers[1] = None
        return (2.0 if url == OFF else 1.0), answers

    monkeypatch.setattr(speculation, "send_all", send_all)
    monkeypatch.setattr(speculation, "_drafts", lambda url: (drafted[url], drafted[url], drafted[url] // 2))
    monkeypatch.setattr(speculation.time, "sleep", lambda seconds: None)
    arguments = argparse.Namespace(loads=["c1_edit", "c8_plain"], turns=2, quick=False)
    found = speculation.measure({OFF: OFF, ON: ON}, arguments)
    assert found["c8_plain"] == round(2 * 7 / 8, 3)
    assert (found["errors"], found["mismatched"]) == (4, 8)
    assert found["acceptance"]["c1_edit"] == 0.5
    assert found["tokens_per_step"]["c1_edit"] == round(24 / 14, 2)
    assert found["steps_per_answer"]["c1_edit"] == {OFF: 6.0, ON: 3.5}
    assert found["repeated"]["c1_edit"] == round(1 / 6, 3)
    assert set(LOADS) >= set(arguments.loads)
