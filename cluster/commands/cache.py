"""`twostroke cache ls`, `stat`, `prune` and `drop`: what KV tiers hold, and how to be rid of it.

They read the directory or the bucket itself, whether a server runs or not. Workers that use it meanwhile notice what is
deleted, and compute it again.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.kvtiers.identity import tenant_digest
from twostroke.kvtiers.objects import ObjectCipher, ObjectDamaged, ObjectOfAnotherCipher, verify_listed_object
from twostroke.kvtiers.storage.blobs import BlobInfo, BlobMissing
from twostroke.kvtiers.storage.bucket import BucketBlobs
from twostroke.kvtiers.storage.files import OUR_FOLDER, FileBlobs, key_in_quarantine
from twostroke.protocol.errors import ConfigError

_DIGEST = re.compile(r"[0-9a-f]{16}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?")
_AGE = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_AGE_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_NO_KEY = "-"
"""The name of the tenant of requests without an API key."""
_DELETIONS_AT_ONCE = 8
_PROGRESS_S = 0.5
_LAST_MOMENT = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""The last time that can be written: a file's may lie behind it, where the clock was wrong."""

Tier = FileBlobs | BucketBlobs


class KVGroupTotal(NamedTuple):
    """The objects of one model and one tenant."""

    model: str  # digits, as in keys
    tenant: str
    objects: int
    bytes: int
    newest: str  # ISO 8601, UTC


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `twostroke cache ls`."""
    _add_place(parser)


def run_ls(arguments: argparse.Namespace) -> int:
    """Print a line for each model and tenant; returns 0. Raises ConfigError where the tier can't be read."""
    return _run(arguments, _ls)


def _ls(tier: Tier, arguments: argparse.Namespace) -> int:
    totals = _totals(tier.list())
    if arguments.json:
        print(json.dumps([total._asdict() for total in totals]))
        return 0
    without_key = tenant_digest(b"").hex()
    rows = [("MODEL", "TENANT", "OBJECTS", "BYTES", "NEWEST")]
    for total in totals:
        tenant = f"{total.tenant} (no API key)" if total.tenant == without_key else total.tenant
        rows.append((total.model, tenant, str(total.objects), _size_told(total.bytes), total.newest))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _totals(found: Iterable[BlobInfo]) -> list[KVGroupTotal]:
    objects: dict[tuple[str, str], list[BlobInfo]] = defaultdict(list)
    for info in found:
        model, tenant, *_ = info.key.split("/")
        objects[model, tenant].append(info)
    return [
        KVGroupTotal(
            *pair,
            objects=len(of_pair),
            bytes=sum(info.num_bytes for info in of_pair),
            newest=_moment(max(info.modified_s for info in of_pair)),
        )
        for pair, of_pair in sorted(objects.items())
    ]


def add_stat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `twostroke cache stat`."""
    _add_place(parser)
    parser.add_argument(
        "--verify", action="store_true", help="read and check every object; exit code 1 for damaged ones"
    )
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="of encrypted objects: their key of 32 bytes, for --verify"
    )


def run_stat(arguments: argparse.Namespace) -> int:
    """Print totals; returns 0, or 1 where an object is damaged or can't be read.

    Raises ConfigError where the tier can't be read.
    """
    if arguments.key_file is not None and not arguments.verify:
        raise ConfigError("--key-file: only --verify reads objects; give both or none")
    return _run(arguments, _stat)


def _stat(tier: Tier, arguments: argparse.Namespace) -> int:
    cipher = None if arguments.key_file is None else ObjectCipher.from_file(arguments.key_file)
    found = sorted(tier.list(), key=lambda info: info.key)
    times = [info.modified_s for info in found]
    result: dict[str, Any] = {
        "objects": len(found),
        "bytes": sum(info.num_bytes for info in found),
        "models": len({info.key.split("/")[0] for info in found}),
        "tenants": len({info.key.split("/")[1] for info in found}),
        "oldest": _moment(min(times)) if times else None,
        "newest": _moment(max(times)) if times else None,
        "quarantined": len(tier.quarantined()),
    }
    faults: Mapping[str, Mapping[str, str]] = {}
    if arguments.verify:
        faults = _verify(tier, found, cipher)
        result["whole"] = len(found) - sum(map(len, faults.values()))
        result |= faults
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            told = _size_told(value) if name == "bytes" else value
            print(f"{name:12} {len(value) if name in faults else 'none' if told is None else told}")
        for kind, objects in faults.items():
            for key, why in objects.items():
                print(f"{kind}: {key}: {why}")
        if faults.get("other_cipher"):
            print("--key-file FILE reads encrypted objects; without it --verify reads those that are not encrypted")
    return 1 if faults.get("damaged") or faults.get("unreadable") else 0


def _verify(tier: Tier, found: Sequence[BlobInfo], cipher: ObjectCipher | None) -> dict[str, dict[str, str]]:
    """Read all objects; returns what is wrong with which, by the kind of fault. What was deleted meanwhile is none."""
    faults: dict[str, dict[str, str]] = {"damaged": {}, "other_cipher": {}, "unreadable": {}, "deleted": {}}
    told_at = time.monotonic()
    for number, info in enumerate(found, start=1):
        try:
            verify_listed_object(tier, info.key, cipher)
        except ObjectOfAnotherCipher as error:
            faults["other_cipher"][info.key] = str(error)
        except ObjectDamaged as error:
            faults["damaged"][info.key] = str(error)
        except BlobMissing:
            faults["deleted"][info.key] = "it was deleted meanwhile"
        except OSError as error:
            faults["unreadable"][info.key] = str(error)
        if sys.stderr.isatty() and (time.monotonic() - told_at > _PROGRESS_S or number == len(found)):
            told_at = time.monotonic()
            end = "\n" if number == len(found) else ""
            print(f"\r{number} of {len(found)} objects, {len(faults['damaged'])} damaged", end=end, file=sys.stderr)
    return faults


def add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `twostroke cache prune`."""
    _add_place(parser)
    parser.add_argument("--max-bytes", metavar="SIZE", help="50GiB, 2TB: the oldest go until so much is left")
    parser.add_argument("--older-than", metavar="AGE", help="7d, 12h, 30m: what was written before that goes")
    parser.add_argument("--model", metavar="DIGITS", help="of this model alone, as `cache ls` shows it")
    _add_dry_run(parser)


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete the oldest; returns 0. Raises ConfigError for what is no size or age, and where the tier can't be used."""
    if arguments.max_bytes is None and arguments.older_than is None:
        raise ConfigError("cache prune: say what goes, with --max-bytes SIZE or --older-than AGE")
    arguments.max_bytes = None if arguments.max_bytes is None else _size(arguments.max_bytes)
    arguments.older_than = None if arguments.older_than is None else _age(arguments.older_than)
    return _run(arguments, _prune)


def _prune(tier: Tier, arguments: argparse.Namespace) -> int:
    found = sorted(tier.list(_prefix_of(arguments.model)), key=lambda info: info.modified_s)
    left = sum(info.num_bytes for info in found)
    before = -1.0 if arguments.older_than is None else time.time() - arguments.older_than
    doomed = []
    for info in found:  # the oldest first
        if info.modified_s >= before and (arguments.max_bytes is None or left <= arguments.max_bytes):
            break
        doomed.append(info)
        left -= info.num_bytes
    return _delete(tier, doomed, [], arguments, left=len(found) - len(doomed))


def add_drop_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `twostroke cache drop`."""
    _add_place(parser)
    parser.add_argument(
        "--tenant",
        metavar="TENANT",
        help="digits, as `cache ls` shows them; an API key's name, where TWOSTROKE_SECRET is the server's; "
        f"{_NO_KEY}: requests without a key",
    )
    parser.add_argument("--model", metavar="DIGITS", help="as `cache ls` shows it")
    _add_dry_run(parser)


def run_drop(arguments: argparse.Namespace) -> int:
    """Delete a tenant's objects, a model's, or a tenant's of a model, those in quarantine too; returns 0.

    Raises ConfigError where neither is named, or the tier can't be used.
    """
    if arguments.tenant is None and arguments.model is None:
        raise ConfigError("cache drop: say whose objects go, with --tenant TENANT or --model DIGITS")
    arguments.tenant = None if arguments.tenant is None else _tenant(arguments.tenant)
    return _run(arguments, _drop)


def _drop(tier: Tier, arguments: argparse.Namespace) -> int:
    def is_doomed(key: str) -> bool:
        return arguments.tenant is None or key.split("/")[1] == arguments.tenant

    prefix = _prefix_of(arguments.model)
    found = list(tier.list(prefix))
    doomed = [info for info in found if is_doomed(info.key)]
    aside = [
        name
        for name in tier.quarantined()
        if (key := key_in_quarantine(name)) is not None and key.startswith(prefix) and is_doomed(key)
    ]
    return _delete(tier, doomed, aside, arguments, left=len(found) - len(doomed))


def _delete(
    tier: Tier, doomed: Sequence[BlobInfo], aside: Sequence[str], arguments: argparse.Namespace, *, left: int
) -> int:
    """Delete objects, and some in quarantine, and print how many; `left`: objects that stay."""
    if not arguments.dry_run:
        with ThreadPoolExecutor(_DELETIONS_AT_ONCE) as threads:
            for _ in threads.map(tier.delete, [info.key for info in doomed]):
                pass
            for _ in threads.map(tier.delete_quarantined, aside):
                pass
        tier.clean()
    num_bytes = sum(info.num_bytes for info in doomed)
    if arguments.json:
        result = {"objects": len(doomed), "bytes": num_bytes, "quarantined": len(aside), "left": left}
        print(json.dumps({**result, "dry_run": arguments.dry_run}))
        return 0
    verb = "would delete" if arguments.dry_run else "deleted"
    more = f" and {len(aside)} in quarantine" if aside else ""
    print(f"{verb} {len(doomed)} objects of {_size_told(num_bytes)}{more}; {left} stay")
    return 0


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path", required=True, metavar="PLACE", help="of the tier: a directory, or a bucket as s3://BUCKET/PREFIX"
    )
    parser.add_argument("--endpoint", metavar="URL", help="of a bucket that is not Amazon's")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="delete nothing, and say what would go")


def _run(arguments: argparse.Namespace, command: Callable[[Tier, argparse.Namespace], int]) -> int:
    """Run a command on the tier. Raises ConfigError where that can't be used."""
    path: str = arguments.path
    try:
        return command(_tier(path, arguments.endpoint), arguments)
    except OSError as error:
        raise ConfigError(f"--path {path}: {error.strerror or error}: {error.filename or path}") from error


def _tier(path: str, endpoint: str | None) -> Tier:
    if "://" in path:
        try:
            return BucketBlobs(path, endpoint=endpoint)
        except ConfigError as error:
            raise ConfigError(f"--path {error}") from error
    if endpoint is not None:
        raise ConfigError(f"--endpoint {endpoint}: only buckets have one; --path {path} is a directory")
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"--path {path}: there is no such directory; give one, or s3://BUCKET/PREFIX")
    if OUR_FOLDER in directory.absolute().parts:
        parts = directory.absolute().parts
        above = Path(*parts[: parts.index(OUR_FOLDER)])
        raise ConfigError(f"--path {path}: it lies within a tier; give the directory above: {above}")
    return FileBlobs(directory, sync=False)


def _prefix_of(model: str | None) -> str:
    if model is None:
        return ""
    if not _DIGEST.fullmatch(model):
        raise ConfigError(f"--model {model}: it has no 16 hexadecimal digits; `twostroke cache ls` shows them")
    return f"{model}/"


def _tenant(text: str) -> str:
    """Return the digits of a tenant. Raises ConfigError for a name where the server's secret is not known."""
    if _DIGEST.fullmatch(text):
        return text
    if text == _NO_KEY:
        return tenant_digest(b"").hex()
    from twostroke.cluster.deployments.serve_app import SECRET_VARIABLE, cluster_secret
    from twostroke.router.http.tenants import KeyConfig, Tenant

    if SECRET_VARIABLE not in os.environ:
        raise ConfigError(
            f"--tenant {text}: a name becomes digits by the server's secret; set {SECRET_VARIABLE} to that, "
            "or give the 16 digits that `twostroke cache ls` shows"
        )
    key = KeyConfig(name=text, sha256="0" * 64)
    tenant = Tenant(key, secret=cluster_secret(), clock=time.monotonic, num_routers=1)
    return tenant_digest(tenant.cache_salt).hex()


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--max-bytes {text}: write a number and its unit, as in 50GiB, 500MB or 2TB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


def _age(text: str) -> float:
    """Return the seconds of an age. Raises ConfigError."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--older-than {text}: write a number and its unit, as in 7d, 12h or 30m")
    return float(match[1]) * _AGE_UNITS[match[2]]


def _size_told(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(min(max(seconds, 0), _LAST_MOMENT), UTC).isoformat(timespec="seconds")
