"""The layout of a GGUF file: metadata, and tensors mapped where they lie.

The authors' own reader takes 8 s for the 49,000 tokens of a small vocabulary, this one a tenth of a second.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from twostroke.protocol.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

SUFFIX = ".gguf"
HYBRID = "qwen35"  # the architecture whose tensors hybrid.py undoes
FILE = f"twostroke-unpacked{SUFFIX}"  # in a folder that folder.py made, and in no other
ROPE_FACTORS = "rope_freqs.weight"  # a tensor that says how angles are scaled

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # kind -> struct's letter
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """One tensor."""

    kind: "GGMLQuantizationType"
    shape: tuple[int, ...]  # the last dimension is the one that lies together
    data: npt.NDArray[np.uint8]  # [..., bytes of a row], mapped


@dataclass(frozen=True)
class Gguf:
    """Metadata and tensors of a file, by their names in it."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> Gguf:
    """Raises ConfigError for a file that can't be read."""
    try:
        status = path.stat()
        return _read_once(path, status.st_size, status.st_mtime_ns)
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise ConfigError(f"{path} can't be read as GGUF: {error}") from error


_INTEGERS = re.compile(r"tokenizer\.ggml\.\w+_token_id|split\.count|\w+\.(block_count|context_length|vocab_size)")
_TEXTS = re.compile(
    r"general\.architecture|tokenizer\.ggml\.(model|pre)|tokenizer\.chat_template|\w+\.rope\.scaling\.type"
)
_LISTS = {"tokenizer.ggml.tokens": str, "tokenizer.ggml.merges": str, "tokenizer.ggml.token_type": int}
_REALS = re.compile(r"\w+\.rope\.(scaling\.(factor|attn_factor)|scale_linear)|general\.sampling\.\w+")


def check_kinds(metadata: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError for a field that is read, and has a value of another kind than it must have."""
    for name, value in metadata.items():
        expected = ""
        if _INTEGERS.fullmatch(name) and type(value) is not int:
            expected = "an integer"
        elif _TEXTS.fullmatch(name) and not isinstance(value, str):
            expected = "text"
        elif _REALS.fullmatch(name) and (isinstance(value, bool) or not isinstance(value, int | float)):
            expected = "a number"
        elif (kind := _LISTS.get(name)) and not (isinstance(value, list) and all(type(one) is kind for one in value)):
            expected = f"a list of {'texts' if kind is str else 'integers'}"
        if expected:
            raise ConfigError(f"{path}: {name}: expected {expected}, found {type(value).__name__}")


@functools.lru_cache(maxsize=1)
def _read_once(path: Path, size: int, changed_ns: int) -> Gguf:
    """A load asks for the same file several times; the last two say whether it is still the same."""
    return _read(np.memmap(path, np.uint8, mode="r"))


def _read(mapped: npt.NDArray[np.uint8]) -> Gguf:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # takes 0.15 s: only GGUF files pay for it

    content, place = mapped.data, 0

    def take(count: int) -> memoryview:
        nonlocal place
        if place + count > len(content):
            raise ValueError("it ends early")
        place += count
        return content[place - count : place]

    def numbers(letter: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{letter}"
        return struct.unpack(layout, take(struct.calcsize(layout)))

    def text() -> str:
        return bytes(take(*numbers("Q"))).decode("utf-8", errors="replace")

    def value(kind: int) -> Any:
        if kind == _ARRAY:
            (of,), (count,) = numbers("I"), numbers("Q")
            if count > len(content):
                raise ValueError("an array of it is longer than the file")
            if of == _ARRAY:
                raise ValueError("it has arrays of arrays")
            if of in _NUMBERS:
                return list(numbers(_NUMBERS[of], count))
            return [value(of) for _ in range(count)]
        if kind == _STRING:
            return text()
        if kind not in _NUMBERS:
            raise ValueError(f"it has a value of the unknown kind {kind}")
        return numbers(_NUMBERS[kind])[0]

    if bytes(take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    (version,), (num_tensors, num_fields) = numbers("I"), numbers("Q", 2)
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, not {' or '.join(map(str, _VERSIONS))}")
    metadata = {text(): value(*numbers("I")) for _ in range(num_fields)}
    described: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]] = []
    for _ in range(num_tensors):
        name, (num_dimensions,) = text(), numbers("I")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed(numbers("Q", num_dimensions)))
        (kind,), (offset,) = numbers("I"), numbers("Q")
        described.append((name, shape, GGMLQuantizationType(kind), offset))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in described:
        together, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // together * block_bytes
        first = start + offset
        data = mapped[first : first + math.prod(shape[:-1]) * row_bytes]
        if shape[-1] % together or data.size != math.prod(shape[:-1]) * row_bytes:
            raise ValueError(f"tensor {name} is cut off")
        tensors[name] = GgufTensor(kind, shape, data.reshape(*shape[:-1], row_bytes))
    return Gguf(metadata, tensors)
