import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from twostroke.router.text.call_grammar import AnswerGrammar
from twostroke.router.text.output_format import ThinkingSyntax

MODEL_FOLDER = Path(__file__).parents[3] / "model" / "bundled"
THINKING = ThinkingSyntax("<think>", "</think>")
CONTROLS = {"<think>": 4096, "</think>": 4097}


@pytest.fixture(scope="module")
def texts():
    """The bundled tokenizer, with tokens around thoughts."""
    said = json.loads((MODEL_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    said["added_tokens"] += [{"id": token_id, "content": text, **flags} for text, token_id in CONTROLS.items()]
    return json.dumps(said)


@pytest.mark.parametrize(
    ("written", "follows"),
    [
        ("short</think>Anything, and more of it.", True),
        ("</think>Yes", True),
        ("word " * 20 + "</think>Yes", False),
        ("never ends", False),
    ],
)
def test_thoughts_end_when_their_budget_is_spent(texts, written, follows):
    rules = AnswerGrammar(CONTROLS)
    grammar = rules.of_answer(THINKING, rules.anything, is_open=True, most_tokens=8)
    matcher = LLMatcher(LLTokenizer(texts, n_vocab=4098, eos_token=[1]), grammar)
    ids = Tokenizer.from_str(texts).encode(written, add_special_tokens=False).ids
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == follows
