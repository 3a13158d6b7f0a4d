"""Compiled grammars: kept, copied, and bounded in time and memory whatever a client thinks of."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import (
    MAX_BYTE_GRAMMAR,
    MAX_EXPRESSION_CHARS,
    MAX_GRAMMAR_BYTES,
    MAX_KEPT,
    Grammars,
    Vocabulary,
    longest_expression,
)

TEXT = {"type": "string"}
MAX_S, MAX_BYTES = 1.0, 200 * 2**20  # of one grammar: processor time, memory at its peak
MOST_MASK_S = 0.2  # of one mask, and the token taken in before
EOS = 1


def vocabulary() -> Vocabulary:
    return Vocabulary((BUNDLED_MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"), 4096, (EOS,))


def of_regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


async def test_a_grammar_is_compiled_once_and_each_has_a_matcher_of_its_own() -> None:
    read = []
    grammars = Grammars(lambda: read.append(1) or vocabulary())
    assert read == []
    one, other = [await grammars.matcher(of_regex("ab")) for _ in range(2)]
    (kept,) = grammars._kept.values()
    assert read == [1]
    assert one.consume_token(67) == other.consume_token(67)
    assert one.compute_bitmask() == other.compute_bitmask()
    fresh = await grammars.matcher(of_regex("ab"))
    assert fresh.compute_bitmask() == kept.compute_bitmask() != one.compute_bitmask()
    assert grammars.renewed(of_regex("ab")).compute_bitmask() == kept.compute_bitmask()
    assert next(iter(grammars._kept.values())) is not kept


async def test_the_last_grammars_are_kept_and_no_more() -> None:
    grammars = Grammars(vocabulary)
    for number in range(MAX_KEPT + 5):
        await grammars.matcher(of_regex(f"a{number}"))
    assert list(grammars._kept) == [(b"", b"", of_regex(f"a{number}")) for number in range(5, MAX_KEPT + 5)]


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (of_regex("("), "regex parse error"),
        (of_regex("a" * MAX_GRAMMAR_BYTES), "bytes as a grammar"),
        (of_regex("a?" * (MAX_EXPRESSION_CHARS // 2)), "expression or terminal of 4098 characters: at most 4096"),
        (LLMatcher.grammar_from_lark("start: A\nA: B B\nB: " + "/.?/ " * 600), "terminal of 4800 characters"),
        (LLMatcher.grammar_from_json_schema(json.dumps({"items": {"pattern": "x" * 4097}})), "of 4097 characters"),
        (of_regex(""), "no answer can follow it"),
        (LLMatcher.grammar_from_lark("start: start"), "no answer can follow it"),
        ("{", "EOF"),
    ],
    ids=range(8),
)
async def test_what_is_no_grammar_is_refused(grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        await Grammars(vocabulary).matcher(grammar)
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("lark", "num_chars"),
    [
        ('start: "a long text, but no terminal" /abc/', 5),
        ('start: A\nA: "ab" // B B B B\n | B # B B B\nB: /c/i', 8),
        ("start: _A\n_A: _B _B\n_B: _C _C\n_C: /a/", 12),
        ('start: A\nA: /(?x)a\nB: \\/c/ B "\\"/" B\nB: "de"', 14 + 5 + 2 * 4),  # what looks like a definition is none
        ("start: %lark { A: B B\n start: A }\n?b: C\nB: C C\nC: /a/", 12),
        ("start: A\n%import common.INT\nA: INT INT", 2 * 64),
        ("start: A\nA: A", 0),  # which llguidance refuses
        ("start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60)) + "\nT60: /a/", 3 * 2**60),
        ("/" + "\\/" * 60_000, 120_001),  # read once: not once for each bar
    ],
    ids=range(9),
)
def test_a_terminal_is_as_long_as_all_that_it_stands_for(lark: str, num_chars: int) -> None:
    assert longest_expression(lark) == num_chars
    assert longest_expression(json.dumps({"grammars": [{"lark_grammar": lark}]})) == num_chars


async def test_a_tokenizer_that_can_not_be_read_is_told() -> None:
    with pytest.raises(RequestError, match="this model's tokenizer can't hold") as caught:
        await Grammars(lambda: Vocabulary("{}", 10, (1,))).matcher(of_regex("a"))
    assert caught.value.code == "grammar_unsupported"


def with_controls() -> tuple[Tokenizer, list[int]]:
    """Return the bundled tokenizer with an end of turn and a mark of tool calls, and their ids."""
    tokenizer = Tokenizer.from_str(vocabulary().tokenizer)
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer, [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<tool_call>")]


@pytest.mark.parametrize("spelt", ["<|im_end|>", "<tool_call>", "a<|im_end|>b"])
@pytest.mark.parametrize(
    "grammar_of",
    [
        lambda text: (LLMatcher.grammar_from_json_schema(json.dumps({"const": text})), f'"{text}"'),
        lambda text: (
            LLMatcher.grammar_from_json_schema(
                json.dumps(
                    {
                        "type": "object",
                        "properties": {text: {"const": 1}},
                        "required": [text],
                        "additionalProperties": False,
                    }
                ),
                overrides={"whitespace_flexible": False},
            ),
            json.dumps({text: 1}, separators=(",", ":")),
        ),
        lambda text: (LLMatcher.grammar_from_regex(re.escape(text)), text),
        lambda text: (LLMatcher.grammar_from_lark(f"start: {json.dumps(text)}"), text),
        lambda text: (
            LLMatcher.grammar_from_lark(f"start: part\npart: %json {json.dumps({'const': text})}"),
            f'"{text}"',
        ),
    ],
    ids=["const", "property", "regex", "lark", "nested"],
)
async def test_forced_text_that_spells_a_control_token_stays_text(
    spelt: str, grammar_of: Callable[[str], tuple[str, str]]
) -> None:
    grammar, whole = grammar_of(spelt)
    tokenizer, controls = with_controls()
    size = tokenizer.get_vocab_size()
    grammars = Grammars(lambda: Vocabulary(tokenizer.to_str(), size, (EOS, controls[0])))
    matcher = await grammars.matcher(grammar)
    drawn: list[int] = []
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [one for one in range(size) if mask[one // 8] >> one % 8 & 1]
        drawn.append(allowed[0])
        assert matcher.consume_token(allowed[0])
        assert len(drawn) < 100
    assert not {EOS, *controls} & set(drawn)
    assert tokenizer.decode(drawn, skip_special_tokens=False) == whole


async def test_a_grammar_may_still_name_a_control_token() -> None:
    tokenizer, (end, call) = with_controls()
    grammars = Grammars(lambda: Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), (EOS,)))
    matcher = await grammars.matcher(f'start: <tool_call> "a" <[{end}]>')
    for token_id in (call, *tokenizer.encode("a", add_special_tokens=False).ids, end):
        mask = matcher.compute_bitmask()
        assert mask[token_id // 8] >> token_id % 8 & 1
        assert matcher.consume_token(token_id)


# --- bombs ---


def nested(count: int, around: Callable[[str], str], inmost: str) -> str:
    text = inmost
    for _ in range(count):
        text = around(text)
    return text


def chain(count: int, link: Callable[[int], object], last: object) -> dict[str, object]:
    """Definitions each of which refers to the next."""
    defs = {f"a{i}": link(i + 1) for i in range(count)} | {f"a{count}": last}
    return {"$ref": "#/$defs/a0", "$defs": defs}


def to(number: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/a{number}"}


def bombs() -> dict[str, str]:
    schemas: dict[str, object] = {
        "a chain of arrays": chain(1500, lambda i: {"type": "array", "items": to(i)}, {}),
        "a chain of objects": chain(1000, lambda i: {"type": "object", "properties": {"x": to(i)}}, {}),
        "a chain of unions": chain(1500, lambda i: {"anyOf": [to(i)]}, {}),
        "twice twice twice": chain(60, lambda i: {"allOf": [to(i), to(i)]}, {"type": "string"}),
        "twice in objects": chain(60, lambda i: {"properties": {"x": to(i), "y": to(i)}}, {"type": "string"}),
        "a product": {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(8)]} for i in range(12)]},
        "a long enum": {"enum": [f"{i:05}" * 3 for i in range(3500)]},
        "many properties": {"properties": {f"p{i}": TEXT for i in range(2000)}, "additionalProperties": False},
        "many patterns": {"properties": {f"p{i}": {"type": "string", "pattern": f"^a{{{i}}}$"} for i in range(1000)}},
        "a long string": {"type": "string", "minLength": 100_000},
        "a long array": {"type": "array", "minItems": 100_000, "items": {"type": "string"}},
        "multiples": {"type": "integer", "multipleOf": 49_999},
        "many bounds": {"anyOf": [{"type": "number", "minimum": i + 0.123, "maximum": i * 1e10} for i in range(800)]},
        "exponential": {"type": "string", "pattern": ".*a.{100}b.{100}c.*d.{100}"},
        "a huge enum": {"enum": [f"{i:04x}" for i in range(9000)]},
        "a long constant": {"const": "a" * 65_000},
        "a loop through unions": chain(2, lambda i: {"anyOf": [to(i), {"type": "array", "items": to(0)}]}, to(0)),
        "optional parts": {"type": "string", "pattern": "^" + "a?" * 32_000 + "$"},
        "as many as are taken": {"items": {"anyOf": [
            {"type": "string", "pattern": f"^{chr(97 + i) + '?' * (i > 0)}{'.?' * 2040}$"} for i in range(15)]}},
        "deep objects": json.loads('{"properties":{"a":' * 30 + "{}" + "}}" * 30),
        "a long enum of objects": {"enum": [{"a": i} for i in range(4000)]},
        "references in a circle": chain(2, to, to(0)),
        "a union with itself": chain(1, lambda i: {"anyOf": [to(0), to(i)]}, TEXT),
        "a tree": {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}},
        "a pattern that counts": {"type": "string", "pattern": "^(ab){1,100000}$"},
        "a pattern of two ways": {"type": "string", "pattern": "^(a|aa)*b$"},
        "no end": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    }  # fmt: skip
    regexes = {
        "a count": "a{1,100000}",
        "many ways": "((a|aa)*|(a*)*|(x+x+)+)*b",
        "a window": "(.*a.{18})*",
        "100 kB": "a" * 100_000,
        "optional parts": ".?" * 32_000,
        "as many as are taken": ".?" * (MAX_EXPRESSION_CHARS // 2 - 1),
        "as many letters as are taken": "a?" * (MAX_EXPRESSION_CHARS // 2 - 1),
        "repeats of repeats": "((a{1,100}b?){1,100}c?){1,100}",
        "unicode": r"(\p{L}{1,200}\p{N}{1,200}\w{1,200}){1,20}",
        "many stars": "(" + "|".join(f".*x{i}.{{40}}" for i in range(200)) + ")*",
        "deep": nested(240, lambda text: f"({text}){{0,3}}", "a"),
        "deeper": "(" * 30_000 + "a" + ")" * 30_000,
        "a long count": "(ab|cd){1,100000}",
        "two ways": "(a|aa)*b",
        "two ways, counted": "(a|aa){1,5000}b",
        "stars of stars": "((a*)*)*b",
        "a row of anything": ".*" * 2000,
        "classes": "|".join(f"[\\u{{{0x1000 + 7 * i:x}}}-\\u{{{0x1003 + 7 * i:x}}}]{{1,30}}" for i in range(1500)),
    }
    larks = {
        "optional parts": "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(15)) + "\nT15: /.?/",
        "100 kB of terminals": "start: T\nT: " + '/a?/ "b"? ' * 10_000,
        "many as long as are taken": "start: (" + " | ".join(f"T{i}" for i in range(15)) + ")*\n"
        + "\n".join(f"T{i}: /{chr(97 + i)}{'a?' * 2040}/" for i in range(15)),
        "nested": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
        "repeats": 'start: (a{0,3000}){0,3000}\na: "x" | "y" a',
        "a row of repeats": "start: " + "/[a-z]/{1,1000} " * 3000,
        "repeats of a text": "start: " + '"a"{1,200} ' * 5000,
        "counts": "start: " + " ".join(f"a{{{i},}}" for i in range(90, 8000)) + '\na: "a"',
        "powers": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"?',
        "a chain of rules": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3500)) + '\nr3500: "a"',
        "a chain of terminals": "start: T0\n" + "\n".join(f'T{i}: "a" T{i + 1}' for i in range(3500)) + '\nT3500: "a"',
        "powers of terminals": "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60)) + '\nT60: "a"',
        "and and not": "start: T\nT: /.*a.{30}/ & /.*b.{31}/ & /.*c.{32}/ & ~/.*d.{33}/",
        "ambiguous": "start: s\ns: " + " | ".join(" ".join(["s"] * k) for k in range(2, 40)) + ' | "a" | "aa" | ""',
        "any JSON, often": "start: " + " | ".join(f"j{i}" for i in range(500)) + "\n"
        + "\n".join(f'j{i}: %json {{"type":"object"}}' for i in range(500)),
    }  # fmt: skip
    found = {f"schema: {name}": LLMatcher.grammar_from_json_schema(json.dumps(one)) for name, one in schemas.items()}
    found |= {f"regex: {name}": of_regex(pattern) for name, pattern in regexes.items()}
    return found | {f"Lark: {name}": LLMatcher.grammar_from_lark(text) for name, text in larks.items()}


async def test_what_is_tried_out_byte_by_byte_does_not_touch_what_answers_follow() -> None:
    """A matcher over tokens fails once it has seen so many bytes of one constant; the byte matcher's is another one."""
    grammars, grammar = Grammars(vocabulary), of_regex("(ab){7000}")
    matcher, of_bytes = await grammars.matcher(grammar), await grammars.byte_matcher(grammar)
    while of_bytes.consume_tokens([*b"ab" * 100]):
        pass
    assert of_bytes.is_error()
    assert matcher.compute_bitmask() == (await Grammars(vocabulary).matcher(grammar)).compute_bitmask()
    assert not matcher.is_error()


async def test_a_grammar_that_is_large_is_not_followed_byte_by_byte() -> None:
    grammars = Grammars(vocabulary)
    large = LLMatcher.grammar_from_json_schema(json.dumps({"const": "a" * MAX_BYTE_GRAMMAR}))
    assert not (await grammars.matcher(large)).is_error()
    assert (await grammars.byte_matcher(large)).is_error()
    assert not (await grammars.byte_matcher(of_regex("a+"))).is_error()


BOMB_LAYER = """
import asyncio, json, random, sys, time
from tests.protocol.test_grammars import bombs, vocabulary
from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import Grammars

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

async def main():
    grammars = Grammars(vocabulary)
    await grammars.matcher(next(iter(bombs().values())))
    for name, grammar in bombs().items():
        open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
        began, held, refusal, slowest = time.process_time(), status("VmRSS"), "", 0.0
        try:
            await grammars.matcher(grammar)
            compiled = time.process_time() - began
            for seed in range(4):
                matcher, drawn, token = await grammars.matcher(grammar), random.Random(seed), None
                for _ in range(25):
                    launched = time.process_time()
                    if token is not None and not matcher.consume_token(token):
                        break
                    mask = matcher.compute_bitmask()
                    slowest = max(slowest, time.process_time() - launched)
                    allowed = [i for i in range(4096) if mask[i // 8] >> i % 8 & 1]
                    if matcher.is_error() or not allowed:
                        break
                    token = drawn.choice(allowed) if seed else allowed[-1]
        except RequestError as error:
            compiled, refusal = time.process_time() - began, str(error)
        print(json.dumps([name, compiled, slowest, status("VmHWM") - held, refusal]), flush=True)

asyncio.run(main())
"""


def test_no_bomb_takes_more_than_a_second_and_200_mb_nor_the_process_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", BOMB_LAYER], capture_output=True, text=True, timeout=120)
    took = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{took[-1:]} {done.stderr[-500:]}"
    assert [name for name, *_ in took] == list(bombs())
    assert [one for one in took if one[1] > MAX_S or one[2] > MOST_MASK_S or one[3] > MAX_BYTES] == []
    refused = {name for name, *_, refusal in took if refusal}
    endless = {"schema: references in a circle", "Lark: powers of terminals", "regex: 100 kB"}
    assert {name for name in bombs() if "optional parts" in name} | endless <= refused
    assert [one for one in took if "panic" in one[4]] == [], "what is too large is refused before"


# --- clients beside each other ---


async def test_a_client_with_many_grammars_does_not_keep_another_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled, compile_ = Grammars(vocabulary), [], Grammars._compile

    def noted(self: Grammars, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return compile_(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", noted)
    many = [
        asyncio.create_task(grammars.matcher(of_regex(f"a{number}"), f"salt {number}".encode(), b"many"))
        for number in range(20)
    ]
    await asyncio.sleep(0)
    await grammars.matcher(of_regex("b"), b"", b"one")
    assert compiled.index(of_regex("b")) <= 2, "behind the one that is under way, and at most one more"
    await asyncio.gather(*many)
    assert len(compiled) == 21


async def test_what_nobody_waits_for_any_more_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled, compile_ = Grammars(vocabulary), [], Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, one: compiled.append(one) or compile_(self, one))
    waiting = [asyncio.create_task(grammars.matcher(of_regex(f"a{number}"))) for number in range(5)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await grammars.matcher(of_regex("b"))
    assert len(compiled) <= 2, "the one that was under way can't be interrupted"


async def test_many_that_wait_for_one_grammar_have_it_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled, compile_ = Grammars(vocabulary), [], Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, one: compiled.append(one) or compile_(self, one))
    await asyncio.gather(*(grammars.matcher(of_regex("a")) for _ in range(8)))
    assert compiled == [of_regex("a")]
    await grammars.matcher(of_regex("a"), b"another client")
    assert len(compiled) == 2, "how quick it is tells a client nothing of another one"


async def test_a_client_with_many_grammars_pushes_out_its_own_alone() -> None:
    grammars = Grammars(vocabulary)
    await grammars.matcher(of_regex("b"), b"", b"one")
    for number in range(MAX_KEPT + 5):
        await grammars.matcher(of_regex(f"a{number}"), b"", b"many")
    assert (b"one", b"", of_regex("b")) in grammars._kept
    assert len(grammars._kept) == MAX_KEPT


async def test_a_thread_that_can_not_begin_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(vocabulary)
    with monkeypatch.context() as patched:
        patched.setattr(Grammars, "_submit", lambda self, make: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await grammars.matcher(of_regex("a"))
    async with asyncio.timeout(10):
        await grammars.matcher(of_regex("a"))


async def test_a_refused_grammar_gives_the_turn_on() -> None:
    grammars = Grammars(vocabulary)
    for salt in (b"", b"x"):
        with pytest.raises(RequestError):
            await grammars.matcher(of_regex("("), salt)
        with pytest.raises(RequestError):
            await grammars.try_out(of_regex("("), salt)
    await grammars.try_out(of_regex("a"))
    assert not grammars._kept
