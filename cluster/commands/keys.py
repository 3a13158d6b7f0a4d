"""`twostroke key new`, `list` and `revoke`: API keys, in the file that `auth.keys_file` names or for the configuration.

Routers read the file again when it changes, so nothing is deployed anew.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from twostroke.cluster.config.reading import load_yaml, read_settings
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.tenants import AuthConfig, KeyConfig, new_key

_SPAN = re.compile(r"(\d{1,5})([dhm])")
_UNITS: Mapping[str, Callable[[int], timedelta]] = {
    "d": lambda count: timedelta(days=count),
    "h": lambda count: timedelta(hours=count),
    "m": lambda count: timedelta(minutes=count),
}


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="whose key it is")
    parser.add_argument("--slo-class", metavar="CLASS", help="of requests that name none")
    parser.add_argument("--metrics", action="store_true", help="may also ask for /metrics and /status")
    parser.add_argument("--admin", action="store_true", help="may also ask for these and /doctor, and order workers")
    parser.add_argument(
        "--expires", metavar="WHEN", help="90d, 12h, 30m from now, or a date or moment of ISO 8601 (UTC)"
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="of keys, to which its line is added")


def run_new(arguments: argparse.Namespace) -> int:
    """Print the key and its line; returns 0. Raises ConfigError for what can't be a key, or a file that is wrong."""
    key, sha256 = new_key()
    raw: dict[str, Any] = {"name": arguments.name, "sha256": sha256}
    if arguments.slo_class is not None:
        raw["slo_class"] = arguments.slo_class
    raw |= {right: True for right in ("metrics", "admin") if getattr(arguments, right)}
    if arguments.expires is not None:
        raw["expires"] = _moment(arguments.expires)
    made = read_settings(KeyConfig, raw)
    if arguments.file is not None:
        with _locked(arguments.file) as file:
            _write(file, [*(_keys(file) if file.exists() else ()), made])
    print(f"The key, which is shown this once:\n\n    {key}\n")
    if arguments.file is not None:
        print(f"{arguments.file} has it: routers that read that file know it within seconds.")
    else:
        print("Under `auth: keys:` of the server's configuration, or `keys:` of its `auth.keys_file`:\n")
        print(f"    {_line(made)}")
    return 0


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("named", nargs="?", type=Path, metavar="FILE", help="as --file")
    parser.add_argument("--file", type=Path, metavar="FILE", help="of keys")


def run_list(arguments: argparse.Namespace) -> int:
    """Print a line for each key; returns 0. Raises ConfigError for a file that is wrong."""
    files = [file for file in (arguments.named, arguments.file) if file is not None]
    if len(files) != 1:
        raise ConfigError("key list: name one file of keys, --file FILE")
    rows = [("NAME", "SHA256", "CLASS", "RIGHT", "EXPIRES")]
    for key in _keys(files[0]):
        expires = "never" if key.expires is None else key.expires
        if time.time() >= key.expires_at:
            expires += " (expired)"
        right = "admin" if key.admin else "metrics" if key.metrics else "-"
        rows.append((key.name, f"{key.sha256[:8]}...", key.slo_class or "-", right, expires))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def add_revoke_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="whose key is taken back")
    parser.add_argument(
        "--file", type=Path, required=True, metavar="FILE", help="of keys, from which its line is taken"
    )


def run_revoke(arguments: argparse.Namespace) -> int:
    """Take the key out of the file; returns 0. Raises ConfigError where it isn't there."""
    with _locked(arguments.file) as file:
        keys = _keys(file)
        left = [key for key in keys if key.name != arguments.name]
        if len(left) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"{file}: has no key {arguments.name}; it has {known}")
        _write(file, left)
    print(f"{arguments.file} has it no more: routers that read that file refuse it within seconds.")
    if not left:
        print("No key is left there: nobody gets in.")
    return 0


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """The file that `path` leads to, which no other of these commands changes meanwhile. Raises ConfigError.

    Links are followed: to put a file in a link's place would leave the file that routers read as it was. The lock is
    on the folder, since each change puts another file in the old one's place.
    """
    file = path.resolve()
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path}: its folder can't be opened: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield file
    except OSError as error:
        raise ConfigError(f"{path}: can't be changed: {error.strerror}") from error
    finally:
        os.close(folder)


def _keys(path: Path) -> tuple[KeyConfig, ...]:
    try:
        return read_settings(AuthConfig, load_yaml(path)).keys
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def _write(path: Path, keys: Sequence[KeyConfig]) -> None:
    """Write the file in one step, because routers read it meanwhile. Raises ConfigError."""
    read_settings(AuthConfig, {"keys": keys})
    text = "".join(f"{_line(key)}\n" for key in keys)
    try:
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False) as file:
            file.write(f"keys:\n{text}" if keys else "keys: []\n")
        if path.exists():  # the routers, which may be another user's, must still be able to read it
            shutil.copymode(path, file.name)
            found = path.stat()
            if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(file.name, found.st_uid, found.st_gid)
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from error


def _line(key: KeyConfig) -> str:
    fields = key.model_dump(exclude_defaults=True)
    return f"- {{{', '.join(f'{name}: {json.dumps(value, ensure_ascii=False)}' for name, value in fields.items())}}}"


def _moment(text: str) -> str:
    match = _SPAN.fullmatch(text)
    if match is None:
        return text
    return (datetime.now(UTC) + _UNITS[match[2]](int(match[1]))).isoformat(timespec="seconds")
