"""Tokens that a model's folder has beside tokenizer.json: older files' added and special tokens, as transformers has
them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from twostroke.protocol.errors import ConfigError

TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED_TOKENS = "added_tokens.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
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
