"""lm-eval's two ways to measure a server: it scores choices, and it compares answers. Its data is written here."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LM_EVAL = Path(sys.executable).with_name("lm_eval")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
QUESTIONS = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Rome", "Oslo"], "answer": 0},
    {"question": "What is the capital of Italy?", "choices": ["Paris", "Rome", "Oslo"], "answer": 1},
]
CHOSEN = {
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
SAID = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"max_gen_toks": 24, "do_sample": False, "until": ["\n\n"]},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture
def evaluate(run: Callable[..., Any], server: Any, work: Path) -> Callable[..., list[Any]]:
    def samples(task: dict[str, Any], model: str, path: str, *arguments: str) -> list[Any]:
        """Return what lm-eval logs of every question."""
        data = work / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        tasks = work / "tasks"
        tasks.mkdir()
        (tasks / "capitals.yaml").write_text(json.dumps({"task": "capitals", **source, **task}), encoding="utf-8")
        reached = f"model={server.model},base_url={server.url}/v1/{path}"
        told = ("--tasks", "capitals", "--include_path", tasks, "--output_path", "out", "--log_samples")
        ended = run(LM_EVAL, "--model", model, "--model_args", reached, *told, *arguments, **OFFLINE)
        assert ended.returncode == 0
        (log,) = (work / "out").rglob("samples_*.jsonl")
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]

    return samples


def test_lm_eval_scores_choices(evaluate: Callable[..., list[Any]]) -> None:
    samples = evaluate(CHOSEN, "local-completions", "completions")
    assert [sample["acc"] for sample in samples] == [1, 1]
    for sample in samples:
        scores = [float(score) for ((score, _),) in sample["resps"]]
        assert len(set(scores)) == len(scores) == 3
        assert all(score < 0 for score in scores)


def test_lm_eval_compares_answers_of_a_chat(evaluate: Callable[..., list[Any]]) -> None:
    samples = evaluate(SAID, "local-chat-completions", "chat/completions", "--apply_chat_template")
    assert len(samples) == len(QUESTIONS)
    assert all(sample["resps"][0][0].strip() for sample in samples)
