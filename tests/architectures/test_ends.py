"""Embedding and LM head as public folders have them: tied by their config, on disk once, twice, or by one name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.checkpoints import FOUR_HEADS, OTHERS, write_checkpoint
from tests.architectures.engines import BLOCK_SIZE, make_engine, random_prompts, reference
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.weights import SINGLE_FILE, Checkpoint
from twostroke.model.served import Way, open_model

NEW_TOKENS = 12
Tensors = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Tensors], object], **fields: Any) -> Path:
    """The folder, with other tensors and fields."""
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def a_model(folder: Path, way: Way) -> tuple[Path, str]:
    """A folder of a model with a head of its own, and the name of its embedding."""
    if way == "native":
        write_checkpoint(folder, "qwen2", {**FOUR_HEADS, "tie_word_embeddings": False})
    else:
        write_checkpoint(folder, "starcoder2", {**OTHERS["starcoder2"], "tie_word_embeddings": False})
    return folder, "model.embed_tokens.weight"


def assert_same_as_transformers(folder: Path, way: Way, generate: Any) -> None:
    prompts = random_prompts(101, (5, 40))
    runner, _ = make_engine(folder, None)
    assert open_model(folder).way == way
    answers = generate(runner, prompts, NEW_TOKENS, chunk=37, block_size=BLOCK_SIZE)
    expected = reference(folder, prompts, NEW_TOKENS)
    assert [answer[: len(row)] for answer, row in zip(answers, expected, strict=True)] == expected


WAYS = pytest.mark.parametrize("way", ["native", "transformers"])


@WAYS
def test_a_trained_head_beside_the_embedding_is_kept_whatever_the_config_says(
    way: Way, tmp_path: Path, generate: Any
) -> None:
    folder, _ = a_model(tmp_path, way)
    before = open_model(folder).num_parameters
    changed(folder, lambda tensors: None, tie_word_embeddings=True)
    assert_same_as_transformers(folder, way, generate)
    assert open_model(folder).num_parameters == before


@WAYS
def test_a_head_that_equals_the_embedding_is_held_once(way: Way, tmp_path: Path, generate: Any) -> None:
    folder, embedding = a_model(tmp_path, way)
    before = open_model(folder).num_parameters
    copy = lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()})  # noqa: E731
    changed(folder, copy, tie_word_embeddings=True)
    assert_same_as_transformers(folder, way, generate)
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    assert open_model(folder).num_parameters == before - 101 * hidden


@WAYS
def test_a_tied_model_may_have_its_head_alone_on_disk(way: Way, tmp_path: Path, generate: Any) -> None:
    folder, embedding = a_model(tmp_path, way)
    move = lambda tensors: tensors.update({"lm_head.weight": tensors.pop(embedding)})  # noqa: E731
    changed(folder, move, tie_word_embeddings=True)
    assert_same_as_transformers(folder, way, generate)


def test_the_digest_knows_a_head_of_its_own(tmp_path: Path) -> None:
    folder, _ = a_model(tmp_path, "native")
    changed(folder, lambda tensors: None, tie_word_embeddings=True)
    digests = []
    for _ in range(2):
        digests.append(Checkpoint(folder, load_model_config(folder)).digest())
        changed(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert len(set(digests)) == 2
