"""Masks of grammars: what they allow at each position, and that nothing else is drawn."""

import json
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.cpu.kernels.sampling import CpuSampling
from twostroke.model.sampling.sampler import Sampler, TorchSampling
from twostroke.model.sampling.token_masks import MaskFiller, TokenMasks
from twostroke.model.step import Constraint, Draw, RowFault
from twostroke.protocol.requests import SamplingParams

PROMPT = [5, 6, 7]
NUMBERS = '{"type":"array","items":{"type":"integer"},"minItems":1}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.to_str(), eos_token=[1])


def a_draw(matcher: LLMatcher, history: Sequence[int], forbidden: tuple[int, ...] = (), **sampling: object) -> Draw:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Draw(params, history, len(PROMPT), forbidden, constraint=Constraint(matcher, fails))


def fails() -> LLMatcher:
    raise AssertionError("the matcher was renewed")


def matcher_of(vocabulary: LLTokenizer, regex: str, limits: LLParserLimits | None = None) -> LLMatcher:
    return LLMatcher(vocabulary, LLMatcher.grammar_from_regex(regex), log_level=0, limits=limits)


def allowed(words: NDArray[np.int32]) -> set[int]:
    return set(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def texts(tokenizer: Tokenizer, words: NDArray[np.int32]) -> set[str]:
    return {tokenizer.decode([token], skip_special_tokens=False) for token in allowed(words)}


def fill(draw: Draw, position: int, last_token: int, vocab_size: int, num_cores: int = 1) -> NDArray[np.int32]:
    masks = MaskFiller(vocab_size, num_cores).fill([draw], [position], [last_token])
    assert masks is not None
    assert masks.rows.tolist() == [0]
    return masks.words[0]


def test_a_mask_is_of_what_may_follow_the_output_so_far_and_the_last_token(
    tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "abc")
    history, size = [*PROMPT], vocabulary.vocab_size
    draw = a_draw(matcher_of(vocabulary, "abc?"), history)
    assert "a" in texts(tokenizer, fill(draw, 3, PROMPT[-1], size))
    # The step is launched before the token that was drawn is in the list, and again later.
    assert {"b"} <= texts(tokenizer, fill(draw, 4, a, size)) <= {"b", "bc"}
    history += [a, b]
    assert allowed(fill(draw, 5, b, size)) == {c, 1}, "the end, too"
    history += [c]
    assert allowed(fill(draw, 6, c, size)) == {1}
    fill(draw, 7, 1, size)  # a row that was launched though its request had ended: nobody takes its token


def test_a_matcher_that_begins_late_is_where_one_would_be_that_saw_every_token(
    tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    output = tokenizer.encode("[12, 3, 45]", add_special_tokens=False).ids
    grammar = LLMatcher.grammar_from_json_schema(NUMBERS)
    size = vocabulary.vocab_size
    followed = a_draw(LLMatcher(vocabulary, grammar, log_level=0), [*PROMPT, *output])
    for n in range(len(output) + 1):
        last = [*PROMPT, *output][len(PROMPT) + n - 1]
        resumed = a_draw(LLMatcher(vocabulary, grammar, log_level=0), [*PROMPT, *output[:n]])
        expected = fill(followed, len(PROMPT) + n, last, size)
        assert (fill(resumed, len(PROMPT) + n, last, size) == expected).all()
        assert n == len(output) or output[n] in allowed(expected)


@pytest.mark.parametrize("num_cores", [1, 8], ids=["one by one", "at once"])
def test_masks_behind_drafts_are_those_of_answers_that_have_them(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, num_cores: int
) -> None:
    """Drafts that are right, wrong from some token on, or end the answer; then the answer goes on otherwise."""
    grammar = LLMatcher.grammar_from_json_schema(NUMBERS)
    size, filler = vocabulary.vocab_size, MaskFiller(vocabulary.vocab_size, num_cores)
    outputs = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("[12, 3, 45]", "[1]", "[7, 8]")]
    others = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("[12, 99]", "[1]", "[7, 6]")]

    def fresh(history: Sequence[int]) -> NDArray[np.int32]:
        draw = a_draw(LLMatcher(vocabulary, grammar, log_level=0), history)
        return fill(draw, len(history), history[-1], size)

    histories = [[*PROMPT, output[0]] for output in outputs]
    constraints = [Constraint(LLMatcher(vocabulary, grammar, log_level=0), fails) for _ in histories]
    for drafted, length in ((outputs, 6), (others, 9), (outputs, 9)):
        draws, positions, last_tokens, expected = [], [], [], []
        for history, constraint, text in zip(histories, constraints, drafted, strict=True):
            draft = [*text[len(history) - len(PROMPT) :], 1][: length - len(history)]
            copied = constraint.for_drafts(history, 3)
            draft = draft[: copied.num_valid(draft)]
            for num_drafted in range(len(draft) + 1):
                whole = [*history, *draft[:num_drafted]]
                held = copied if num_drafted else constraint
                draw = Draw(SamplingParams(), history, 3, constraint=held, num_drafted=num_drafted)
                draws.append(draw)
                positions.append(len(whole))
                last_tokens.append(whole[-1])
                expected.append(fresh(whole))
        masks = filler.fill(draws, positions, last_tokens)
        assert masks is not None
        assert len(draws) > len(histories)
        for row, words in enumerate(expected):
            if last_tokens[row] != 1:  # nothing follows the end
                assert np.array_equal(masks.words[row], words), row
        for history, output in zip(histories, outputs, strict=True):
            if len(history) - 3 < len(output):
                history.append(output[len(history) - 3])


def test_what_is_forbidden_is_in_no_mask_unless_nothing_else_is(vocabulary: LLTokenizer) -> None:
    size = vocabulary.vocab_size
    open_end = a_draw(matcher_of(vocabulary, "a*"), PROMPT, forbidden=(1, size + 40))
    assert 1 not in allowed(fill(open_end, 3, 7, size))
    assert 1 in allowed(fill(a_draw(matcher_of(vocabulary, "a*"), PROMPT), 3, 7, size))
    closed = a_draw(matcher_of(vocabulary, ""), PROMPT, forbidden=(1,))
    assert allowed(fill(closed, 3, 7, size)) == {1}


def test_a_stop_token_with_text_ends_an_answer_only_where_the_grammar_lets_it_end(
    vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    size = vocabulary.vocab_size
    begun, stop, first = (tokenizer.encode(one, add_special_tokens=False).ids[0] for one in '"xa')
    a_string = LLMatcher.grammar_from_json_schema('{"type":"string"}')

    def held(grammar: str, history: list[int]) -> Draw:
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        constraint = Constraint(matcher, fails, (1, stop, size + 40))
        return Draw(SamplingParams(), [*PROMPT, *history], len(PROMPT), constraint=constraint)

    assert stop not in allowed(fill(held(a_string, [begun]), 4, begun, size)), "the string is not closed"
    endless = LLMatcher.grammar_from_regex("x*")
    assert {1, stop} <= allowed(fill(held(endless, [stop]), 4, stop, size))
    only = held(LLMatcher.grammar_from_regex("axb"), [first])
    assert allowed(fill(only, 4, first, size)) == {stop}
    assert only.constraint is not None
    assert only.constraint.has_failed(4), "drawing it would end the answer too early, and nothing else may follow"


def test_masks_on_threads_are_those_of_one_after_the_other(vocabulary: LLTokenizer) -> None:
    size = vocabulary.vocab_size

    def masks(num_cores: int) -> TokenMasks:
        draws = [a_draw(matcher_of(vocabulary, f"[a-{letter}]+"), PROMPT) for letter in "bcdefghijklm"]
        draws[3] = Draw(SamplingParams(), PROMPT, 3)
        found = MaskFiller(size, num_cores).fill(draws, [3] * 12, [7] * 12)
        assert found is not None
        return found

    alone, together = masks(1), masks(64)
    assert alone.rows.tolist() == together.rows.tolist() == [0, 1, 2, *range(4, 12)]
    assert (alone.words == together.words).all()
    assert len({words.tobytes() for words in alone.words}) == 11
    part = alone.within(2, 6)
    assert part.rows.tolist() == [0, 2, 3]
    assert (part.words == alone.words[2:5]).all()


HARD = "a(.*b.{40}){1,30}"


def failing_at(draw: Draw, last: int) -> int | None:
    """The first position that has no mask."""
    constraint = draw.constraint
    assert constraint is not None
    for position in range(3, last):
        fill(draw, position, draw.history[position - 1], 4096)
        if constraint.has_failed(position):
            assert not constraint.has_failed(position - 1)
            assert constraint.has_failed(position + 1)
            return position
    return None


def test_a_grammar_that_takes_too_much_is_tried_afresh_once_and_then_fails_at_its_position(
    tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    def compiled(max_states: int) -> LLMatcher:
        limits = LLParserLimits(max_lexer_states=max_states, verbose_errors=False)
        return matcher_of(vocabulary, HARD, limits)

    history = [*PROMPT, *tokenizer.encode("abacabadbaaabbbbcdeabcbabcbabcb", add_special_tokens=False).ids]
    others = compiled(300)
    renewed: list[LLMatcher] = []

    def renew() -> LLMatcher:
        renewed.append(compiled(300))
        return renewed[-1]

    def a_constrained(matcher: LLMatcher) -> Draw:
        return Draw(SamplingParams(), history, len(PROMPT), constraint=Constraint(matcher, renew))

    for number in (1, 2):  # the second time others have used up its states
        assert (failing_at(a_constrained(others.deep_copy()), len(history)) or 0) > 4
        assert len(renewed) == number
    assert failing_at(a_constrained(compiled(250_000)), len(history)) is None
    assert len(renewed) == 2


@pytest.mark.parametrize("num_cores", [1, 8], ids=["one by one", "at once"])
def test_a_row_whose_mask_can_not_be_had_fails_alone(vocabulary: LLTokenizer, num_cores: int) -> None:
    size = vocabulary.vocab_size
    narrow, history = LLTokenizer("byte"), [*PROMPT]
    draws = [a_draw(matcher_of(vocabulary, f"{letter}x"), history) for letter in "abcdefghij"]
    expected = MaskFiller(size, num_cores).fill(draws, [3] * 10, [PROMPT[-1]] * 10)
    faults = [RowFault() for _ in draws]
    draws = [msgspec.structs.replace(draw, fault=fault) for draw, fault in zip(draws, faults, strict=True)]
    draws[4] = Draw(
        SamplingParams(), history, 3, constraint=Constraint(matcher_of(narrow, "ax"), fails), fault=faults[4]
    )
    masks = MaskFiller(size, num_cores).fill(draws, [3] * 10, [PROMPT[-1]] * 10)
    assert masks is not None
    assert expected is not None
    assert [fault.error is None for fault in faults] == [row != 4 for row in range(10)]
    assert isinstance(faults[4].error, ValueError)
    for row in range(10):
        assert row == 4 or np.array_equal(masks.words[row], expected.words[row])
    assert (masks.words[4] == -1).all(), "what is drawn is thrown away"
    with pytest.raises(ValueError, match="buffer size"):
        fill(msgspec.structs.replace(draws[4], fault=None), 3, PROMPT[-1], size, num_cores)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 500])
def test_kernels_mask_what_the_reference_does(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    words = random.integers(-(2**31), 2**31, (3, -(-vocab_size // 32))).astype(np.int32)
    words[1, 0], words[2, 0] = 0, -1
    logits = torch.from_numpy(random.normal(size=(5, vocab_size)).astype(np.float32))
    rows = np.array([0, 2, 4])
    expected, found = logits.clone(), logits.clone()
    for row, mask in zip(rows, words, strict=True):
        held = torch.tensor([token in allowed(mask) for token in range(vocab_size)])
        expected[row] = torch.where(held, expected[row], -torch.inf)
    CpuSampling(vocab_size).mask(found, rows, words)
    reference = logits.clone()
    TorchSampling().mask(reference, rows, words)
    assert torch.equal(found, expected)
    assert torch.equal(reference, expected)


@pytest.mark.parametrize("kind", ["numba", "torch"])
@pytest.mark.parametrize("logprobs", [None, 3])
def test_only_what_the_mask_has_is_drawn_and_neighbours_draw_as_ever(kind: str, logprobs: int | None) -> None:
    size = 70
    random = np.random.default_rng(7)
    logits = torch.from_numpy(random.normal(size=(40, size)).astype(np.float32))
    rows = np.arange(0, 40, 2)
    words = random.integers(0, 2**31, (20, 3)).astype(np.int32) & random.integers(0, 2**31, (20, 3)).astype(np.int32)
    vocabulary = LLTokenizer("byte")
    free = [Draw(SamplingParams(seed=i, temperature=i % 3, logprobs=logprobs), PROMPT, 3) for i in range(40)]
    draws = [*free]
    for row in rows.tolist():
        bias = SamplingParams(
            seed=row, temperature=row % 3, logit_bias=((2, 100.0),), repetition_penalty=1.5, logprobs=logprobs
        )
        draws[row] = Draw(bias, PROMPT, 3, constraint=Constraint(matcher_of(vocabulary, "a"), fails))
    masks = TokenMasks(rows, words)
    sampler = Sampler(size, CpuSampling(size) if kind == "numba" else TorchSampling())
    plain = sampler.sample(logits.clone(), free, [3] * 40)
    drawn = sampler.sample(logits.clone(), draws, [3] * 40, masks)
    for i, row in enumerate(rows):
        assert drawn[row].token_id in allowed(words[i])
        assert drawn[row].top == plain[row].top, "log-probabilities are those without the mask"
    assert drawn[1::2] == plain[1::2]


def test_a_constrained_answer_is_always_of_its_grammar(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    """Over random logits, with everything that may change them."""
    size = vocabulary.vocab_size
    sampler, filler = Sampler(size, CpuSampling(size)), MaskFiller(size)
    grammar = LLMatcher.grammar_from_json_schema(NUMBERS, overrides={"whitespace_flexible": False})
    num_ended = 0
    for seed in range(6):
        tokens = [*PROMPT]
        draw = a_draw(
            LLMatcher(vocabulary, grammar, log_level=0), tokens, seed=seed, temperature=1.5, top_p=0.99,
            presence_penalty=1.0, logit_bias=((1, 5.0), (9, 100.0)),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        while tokens[-1] != 1 and len(tokens) < 60:
            masks = filler.fill([draw], [len(tokens)], [tokens[-1]])
            (token,) = sampler.sample(torch.randn((1, size), generator=generator), [draw], [len(tokens)], masks)
            tokens.append(token.token_id)
        if tokens[-1] == 1:
            num_ended += 1
            numbers = json.loads(tokenizer.decode(tokens[3:-1]))
            assert numbers
            assert all(isinstance(number, int) for number in numbers)
    assert num_ended
