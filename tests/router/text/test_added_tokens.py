"""Tokens that stand outside of tokenizer.json are tokens all the same, as transformers has them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.grammars import Grammars
from twostroke.router.text.grammar import of_regex
from twostroke.router.text.tokenizer import TextTokenizer

CHATML = "<|im_start|>user\n<think>hi</think>[PAD]<|im_end|>\n<|im_start|>assistant\n"
WORDS = "a<b> x<tool> y <tool>z"


def entry(content: str, **flags: Any) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **flags}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled tokenizer of 4096 tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(BUNDLED_MODEL_DIR / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 4160}))
    return tmp_path


def change(path: Path, **fields: Any) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({name: value for name, value in (raw | fields).items() if value is not None}))


def assert_as_transformers(folder: Path, *, fewer_than: int) -> None:
    ours, theirs = TextTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in (CHATML, WORDS):
        ids = ours._encode(text, False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert len(ours._encode(CHATML, False)) < fewer_than


def in_decoder(folder: Path) -> None:
    own = {str(token_id): entry(name) for token_id, name in enumerate(("<|begin|>", "<|end|>"))}
    added = {"4096": entry("<|im_start|>"), "4097": entry("<|im_end|>"), "4098": entry("<think>", special=False)}
    added["4099"] = entry("<tool>", special=False, lstrip=True, normalized=True)
    change(folder / "tokenizer_config.json", added_tokens_decoder=own | added)


def in_added_tokens(folder: Path) -> None:
    change(folder / "added_tokens.json", **{"<|im_end|>": 4097, "<|im_start|>": 4096, "<tool>": 4098})
    change(folder / "tokenizer_config.json", added_tokens_decoder=None)


def as_special_tokens(folder: Path) -> None:
    change(
        folder / "tokenizer_config.json", pad_token="[PAD]", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )


def as_extra_special_tokens(folder: Path) -> None:
    change(folder / "tokenizer_config.json", extra_special_tokens=["<|im_start|>", "<|im_end|>"])


@pytest.mark.parametrize("place", [in_decoder, in_added_tokens, as_special_tokens, as_extra_special_tokens])
def test_tokens_beside_the_tokenizers_file_are_those_that_transformers_has(place: Any, folder: Path) -> None:
    before = len(TextTokenizer.load(folder)._encode(CHATML, False))
    place(folder)
    assert_as_transformers(folder, fewer_than=before)


def test_special_tokens_have_no_text_and_others_do(folder: Path) -> None:
    in_decoder(folder)
    tokenizer = TextTokenizer.load(folder)
    assert tokenizer.is_special(4096)
    assert not tokenizer.is_special(4098)
    assert tokenizer.vocab_size == 4160
    assert {4096, 4097} <= set(tokenizer.controls.values())


def test_a_token_whose_number_can_not_be_is_refused_by_name(folder: Path) -> None:
    change(folder / "tokenizer_config.json", added_tokens_decoder={"4100": entry("<|im_start|>")})
    with pytest.raises(
        ConfigError, match=r"tokenizer_config.json: added_tokens_decoder: '<\|im_start\|>' is 4100 there"
    ):
        TextTokenizer.load(folder)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": ["a"]}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"4096": {"lstrip": 3}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"additional_special_tokens": 5}, "additional_special_tokens"),
        ("added_tokens.json", {"<a>": "4096"}, "'<a>'"),
    ],
)
def test_added_tokens_that_can_not_be_read_are_refused_by_name(
    name: str, fields: dict[str, Any], named: str, folder: Path
) -> None:
    change(folder / name, **fields)
    with pytest.raises(ConfigError, match=f"{name}: {named}"):
        TextTokenizer.load(folder)


async def test_grammars_are_followed_where_the_model_lacks_a_special_token_that_its_folder_names(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 4096}))
    change(folder / "special_tokens_map.json", sep_token="[SEP]")
    tokenizer = TextTokenizer.load(folder)
    assert tokenizer._encode("[SEP]", False) == [4096]
    matcher = await Grammars(lambda: tokenizer.vocabulary).matcher(of_regex("[ab]+"))
    mask = np.zeros(4096 // 32, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    assert mask.any()
