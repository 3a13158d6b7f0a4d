"""Text to token ids and back, with the tokenizer of the model folder. The `tokenizers` library, not transformers.

A folder may have tokens beside tokenizer.json: older files name added and special tokens, as transformers reads them.

Tokens become text a few at a time: never half a character, never the beginning of a stop string.
"""

import asyncio
import codecs
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer

from twostroke.protocol.errors import ConfigError, RequestError
from twostroke.protocol.grammars import Vocabulary
from twostroke.router.text.chat_forms import ChatForms, ChatTemplate
from twostroke.router.text.output_format import OutputFormat, pick_output_format, with_calls

OFF_LOOP_CHARS = 4096
"""Longer texts are tokenised on a thread: the library lets go of the GIL, and streams beside must not stutter."""

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class TokenPiece:
    """One token by itself: for log-probabilities, where tokens are shown one by one."""

    text: str  # bytes that are no UTF-8 by themselves read "bytes:\\xe2\\x80", as in OpenAI's API
    raw: bytes


class TextTokenizer:
    """A model's tokenizer, its chat template and its stop tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        chat_template: ChatTemplate | None,
        output_format: OutputFormat | None = None,
        info: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        """Token ids below this are the model's."""
        self.eos_token_ids = eos_token_ids
        self._chat_template = chat_template
        self.info = {**info, "chat_template": None if chat_template is None else chat_template.source}
        """The tokenizer's settings as transformers names them, its special tokens and the chat template."""
        self.output_format = output_format
        """The format in which the model writes reasoning and tool calls, where that is known."""
        has_calls = output_format is not None and output_format.language.has_calls
        self.generic_format = with_calls(None if has_calls else output_format)
        """The format of calls for a model whose own is not known, or has no grammar."""
        known = (output_format, self.generic_format, with_calls(None))
        call = next(one.call for one in known if one is not None and one.call is not None)
        self._forms = None if chat_template is None else ChatForms(chat_template, call, is_own=has_calls)
        self._special_ids = {
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.is_byte_level = _is_byte_level(json.loads(tokenizer.to_str()).get("decoder"))
        """Return whether a token is a string of bytes, so that texts of tokens are simply concatenated."""
        self._longest_token_chars = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self.piece = functools.lru_cache(maxsize=65536)(self._piece)
        self.token_bytes = functools.lru_cache(maxsize=65536)(self._token_bytes)
        """Return the bytes that a token of a byte-level vocabulary adds; empty for special and unknown ones."""

    @classmethod
    def load(
        cls, folder: Path, chat_template: str | None = None, response_template: str | None = None
    ) -> "TextTokenizer":
        """The tokenizer of a Hugging Face model folder; the text of a chat template goes before the folder's own.

        `response_template` is the setting of that name. Raises ConfigError naming the file, or the setting, and the
        field.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: a model folder needs the fast tokenizer's file")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
            raise ConfigError(f"{path} can't be read as a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocab_size = _vocab_size(folder, tokenizer)
        special = _special_tokens(folder)
        beside = {name: read_json(folder / name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)}
        add_tokens_beside(tokenizer, folder, beside)
        template = (
            _chat_template(folder, special)
            if chat_template is None
            else ChatTemplate(chat_template, origin="model.chat_template", special_tokens=special)
        )
        config = folder / TOKENIZER_CONFIG
        own = read_json(config).get("response_template")
        form = None if template is None else pick_output_format(response_template, own, str(config), template.source)
        if form is not None:
            _ = form.language  # compiled now: a first chat would hold up all others for a second or two
        made = cls(
            tokenizer,
            vocab_size=vocab_size,
            eos_token_ids=_eos_token_ids(folder, tokenizer, special, vocab_size),
            chat_template=template,
            output_format=form,
            info={name: beside[TOKENIZER_CONFIG].get(name) for name in _INFO} | special,
        )
        if made._forms is not None:
            made._forms.probe()
        return made

    @property
    def response_template(self) -> str | None:
        """The name of the output format."""
        return None if self.output_format is None else self.output_format.name

    @property
    def controls(self) -> dict[str, int]:
        """The tokens that grammars take for more than their text, but for those that end an answer."""
        return {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if (token.special or (token.content.startswith("<") and token.content.endswith(">")))
            and token_id not in self.eos_token_ids
        }

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary over which grammars are compiled. Made anew at each call; it has megabytes."""
        return Vocabulary(self._tokenizer.to_str(), self.vocab_size, self.eos_token_ids)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`; a long one is tokenised off the event loop."""
        if len(text) <= OFF_LOOP_CHARS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def encode_word(self, word: str) -> list[int]:
        """The token ids of a few characters, at once."""
        return self._encode(word, False)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, without tokenising it."""
        return -(-len(text) // self._longest_token_chars)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD, unknown ids are left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The token's name in the vocabulary; None for an id that the tokenizer does not know."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a control token, which has no text."""
        return token_id in self._special_ids

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None, **how: Any
    ) -> str:
        """The prompt of a chat, as `ChatTemplate.render`, in the form that the template shows.

        Raises RequestError where the model has no chat template.
        """
        if self._chat_template is None or self._forms is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
            )
        settled, tools = self._forms.settled(messages, tools)
        return self._chat_template.render(settled, tools=tools, **how)

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._special_ids:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else _byte_level_bytes(token)

    def _piece(self, token_id: int) -> TokenPiece:
        if token_id in self._special_ids or not self.is_byte_level:
            text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
            return TokenPiece(text, text.encode())
        raw = self.token_bytes(token_id)
        try:
            return TokenPiece(raw.decode(), raw)
        except UnicodeDecodeError:
            return TokenPiece("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def _byte_alphabet() -> dict[str, int]:
    """The byte that each printable stand-in means (GPT-2's byte-level alphabet)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """An added token may have characters outside the alphabet; it then stands for itself."""
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty where there is no such file."""
    if path.exists() and not path.is_file():  # a FIFO would be waited for
        raise ConfigError(f"{path} is no regular file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens; those of special_tokens_map.json count where tokenizer_config.json has none."""
    found: dict[str, str] = {}
    for path in (folder / SPECIAL_TOKENS_MAP, folder / TOKENIZER_CONFIG):
        values = read_json(path)
        for name in SPECIAL_TOKENS:
            value = values.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if value is None:
                continue
            if not isinstance(value, str):
                raise ConfigError(f"{path}: {name} must be a string, found {type(value).__name__}")
            found[name] = value
    return found


def _vocab_size(folder: Path, tokenizer: Tokenizer) -> int:
    """The model's, which may be padded beyond the tokenizer's. Workers, which have its weights, know better."""
    known = int(tokenizer.get_vocab_size(with_added_tokens=True))
    path = folder / "config.json"
    raw = read_json(path)
    text = raw.get("text_config")
    size = raw.get("vocab_size", text.get("vocab_size", known) if isinstance(text, dict) else known)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"{path}: vocab_size must be a positive integer, found {size!r}")
    return size


def given_end_tokens(folder: Path) -> list[int]:
    """`eos_token_id` of generation_config.json, else of config.json or its `text_config`.

    Raises ConfigError where that is none.
    """
    for name in (GENERATION_CONFIG, "config.json"):
        fields = read_json(folder / name)
        text = fields.get("text_config")
        given = fields.get("eos_token_id")
        if given is None and isinstance(text, dict):
            given = text.get("eos_token_id")
        if given is None:
            continue
        ids = given if isinstance(given, list) else [given]
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
            raise ConfigError(f"{folder / name}: eos_token_id must be token ids, found {given!r}")
        return ids
    return []


def _eos_token_ids(folder: Path, tokenizer: Tokenizer, special: Mapping[str, str], vocab_size: int) -> tuple[int, ...]:
    """Those of the model's files, and always the tokenizer's own eos_token."""
    ids = given_end_tokens(folder)
    if "eos_token" in special:
        own = tokenizer.token_to_id(special["eos_token"])
        if own is None or own >= vocab_size:
            raise ConfigError(
                f"{folder / 'tokenizer_config.json'}: eos_token {special['eos_token']!r} is not in tokenizer.json, "
                f"or is none of the model's {vocab_size} tokens"
            )
        ids = [*ids, own]
    return tuple(dict.fromkeys(ids))


def _chat_template(folder: Path, special: Mapping[str, str]) -> ChatTemplate | None:
    """chat_template.jinja, else tokenizer_config.json's, else chat_template.json's, where those that see images had
    theirs before 2025; of several named ones, the one named default."""
    path = folder / "chat_template.jinja"
    if path.exists():
        if not path.is_file():  # a FIFO would be waited for
            raise ConfigError(f"{path} is no regular file")
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), origin=str(path), special_tokens=special)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
    path = folder / TOKENIZER_CONFIG
    source = read_json(path).get("chat_template")
    if source is None:
        path = folder / "chat_template.json"
        source = read_json(path).get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{path}: chat_template must be a string, found {type(source).__name__}")
    return ChatTemplate(source, origin=str(path), special_tokens=special)


TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED_TOKENS = "added_tokens.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_INFO = ("tokenizer_class", "model_max_length", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_DECODER = "added_tokens_decoder"
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def add_tokens_beside(tokenizer: Tokenizer, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the tokenizer the tokens that `files` have, the JSON objects of `folder` by their names.

    Raises ConfigError naming file and token for one that can't be read, or would get another number than its own.
    """
    config = files[TOKENIZER_CONFIG]
    if _DECODER in config:
        where, numbered = f"{folder / TOKENIZER_CONFIG}: {_DECODER}", _of_decoder(folder, config[_DECODER])
        named = [*_named(config), *_others(folder / TOKENIZER_CONFIG, config)]
    else:
        named = _named({**config, **files[SPECIAL_TOKENS_MAP]})
        for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
            named += _others(folder / name, files[name])
        special = {_content(value) for value in named}
        where, numbered = f"{folder / ADDED_TOKENS}", _of_added_tokens(folder, files[ADDED_TOKENS], special)
    tokenizer.add_tokens([token for _, token in sorted(numbered.items())])
    for number, token in sorted(numbered.items()):
        found = tokenizer.token_to_id(token.content)
        if found != number:
            raise ConfigError(
                f"{where}: {token.content!r} is {number} there, and would be {found} by tokenizer.json, which lacks "
                "tokens before it: take the tokenizer.json that belongs to the model"
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for value in named:
        if _content(value) not in known:
            known.add(_content(value))
            tokenizer.add_tokens([_special(value)])


def _of_decoder(folder: Path, decoder: Any) -> dict[int, AddedToken]:
    where = f"{folder / TOKENIZER_CONFIG}: {_DECODER}"
    if not isinstance(decoder, dict):
        raise ConfigError(f"{where}: expected an object of tokens by their numbers, found {type(decoder).__name__}")
    tokens: dict[int, AddedToken] = {}
    for number, said in decoder.items():
        if not number.isdecimal() or not isinstance(said, dict):
            raise ConfigError(f"{where}: {number!r}: expected the number of a token, and an object that describes it")
        content, flags = said.get("content"), {name: said[name] for name in _FLAGS if name in said}
        if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
            raise ConfigError(f"{where}: {number}: content must be text, and {', '.join(_FLAGS)} true or false")
        tokens[int(number)] = AddedToken(content, **flags)
    return tokens


def _of_added_tokens(folder: Path, added: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    tokens: dict[int, AddedToken] = {}
    for content, number in added.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(f"{folder / ADDED_TOKENS}: {content!r}: expected the token's number, found {number!r}")
        tokens[number] = AddedToken(content, normalized=content not in special, special=content in special)
    return tokens


def _named(said: Mapping[str, Any]) -> list[Any]:
    """Texts, or objects that describe a token."""
    return [said[name] for name in SPECIAL_TOKENS if said.get(name) is not None]


def _others(path: Path, said: Mapping[str, Any]) -> Iterator[Any]:
    """Special tokens without a name."""
    for name in _EXTRA:
        values = said.get(name) or []
        values = list(values.values()) if isinstance(values, dict) else values
        if not isinstance(values, list) or not all(isinstance(_content(value), str) for value in values):
            raise ConfigError(f"{path}: {name}: expected a list of tokens")
        yield from values


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _special(value: Any) -> AddedToken:
    flags = (
        {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)} if isinstance(value, dict) else {}
    )
    return AddedToken(_content(value), **flags | {"special": True})


_REPLACEMENT = "�"
_LONGEST_REST = 3
"""Most bytes that complete a character that has begun; a token has one at least."""
_MAX_HELD = 8


class ByteDetokenizer:
    """Detokenizer for byte-level vocabularies: an incremental UTF-8 decoder holds back half a character."""

    def __init__(self, tokenizer: TextTokenizer, *, shows_special: bool = False):
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        if self._shows_special and self._tokenizer.is_special(token_id):
            return self._decoder.decode((self._tokenizer.token(token_id) or "").encode())
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any other vocabulary, for instance sentencepiece with byte fallback.

    A token's text may depend on the one before (a leading space is stripped at the very beginning only), so a window of
    tokens is decoded with and without the new ones, and the difference is their text. While it ends in a byte token or
    in U+FFFD, later tokens may still change it: the last few of them, as U+FFFD can be a token, too, and a client can
    have a model write nothing else.
    """

    def __init__(self, tokenizer: TextTokenizer, *, shows_special: bool = False):
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._ids: list[int] = []
        self._begin = 0  # of the window
        self._told = 0  # tokens before this are out

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        is_hidden = self._tokenizer.is_special(token_id) and not self._shows_special
        if is_hidden or self._tokenizer.token(token_id) is None:
            return ""
        self._ids.append(token_id)
        if self._is_byte(token_id):
            return ""
        end = len(self._ids)
        text = self._untold(end)
        if text.endswith(_REPLACEMENT):
            if end - self._told <= _MAX_HELD:
                return ""
            end -= _LONGEST_REST
            while self._is_byte(self._ids[end - 1]) or not text.startswith(self._untold(end)):
                end -= 1
            text = self._untold(end)
        self._advance(end)
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        text = self._untold(len(self._ids))
        self._advance(len(self._ids))
        return text

    def _untold(self, end: int) -> str:
        """The text of the tokens before `end` that is not out yet."""
        skips = not self._shows_special
        before = self._tokenizer.decode(self._ids[self._begin : self._told], skip_special_tokens=skips)
        return self._tokenizer.decode(self._ids[self._begin : end], skip_special_tokens=skips)[len(before) :]

    def _advance(self, end: int) -> None:
        """All before `end` is out. Let the window begin at the last token that surely is a whole piece of text."""
        begin = self._told
        self._told = end
        while begin < self._told - 1 and self._is_byte(self._ids[begin]):
            begin += 1
        if begin < self._told:
            self._begin = begin

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.token(token_id)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


Detokenizer = ByteDetokenizer | WindowDetokenizer


def new_detokenizer(tokenizer: TextTokenizer, *, shows_special: bool = False) -> Detokenizer:
    """The right kind for this vocabulary. `shows_special`: special tokens have a text, too: their own names."""
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, shows_special=shows_special)


@dataclass
class StopStrings:
    """Lets text through up to the stop string that is whole first, the longest of those that are whole at once.

    Holds back only an end that may begin one. However the text is cut into pieces, the same is let through.
    """

    stops: Sequence[str]
    shows_stop: bool = False  # the one that was found is let through, too
    found: str = ""  # the one that ended the text
    _held: str = field(default="", init=False)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found."""
        return bool(self.found)

    def add(self, text: str) -> str:
        """Return the text that may be shown now; nothing after a stop string was found."""
        if self.stopped:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin, self.found = min(found)
            self._held = ""
            return text[: end if self.shows_stop else begin]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that was held back, at the end: it began no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
