"""Compiled grammars: kept, copied, and bounded in time and memory whatever a client thinks of."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from llguidance import LLMatcher

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import MAX_GRAMMAR_BYTES, MAX_KEPT, Grammars, Vocabulary

TEXT = {"type": "string"}
MOST_S, MOST_BYTES = 1.0, 200 * 2**20  # of one grammar: processor time, memory
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
    assert list(grammars._kept) == [of_regex(f"a{number}") for number in range(5, MAX_KEPT + 5)]


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (of_regex("("), "regex parse error"),
        (of_regex("a" * MAX_GRAMMAR_BYTES), "bytes as a grammar"),
        (of_regex(""), "no answer can follow it"),
        (LLMatcher.grammar_from_lark("start: start"), "no answer can follow it"),
        ("{", "EOF"),
    ],
    ids=range(5),
)
async def test_what_is_no_grammar_is_refused(grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        await Grammars(vocabulary).matcher(grammar)
    assert caught.value.code == "invalid_grammar"


async def test_a_tokenizer_that_can_not_be_read_is_told() -> None:
    with pytest.raises(RequestError, match="this model's tokenizer can't hold") as caught:
        await Grammars(lambda: Vocabulary("{}", 10, (1,))).matcher(of_regex("a"))
    assert caught.value.code == "grammar_unsupported"


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
    found = {name: LLMatcher.grammar_from_json_schema(json.dumps(schema)) for name, schema in schemas.items()}
    found |= {name: of_regex(pattern) for name, pattern in regexes.items()}
    return found | {name: LLMatcher.grammar_from_lark(text) for name, text in larks.items()}


BOMB_LAYER = """
import asyncio, json, sys, time
from tests.protocol.test_grammars import bombs, vocabulary
from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import Grammars

def resident(most):
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM" if most else "VmRSS")]
    return int(line.split()[1]) * 1024

async def main():
    grammars = Grammars(vocabulary)
    await grammars.matcher(next(iter(bombs().values())))
    for name, grammar in bombs().items():
        open("/proc/self/clear_refs", "w").write("5")  # the most so far is what there is
        began, held, refusal = time.process_time(), resident(most=False), ""
        try:
            matcher = await grammars.matcher(grammar)
            for _ in range(20):
                mask = matcher.compute_bitmask()
                allowed = [i for i in range(4096) if mask[i // 8] >> i % 8 & 1]
                if matcher.is_error() or not allowed or not matcher.consume_token(allowed[-1]):
                    break
        except RequestError as error:
            refusal = str(error)
        print(json.dumps([name, time.process_time() - began, resident(most=True) - held, refusal]), flush=True)

asyncio.run(main())
"""


def test_no_bomb_takes_more_than_a_second_and_200_mb_nor_the_process_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", BOMB_LAYER], capture_output=True, text=True, timeout=120)
    took = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{took[-1:]} {done.stderr[-500:]}"
    assert [name for name, *_ in took] == list(bombs())
    assert [one for one in took if one[1] > MOST_S or one[2] > MOST_BYTES] == []
    assert [one for one in took if "panic" in one[3]] == [], "what is too large is refused before"
