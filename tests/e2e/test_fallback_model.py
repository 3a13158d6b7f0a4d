"""A model without a decoder of ours, served through transformers' modules: KV travels, tokens are transformers'."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architectures.checkpoints import OTHERS, write_checkpoint
from tests.architectures.engines import random_prompts, reference
from tests.e2e.conftest import BLOCK_SIZE, NEW_TOKENS, Server, serving
from twostroke.model.bundled import BUNDLED_MODEL_DIR

pytestmark = pytest.mark.models
NAME = "starcoder2"
VOCAB_SIZE = 4096  # of the tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / NAME
    write_checkpoint(made, NAME, OTHERS[NAME] | {"vocab_size": VOCAB_SIZE})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED_MODEL_DIR / name, made)
    return made


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Server]:
    config = tmp_path / "cluster.yaml"
    config.write_text("router: {decodes_alone: false, roles: fixed}\n")
    yield from serving("--model", str(folder), "--config", str(config))


def test_a_served_model_answers_as_transformers_does(server: Server, folder: Path) -> None:
    (prompt,) = random_prompts(VOCAB_SIZE, [5 * BLOCK_SIZE + 3])
    answer = server.client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (expected,) = reference(folder, [prompt], NEW_TOKENS)
    assert answer.choices[0].model_dump()["token_ids"][: len(expected)] == expected
    assert sum(one["stats"]["transfers_done"] for one in server.workers("decode")) == 1
