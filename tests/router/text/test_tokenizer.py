import json
import os
import shutil
import threading

import pytest

from twostroke.protocol.errors import ConfigError, RequestError
from twostroke.router.text.tokenizer import TextTokenizer


@pytest.fixture
def folder(tmp_path):
    """A model folder with the bundled tokenizer, to break."""
    from pathlib import Path

    bundled = Path(__file__).parents[3] / "model" / "bundled"
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        shutil.copy(bundled / name, tmp_path / name)
    return tmp_path


def change(path, **fields):
    value = json.loads(path.read_text()) if path.exists() else {}
    value.update(fields)
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not None}))


def test_it_agrees_with_transformers(tokenizer, folder):
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "system", "content": " a "}, {"role": "user", "content": "naïve 😀\n\ndef f(x):\n    pass"}]
    text = tokenizer.render_chat(messages)
    assert text == other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer._encode(text, False)
    assert ids == other.encode(text, add_special_tokens=False)
    assert tokenizer._encode("a b", True) == other.encode("a b")
    assert tokenizer.decode(ids) == other.decode(ids, skip_special_tokens=True)


def test_a_token_is_shown_with_its_bytes(tokenizer):
    (ids,) = [tokenizer._encode("😀", False)]
    assert b"".join(tokenizer.piece(one).raw for one in ids) == "😀".encode()
    assert all(tokenizer.piece(one).text.startswith("bytes:\\x") for one in ids)
    assert tokenizer.piece(1).text == "<|end|>"
    assert tokenizer.piece(tokenizer._encode("import", False)[0]).text == "import"
    assert tokenizer.piece(100_000).text == ""


def test_stop_tokens_come_from_the_generation_config_and_the_tokenizer(folder):
    assert TextTokenizer.load(folder).eos_token_ids == (1,)
    change(folder / "config.json", eos_token_id=7, vocab_size=5000)
    assert TextTokenizer.load(folder).eos_token_ids == (7, 1)
    assert TextTokenizer.load(folder).vocab_size == 5000
    change(folder / "config.json", eos_token_id=None, text_config={"eos_token_id": [5, 6]})
    assert TextTokenizer.load(folder).eos_token_ids == (5, 6, 1)
    change(folder / "generation_config.json", eos_token_id=[3, 4])
    assert TextTokenizer.load(folder).eos_token_ids == (3, 4, 1)


def test_a_response_template_that_is_broken_is_told_when_it_is_loaded(folder):
    change(folder / "tokenizer_config.json", response_template={"fields": {"content": {"open_pattern": "("}}})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: response_template is broken"):
        TextTokenizer.load(folder)
    TextTokenizer.load(folder, response_template="none")


def test_the_template_may_stand_in_a_json_file(folder):
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert TextTokenizer.load(folder).render_chat([{"role": "user", "content": "a"}]) == "<|begin|>a"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    assert TextTokenizer.load(folder).render_chat([]) == "y"
    change(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.json").write_text('{"chat_template": "z"}')
    assert TextTokenizer.load(folder).render_chat([]) == "z"


def test_another_template_goes_before_the_folders(folder):
    tokenizer = TextTokenizer.load(folder, "{{ bos_token }}{{ messages[0].content }}!")
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "<|begin|>a!"
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        TextTokenizer.load(folder, "{% if %}")


def test_a_model_without_a_template_refuses_chats(folder):
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(RequestError) as caught:
        TextTokenizer.load(folder).render_chat([{"role": "user", "content": "a"}])
    assert (caught.value.param, caught.value.code) == ("messages", "no_chat_template")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer.json", None, "is missing"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", "no json", "tokenizer.json"),
        ("tokenizer_config.json", "[1]", "JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token"),
        ("tokenizer_config.json", '{"eos_token": "<nobody>"}', "eos_token"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [1, true]}', "eos_token_id"),
        ("config.json", '{"vocab_size": "many"}', "vocab_size"),
        ("config.json", '{"vocab_size": 0}', "vocab_size"),
        ("chat_template.jinja", "{% if %}", "chat_template"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(folder, name, content, named):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=named) as caught:
        TextTokenizer.load(folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_long_text_is_tokenised_off_the_loop_into_the_same_tokens(tokenizer, monkeypatch):
    encode, on_loop = tokenizer._encode, []

    def spy(text, add_special_tokens):
        on_loop.append(threading.current_thread() is threading.main_thread())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", spy)
    for text in ("import os", "import os\n" * 1000):
        assert await tokenizer.encode(text) == encode(text, True)
    assert on_loop == [True, False]


def test_a_text_that_must_be_too_long_is_known_without_tokenising(tokenizer):
    assert tokenizer.least_tokens("x" * 100_000) > 10
    assert tokenizer.least_tokens("x" * 100) <= 10


def test_a_template_that_is_no_file_is_refused_in_place_of_being_passed_over(folder):
    path = folder / "chat_template.jinja"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is no regular file"):
        TextTokenizer.load(folder)
