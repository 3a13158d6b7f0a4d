"""Text that grammars force, in tokens: where nothing else may follow, and white space as the answer writes it."""

import itertools
import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.protocol.test_grammars import bombs
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.protocol.clock import Clock
from twostroke.protocol.grammars import Grammars, _of_bytes, _thread_with_stack
from twostroke.router.text.grammar import of_lark, of_schema
from twostroke.router.text.tokenizer import TextTokenizer
from twostroke.worker.forced_text import MAX_BYTES, MAX_DRAWN, SLOW_S, ForcedText
from twostroke.worker.speculator import AcceptanceRates

PROMPT = [1, 2, 3]
ORDER = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 9},
        "address": {
            "type": "object",
            "properties": {"street": {"enum": ["High Street", "High Road"]}},
            "required": ["street"],
            "additionalProperties": False,
        },
        "is_paid": {"type": "boolean"},
    },
    "required": ["customer_name", "address", "is_paid"],
    "additionalProperties": False,
}
VALUE = {"customer_name": "Jo", "address": {"street": "High Road"}, "is_paid": True}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return Grammars(lambda: TextTokenizer.load(BUNDLED_MODEL_DIR).vocabulary).tokenizer


class Writing:
    """An answer on its way, and what is forced behind it."""

    def __init__(self, grammar: str, tokenizer: LLTokenizer, clock: Clock = lambda: 0.0):
        self.rates, self.tokens, self._tokenizer = AcceptanceRates(), list(PROMPT), tokenizer
        self.forced = ForcedText(_of_bytes(grammar), tokenizer, clock)

    def write(self, text: str) -> str:
        """Go on with `text`, one step at a time for each token; return what is expected behind it."""
        for token_id in self._tokenizer.tokenize_str(text) or [None]:
            self.tokens += [] if token_id is None else [token_id]
            self.forced.catch_up(self.tokens, len(PROMPT), self.rates)
        return self.expected()

    def expected(self, most: int = 99) -> str:
        return self._tokenizer.decode_str([token_id for token_id, _ in self.forced.predict(most, self.rates)])


def steps_of(grammar: str, text: str, tokenizer: LLTokenizer) -> tuple[int, int]:
    """Return the tokens of an answer, and the steps that it takes with drafts of forced text alone."""
    writing, answer, steps = Writing(grammar, tokenizer), tokenizer.tokenize_str(text), 0
    while len(writing.tokens) < len(PROMPT) + len(answer):
        writing.forced.catch_up(writing.tokens, len(PROMPT), writing.rates)
        left = answer[len(writing.tokens) - len(PROMPT) :]
        drafted = [token_id for token_id, _ in writing.forced.predict(12, writing.rates)]
        right = next((n for n, pair in enumerate(zip(drafted, left, strict=False)) if pair[0] != pair[1]), None)
        writing.tokens += left[: 1 + min(len(left), len(drafted) if right is None else right)]
        steps += 1
    return len(answer), steps


def test_keys_and_punctuation_are_expected_and_values_are_not(tokenizer: LLTokenizer) -> None:
    writing = Writing(of_schema(ORDER, compact=True), tokenizer)
    assert writing.write("") == '{"customer_name":"'
    assert writing.expected(2) != ""
    assert writing.write('{"customer_name":"Jo') == ""
    assert writing.write('",').startswith('"address":{"street":"High ')
    assert writing.write('"address":{"street":"High R') == 'oad"},"is_paid":'
    assert writing.write('oad"},"is_paid":tr') == "ue}"


def test_white_space_is_expected_as_the_answer_writes_it(tokenizer: LLTokenizer) -> None:
    grammar = of_schema(ORDER)
    assert Writing(grammar, tokenizer).write('{"customer_name": "Jo"') == ', "address": {"street": "High '
    spread = Writing(grammar, tokenizer)
    assert spread.write('{\n    "customer_name": "Jo"') == ',\n    "address": {\n        "street": "High '
    before = '{\n    "customer_name": "Jo",\n    "address": {\n        "street": "High R'
    assert Writing(grammar, tokenizer).write(before) == 'oad"\n    },\n    "is_paid": '
    assert Writing(grammar, tokenizer).write('{"customer_name":"Jo","address":{"street"') == ':"High '


@pytest.mark.parametrize(("style", "most"), [({}, 0.45), ({"indent": 2}, 0.45), ({"separators": (",", ":")}, 0.4)])
def test_an_answer_takes_fewer_steps(style: dict[str, Any], most: float, tokenizer: LLTokenizer) -> None:
    grammar = of_schema(ORDER, compact="separators" in style)
    num_tokens, steps = steps_of(grammar, json.dumps(VALUE, **style), tokenizer)
    assert steps <= most * num_tokens


def test_a_text_that_is_split_otherwise_stays_expected_and_is_trusted_less(tokenizer: LLTokenizer) -> None:
    writing = Writing(of_lark('start: /[ab]/ "customer customer customer" /[ab]/'), tokenizer)
    writing.write("a")
    first = writing.forced.predict(1, writing.rates)[0][1]
    for letter in "customer":
        writing.tokens += tokenizer.tokenize_str(letter)
        writing.forced.catch_up(writing.tokens, len(PROMPT), writing.rates)
    assert writing.expected() == " customer customer"
    assert writing.forced.predict(1, writing.rates)[0][1] < 0.7 * first


def test_no_special_token_is_expected_where_a_text_spells_one(tokenizer: LLTokenizer) -> None:
    special = next(tokenizer.decode_str([n]) for n in range(tokenizer.vocab_size) if tokenizer.is_special_token(n))
    assert any(tokenizer.is_special_token(token_id) for token_id in tokenizer.tokenize_str(f"say {special} again"))
    writing = Writing(of_schema({"const": f"say {special} again"}), tokenizer)
    assert writing.write("") == '"say '


def test_what_comes_soon_is_learnt(tokenizer: LLTokenizer) -> None:
    free = Writing(of_lark('start: (/[^"]/)*'), tokenizer)
    free.write("some text that goes on and on, and no grammar forces anything of it")
    often = Writing(of_lark('start: (/[a-z]/ " comes next ")*'), tokenizer)
    often.write("a comes next b comes next c comes next ")
    assert sum(free.forced.chances_soon()) < 0.1
    assert sum(often.forced.chances_soon()) > 1.0


def test_a_grammar_that_fails_forces_nothing(tokenizer: LLTokenizer) -> None:
    too_large = Writing(of_schema({"const": "a" * 20_000}), tokenizer)
    assert (too_large.write('"'), too_large.forced.chances_soon()) == ("", [])
    other = Writing(of_schema(ORDER), tokenizer)
    assert other.write('{"no such key') == ""
    broken = ForcedText(_of_bytes(of_schema(ORDER)), tokenizer, lambda: 0.0)
    broken.catch_up([*PROMPT, tokenizer.vocab_size + 5], len(PROMPT), AcceptanceRates())
    assert broken.predict(5, AcceptanceRates()) == []
    resumed = ForcedText(_of_bytes(of_lark('start: (/[ab]/ "cd")*')), tokenizer, lambda: 0.0)
    resumed.catch_up([*PROMPT, *tokenizer.tokenize_str("acdb") * (MAX_DRAWN + 1)], len(PROMPT), AcceptanceRates())
    assert (resumed.predict(5, AcceptanceRates()), resumed.chances_soon()) == ([], [])


def test_no_grammar_keeps_the_event_loop(tokenizer: LLTokenizer) -> None:
    """A long text is looked for in parts, and whatever a grammar costs, a step's search is short."""
    long_text = Writing(of_schema({"const": "ab cd " * 1000}), tokenizer)
    assert 0 < len(long_text.write("")) <= MAX_BYTES
    slow: list[tuple[str, float]] = []
    with _thread_with_stack(2**28) as thread:
        for name, grammar in bombs().items():
            matcher: LLMatcher = thread.submit(_of_bytes, grammar).result()
            forced = ForcedText(matcher, tokenizer, time.thread_time)
            began = time.thread_time()
            forced.catch_up(PROMPT, len(PROMPT), AcceptanceRates())
            slow.append((name, time.thread_time() - began))
    assert [one for one in slow if one[1] > 0.02] == []


def test_a_request_whose_grammar_takes_long_goes_on_without(tokenizer: LLTokenizer) -> None:
    for call_s, is_followed in ((0.9 * SLOW_S, True), (1.1 * SLOW_S, False)):
        times = itertools.count(0.0, call_s)
        writing = Writing(of_schema(ORDER), tokenizer, lambda times=times: next(times))  # type: ignore[misc]
        expected = writing.write('{"customer_name": "Jo", "address": {"street": "High ')
        assert bool(expected or writing.forced.chances_soon()) == is_followed


class Uncopied:
    """A matcher that can't be copied, since that takes longer the longer the answer is."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        assert name != "deep_copy"
        return getattr(self._matcher, name)


def test_what_is_looked_for_leaves_the_matcher_where_the_answer_is(tokenizer: LLTokenizer) -> None:
    writing = Writing(of_schema({"type": "array", "items": {"enum": ["red", "green"]}}), tokenizer)
    assert writing.forced._matcher is not None
    writing.forced._matcher = Uncopied(writing.forced._matcher)  # type: ignore[assignment]
    for _ in range(5):
        assert writing.write("[" if len(writing.tokens) == len(PROMPT) else ", ") in ("", '"')
        assert writing.write('"g').startswith("reen")
        writing.write('reen"')
