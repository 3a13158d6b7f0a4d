"""Scores and embeddings of prompts against transformers, in fp32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tests.architectures.checkpoints import FOUR_HEADS, OTHERS, OURS, write_checkpoint
from tests.architectures.engines import BLOCK_SIZE, make_engine, random_prompts, ranks
from twostroke.model import runner as runner_module
from twostroke.model.step import Draw, PromptScorer, SequenceStep
from twostroke.protocol.requests import SamplingParams, ScoringParams

TOP = 5
CASES = [("gemma3_text", "native"), ("llama", "native"), ("gpt_neox", "transformers"), ("cohere2", "transformers")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write_checkpoint(made[name], name, {**OTHERS, **OURS}[name] | (FOUR_HEADS if name == "llama" else {}))
        return made[name]

    return folder


def read(runner: Any, prompts: Sequence[Sequence[int]], params: ScoringParams, chunk: int) -> list[PromptScorer]:
    """Score by steps of a chunk of each prompt, beside one that is not scored and draws."""
    scorers = [PromptScorer(params, prompt) for prompt in prompts]
    width = 40 * runner.groups.count
    other = SequenceStep([5, 6], 0, [390 + i for i in range(runner.groups.count)], Draw(SamplingParams(), [5, 6], 2))
    for start in range(0, max(map(len, prompts)), chunk):
        steps = [
            SequenceStep(
                prompt[start : start + chunk],
                start,
                [row * width + i for i in range(-(-len(prompt) // BLOCK_SIZE) * runner.groups.count)],
                Draw(SamplingParams(temperature=0.0), prompt, len(prompt)) if start + chunk >= len(prompt) else None,
                scorer=scorer,
            )
            for row, (prompt, scorer) in enumerate(zip(prompts, scorers, strict=True))
            if start < len(prompt)
        ]
        runner.run([*steps, other])
    return scorers


def rows_of(scorer: PromptScorer) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    scores = scorer.scores()
    assert scores is not None
    ids = np.frombuffer(scores.token_ids, "<i4").reshape(-1, TOP)
    return ids, np.frombuffer(scores.logprobs, "<f4").reshape(-1, TOP + 1), np.frombuffer(scores.ranks, "<i4")


def assert_right(folder: Path, prompts: Sequence[list[int]], scorers: Sequence[PromptScorer]) -> None:
    """Compare with transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, scorer in zip(prompts, scorers, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        ids, logprobs, told_ranks = rows_of(scorer)
        assert len(ids) == len(prompt) - 1
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])
        best = expected.topk(TOP)
        np.testing.assert_allclose(logprobs[:, :1], own, atol=1e-4)
        np.testing.assert_allclose(logprobs[:, 1:], best.values, atol=1e-4)
        is_clear = (expected.topk(TOP + 1).values.diff().abs() > 1e-4).all(1).numpy()
        assert is_clear.mean() > 0.9
        assert (ids == best.indices.numpy())[is_clear].all()
        assert (told_ranks == ((expected > own).sum(1) + 1).numpy())[is_clear].mean() > 0.98


@pytest.mark.parametrize(("name", "way"), CASES)
def test_prompt_tokens_are_as_likely_as_transformers_finds_them(
    name: str, way: Any, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_SCORED_ROWS", 16)
    runner, _ = make_engine(folders(name), way)
    prompts = random_prompts(101, (2, 37, 90, 131))
    assert_right(folders(name), prompts, read(runner, prompts, ScoringParams(logprobs=TOP), chunk=37))


def test_two_ranks_read_the_same(folders: Any) -> None:
    prompts = random_prompts(101, (37, 90))
    with ranks(folders("llama"), None, 2) as together:
        assert_right(folders("llama"), prompts, read(together, prompts, ScoringParams(logprobs=TOP), chunk=64))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(("name", "way"), [CASES[0], CASES[3]])
def test_embeddings_are_transformers_last_hidden_states(name: str, way: Any, pooling: Any, folders: Any) -> None:
    runner, _ = make_engine(folders(name), way)
    prompts = random_prompts(101, (1, 37, 131))
    model = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32).eval()
    for prompt, scorer in zip(prompts, read(runner, prompts, ScoringParams(pooling=pooling), chunk=37), strict=True):
        with torch.inference_mode():
            hidden = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
        vector = hidden[-1] if pooling == "last" else hidden.mean(0)
        np.testing.assert_allclose(np.frombuffer(scorer.embedding(), "<f4"), vector / vector.norm(), atol=1e-5)
        assert scorer.scores() is None
