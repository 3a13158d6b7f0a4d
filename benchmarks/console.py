"""Arguments that all benches share, and their way of speaking: progress on stderr, the last line of stdout is JSON.

A file of its own, and short, since all of them use it.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from twostroke.protocol.errors import ConfigError


def positive(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError, which argparse shows with the option's name."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def say(line: str) -> None:
    """Tell the people who wait."""
    print(line, file=sys.stderr, flush=True)


def conclude(figures: Mapping[str, Any]) -> None:
    """A line each for people, then all as one JSON object."""
    for name, value in figures.items():
        if not isinstance(value, Mapping):
            print(f"{name:>28}  {value:.4g}" if isinstance(value, float) else f"{name:>28}  {value}")
    print(json.dumps(figures))


def write_json(path: Path, content: object) -> None:
    """Write what `--output` names. Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from error
