"""The bundled model's folder is complete and consistent, and it says what it was made of."""

import json
from typing import Any

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.weights import Checkpoint


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((BUNDLED_MODEL_DIR / "config.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_MODEL_DIR / "tokenizer.json"))


def test_the_weights_are_those_that_its_config_asks_for() -> None:
    checkpoint = Checkpoint(BUNDLED_MODEL_DIR, load_model_config(BUNDLED_MODEL_DIR))
    assert {checkpoint.tensor(name).dtype for name in checkpoint.shapes} == {torch.bfloat16}


def test_the_model_is_small_but_uses_what_large_ones_use(config: dict[str, Any]) -> None:
    assert (BUNDLED_MODEL_DIR / "model.safetensors").stat().st_size < 30_000_000
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 4096


def test_vocabulary_and_special_tokens_agree_with_the_config(config: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096
    named = json.loads((BUNDLED_MODEL_DIR / "tokenizer_config.json").read_text())
    for token in ("bos", "eos", "pad"):
        assert tokenizer.token_to_id(named[f"{token}_token"]) == config[f"{token}_token_id"]
    generation = json.loads((BUNDLED_MODEL_DIR / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert tokenizer.encode("import os").ids[0] == config["bos_token_id"]


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "\t if\r\n   x :  \n\n\n",
        "naïve café — “quotes”, Ünïcödé",
        "世界 🎉👩‍👩‍👧 \u200b\ufeff e\u0301",
        "0x1F 1234567 __init__ self._name",
        "",
    ],
)
def test_any_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize("cut", ["def f(path):", "def f(path):\n", "def f(path):\n    "])
def test_a_prompt_cut_at_a_line_break_or_indentation_is_a_prefix_in_tokens(tokenizer: Tokenizer, cut: str) -> None:
    whole = tokenizer.encode("def f(path):\n    return path\n").ids
    prefix = tokenizer.encode(cut).ids
    assert whole[: len(prefix)] == prefix


def test_the_chat_template_puts_each_turn_between_its_role_and_the_end_token(tokenizer: Tokenizer) -> None:
    template = (BUNDLED_MODEL_DIR / "chat_template.jinja").read_text()
    named = json.loads((BUNDLED_MODEL_DIR / "tokenizer_config.json").read_text())
    assert named["chat_template"] == template
    text = (
        jinja2.Environment()
        .from_string(template)
        .render(
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Document `len`. "}],
            bos_token=named["bos_token"],
            eos_token=named["eos_token"],
            add_generation_prompt=True,
        )
    )
    assert text == ("<|begin|><|system|>\nBe brief.<|end|><|user|>\nDocument `len`.<|end|><|assistant|>\n")
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    assert tokens[:2] == ["<|begin|>", "<|system|>"]
    assert tokens.count("<|end|>") == 2


def test_the_card_says_what_the_model_learned_from_and_how_well() -> None:
    card = (BUNDLED_MODEL_DIR / "MODEL_CARD.md").read_text()
    for word in ("PSF-2.0", "Apache-2.0", "Held-out loss", "Perplexity", "python tools/train_bundled/train.py"):
        assert word in card
