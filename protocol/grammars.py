"""Grammars that answers are held to, compiled: routers refuse what can't be, workers follow what they are sent.

Both compile the same text over the same tokens within the same limits, so a worker can take what a router has let pass.
The texts are llguidance's: a JSON object with a list of Lark grammars, regular expressions and JSON schemas.

llguidance can't be interrupted, so everything is bounded beforehand. The limits below were set by writing grammars that
cost as much as they can: docs/tools.md#structured-output has the figures.
"""

import asyncio
import json
import re
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from twostroke.protocol.errors import RequestError

MAX_GRAMMAR_BYTES = 128 * 1024
STACK_BYTES = (
    256 * 2**20
)  # of addresses: llguidance compiles by recursion, and rules may follow each other by thousands
MAX_EXPRESSION_CHARS = 4096
"""Most characters of a regular expression, or of a Lark terminal with a copy of each terminal that it names. Many
optional parts in a row cost llguidance their square in time and memory, which none of its limits bounds."""
MAX_KEPT = 32
"""Most compiled grammars that a process keeps."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    step_max_items=10_000,
    max_items_in_row=600,
    max_lexer_states=50_000,
    max_grammar_size=60_000,
    verbose_errors=False,  # they would show the schema and the answer
)

MAX_BYTE_GRAMMAR = 16 * 1024
"""Largest grammar, in bytes, that is followed byte by byte, too."""
BYTE_LIMITS = LLParserLimits(
    initial_lexer_fuel=50_000,
    step_lexer_fuel=10_000,
    step_max_items=1_000,
    max_items_in_row=200,
    max_lexer_states=10_000,
    max_grammar_size=10_000,
    verbose_errors=False,
)
"""Limits of what is followed byte by byte on an event loop. They do not bound the time of a byte: who follows does."""


class _Key(NamedTuple):
    """Key of a compiled grammar that is kept."""

    client: bytes
    salt: bytes
    grammar: str


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens that a model draws from."""

    tokenizer: str  # what tokenizer.json says
    size: int  # of the model, which may be padded beyond the tokenizer's
    eos_token_ids: tuple[int, ...]


class Grammars:
    """Compiles grammars for one model, on a thread of its own, and keeps the last ones.

    Each client has its turn, however many grammars another one waits for. Nothing that was compiled for one cache salt
    is given to another: by how long it takes that one could tell that the grammar was there.

    Nothing is read before the first one is asked for: servers without such requests pay nothing.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        """`vocabulary` is called on the thread, once."""
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._kept: dict[_Key, LLMatcher] = {}  # at their beginnings; the thread alone changes it
        self._kept_of_bytes: dict[_Key, LLMatcher] = {}  # the same; some have failed
        self._turns = _Turns()
        # One: a grammar may take a second of a core, and those who have none must not feel it.
        self._thread: ThreadPoolExecutor | None = None

    async def matcher(self, grammar: str, salt: bytes = b"", client: bytes = b"") -> LLMatcher:
        """A matcher at the grammar's beginning, the caller's own. `client` has one turn, whatever its salts.

        What it learns of regular expressions it shares with others of the grammar and the client. That is bounded, so
        it may fail of what they have learnt: then there is `renewed`. Raises RequestError, which names no field, where
        the grammar is wrong or too much, or the tokenizer unfit.
        """
        key = _Key(client, salt, grammar)
        kept = self._kept.get(key)
        if kept is None:
            kept = await self._in_turn(client, lambda: self._kept.get(key) or self._keep(key))
        return kept.deep_copy()

    @property
    def tokenizer(self) -> LLTokenizer:
        """The tokens of all matchers that this object has given."""
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._vocabulary())
        return self._tokenizer

    async def byte_matcher(self, grammar: str, salt: bytes = b"", client: bytes = b"") -> LLMatcher:
        """Return a matcher at the grammar's beginning whose tokens are the 256 bytes. It has failed where it can't be.

        It shares nothing with those that answers follow, so what is tried out on it changes no answer. Its limits are
        narrow: each byte is quick on an event loop, and a grammar that takes more fails here alone.
        """
        key, kept = _Key(client, salt, grammar), self._kept_of_bytes
        if (compiled := kept.get(key)) is None:
            compiled = await self._in_turn(client, lambda: kept.get(key) or _keep(kept, key, _of_bytes(grammar)))
        return compiled.deep_copy()

    async def try_out(self, grammar: str, salt: bytes = b"", client: bytes = b"") -> None:
        """Raise what `matcher` raises of a grammar that no answer will follow: it is not kept."""
        await self._in_turn(client, lambda: self._compile(grammar))

    def renewed(self, grammar: str, salt: bytes = b"", client: bytes = b"") -> LLMatcher:
        """Return a matcher that has learnt nothing yet. Blocks the calling thread: not for an event loop's."""
        return self._submit(lambda: self._keep(_Key(client, salt, grammar))).result().deep_copy()

    async def _in_turn(self, client: bytes, make: Callable[[], LLMatcher]) -> LLMatcher:
        """Run `make` on the thread. The client's turn lasts until that has ended, though the client may have gone."""
        await self._turns.take(client)
        loop = asyncio.get_running_loop()

        def give(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits for a turn
                loop.call_soon_threadsafe(self._turns.give)

        try:
            task = self._submit(make)
        except BaseException:  # such as of a thread that could not begin
            self._turns.give()
            raise
        task.add_done_callback(give)
        try:
            return await asyncio.wrap_future(task)
        finally:
            del task  # its error's traceback knows this frame: a cycle would be left to the collection of garbage

    def _submit(self, make: Callable[[], LLMatcher]) -> "Future[LLMatcher]":
        if self._thread is None:
            self._thread = _thread_with_stack(STACK_BYTES)
        return self._thread.submit(make)

    def _keep(self, key: "_Key") -> LLMatcher:
        self._kept.pop(key, None)
        return _keep(self._kept, key, self._compile(key.grammar))

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise _refusal(f"takes {len(grammar)} bytes as a grammar: at most {MAX_GRAMMAR_BYTES} are taken")
        if (num_chars := longest_expression(grammar)) > MAX_EXPRESSION_CHARS:
            size = f"{num_chars} characters" if num_chars < 10**9 else "far too many characters"
            raise _refusal(f"has a regular expression or terminal of {size}: at most {MAX_EXPRESSION_CHARS} are taken")
        matcher = LLMatcher(self.tokenizer, without_forcing(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refusal(_first_line(matcher.get_error()))
        if not _can_begin(matcher, self.tokenizer):
            raise _refusal("no answer can follow it, but for an empty one, or to find out takes too much")
        return matcher


def _keep(kept: dict[_Key, LLMatcher], key: _Key, compiled: LLMatcher) -> LLMatcher:
    """Keep a compiled grammar, and no more than MAX_KEPT: of the client that has the most the oldest goes."""
    kept[key] = compiled
    if len(kept) > MAX_KEPT:
        ((most, _),) = Counter(one.client for one in kept).most_common(1)
        del kept[next(one for one in kept if one.client == most)]
    return compiled


class _Turns:
    """One turn at a time, client by client in a circle. Belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, client: bytes) -> None:
        """Wait for the client's turn. Who is cancelled meanwhile has none."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had come
                self.give()
            raise

    def give(self) -> None:
        """Pass the turn on."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False


_NO_FORCING = '\n%llguidance {"no_forcing": true}'


def without_forcing(grammar: str) -> str:
    """Return the grammar with llguidance's forced tokens off.

    Where only one text can follow, llguidance allows the one token that the tokenizer makes of it. Text that spells a
    special token, such as the end of an answer, becomes that token, so that the answer ends inside of a string.
    """
    if not grammar.lstrip().startswith("{"):
        return grammar + _NO_FORCING  # Lark by itself
    try:
        whole = json.loads(grammar)
        first, *others = whole["grammars"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return grammar  # llguidance says what is wrong with it
    if first.get("lark_grammar"):
        first = {**first, "lark_grammar": first["lark_grammar"] + _NO_FORCING}
    else:
        first, others = {"lark_grammar": "start: @whole" + _NO_FORCING}, [{**first, "name": "whole"}, *others]
    return json.dumps({**whole, "grammars": [first, *others]})


def longest_expression(grammar: str) -> int:
    """The characters of the longest regular expression or terminal in the grammar's text, names replaced by what they
    stand for: at least as many as llguidance makes one of. Of terminals that name each other in a circle it says 0."""
    try:
        parts = json.loads(grammar)["grammars"]
        sources = [(part.get("lark_grammar") or "", part.get("json_schema")) for part in parts]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sources = [(grammar, None)]  # Lark by itself, or what llguidance will find wrong
    return max((max(_longest_terminal(lark), _longest_pattern(schema)) for lark, schema in sources), default=0)


_LARK = re.compile(  # whatever it is given, nothing is read twice
    r"""(?:\#|//).* | (?P<string>"(?:\\.|[^"\\\n])*+(?:"i?)?) | (?P<regex>/(?:\\[\s\S]|[^/\\])++(?:/[a-z]*)?)
      | (?:^|\{)[ \t]*[?!]?(?P<defined>[A-Za-z_]\w*) | (?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.MULTILINE | re.ASCII,
)
_IMPORTED_CHARS = 64
"""Characters counted for a name that the grammar does not define."""


def _longest_terminal(lark: str) -> int:
    """Return the characters of the longest terminal, or regular expression in a rule. Definitions begin lines; names
    of terminals have no small letters. Text that is mistaken for names only makes terminals seem longer."""
    chars: dict[str, int] = {}
    named: dict[str, list[str]] = {}
    longest, terminal = 0, ""
    for found in _LARK.finditer(lark):
        name = found["defined"] or found["name"] or ""
        if found["defined"]:
            terminal = name if name == name.upper() else ""
            named.setdefault(terminal, [])
        elif name and name == name.upper():
            named.setdefault(terminal, []).append(name)
        else:
            if found["regex"]:
                longest = max(longest, len(found["regex"]))
            chars[terminal] = chars.get(terminal, 0) + len(found["regex"] or found["string"] or "")
    named.pop("", None)
    whole: dict[str, int] = {}
    try:
        for name in TopologicalSorter(named).static_order():
            own = chars.get(name, 0) if name in named else _IMPORTED_CHARS
            whole[name] = own + sum(whole[other] for other in named.get(name, ()))
    except CycleError:
        return 0
    return max(longest, *whole.values(), 0)


def _longest_pattern(schema: object) -> int:
    longest, rest = 0, [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            by_name = one.get("patternProperties")
            patterns = [one.get("pattern"), *(by_name if isinstance(by_name, dict) else ())]
            longest = max(longest, *(len(pattern) for pattern in patterns if isinstance(pattern, str)), 0)
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return longest


def _thread_with_stack(num_bytes: int) -> ThreadPoolExecutor:
    """One thread. How large its stack is, is a setting of the whole process for threads that begin."""
    before = threading.stack_size(num_bytes)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        pool.submit(int)  # it begins with its first task
        return pool
    finally:
        threading.stack_size(before)


def _of_bytes(grammar: str) -> LLMatcher:
    """Compile a grammar over single bytes. It has failed where that is too much, or llguidance panics."""
    tokenizer = LLTokenizer("byte", slices=[])
    taken = without_forcing(grammar) if len(grammar) <= MAX_BYTE_GRAMMAR else ""
    try:
        return LLMatcher(tokenizer, taken, log_level=0, limits=BYTE_LIMITS)
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic is no Exception
        return LLMatcher(tokenizer, "", log_level=0)


def _can_begin(matcher: LLMatcher, tokenizer: LLTokenizer) -> bool:
    """Return whether any token but the end may come first. The first mask of an answer is quick afterwards."""
    mask = bytearray(matcher.compute_bitmask())
    for token_id in tokenizer.eos_tokens:
        mask[token_id // 8] &= ~(1 << token_id % 8)
    return any(mask) and not matcher.is_error()


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    try:
        return LLTokenizer(_within(vocabulary), n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids))
    except Exception as error:  # the library raises bare exceptions for whatever it can't take
        raise RequestError(
            f"this model's tokenizer can't hold answers to a grammar: {_first_line(str(error))}",
            code="grammar_unsupported",
        ) from error


def _within(vocabulary: Vocabulary) -> str:
    """The tokenizer without added tokens that the model does not have: older files name some, and use none."""
    tokenizer = json.loads(vocabulary.tokenizer)
    added = tokenizer.get("added_tokens") or []
    kept = [token for token in added if token["id"] < vocabulary.size]
    if len(kept) == len(added):
        return vocabulary.tokenizer
    return json.dumps(tokenizer | {"added_tokens": kept})


def _refusal(message: str) -> RequestError:
    return RequestError(message, code="invalid_grammar")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["unknown error"])[0][:500]
