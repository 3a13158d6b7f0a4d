"""`twostroke cache ls`, `stat`, `prune` and `drop`: what KV tiers hold, and how to be rid of it.

They read directories and buckets themselves, whether a server runs or not. Workers that use them meanwhile notice what
is deleted, and compute it again. Each command works on the tier of `--path`, or on all storage tiers of `--config`.
"""

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.cluster.config.config import ClusterConfig, api_keys, read_config
from twostroke.cluster.config.reading import load_yaml
from twostroke.kvtiers.config import SETTING, read_key
from twostroke.kvtiers.identity import tenant_digest
from twostroke.kvtiers.objects import ObjectCipher, ObjectDamaged, ObjectOfAnotherCipher, verify_listed_object
from twostroke.kvtiers.storage.blobs import BlobInfo, BlobMissing
from twostroke.kvtiers.storage.bucket import BucketBlobs
from twostroke.kvtiers.storage.files import OUR_FOLDER, FileBlobs, key_in_quarantine
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import parse_size
from twostroke.router.http.tenants import cache_salt

_DIGEST = re.compile(r"[0-9a-f]{16}")
_AGE = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_AGE_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_NO_KEY = "-"
"""The name of the tenant of requests without an API key."""
_TIERS = ("disk", "shared")
_DELETIONS_AT_ONCE = 8
_PROGRESS_S = 0.5
_LAST_MOMENT = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""The last time that can be written: a file's may lie behind it, where the clock was wrong."""

Tier = FileBlobs | BucketBlobs


class TierPlace(NamedTuple):
    """The place of one tier, as an option or the configuration names it."""

    tier: str  # disk or shared; empty: the tier of --path
    setting: str
    path: str  # a directory, or a bucket's URL
    endpoint: str | None = None
    max_bytes: int | None = None  # the configured quota

    def error(self, fault: object) -> ConfigError:
        """Return the error that names the place and its fault."""
        colon = ":" if self.tier else ""
        return ConfigError(f"{self.setting}{colon} {self.path}: {fault}")


class TierReport(NamedTuple):
    """Result of a command in one tier."""

    document: Any  # for --json
    lines: Sequence[str]  # for people
    exit_code: int = 0


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
    """Print a line for each model and tenant; returns 0. Raises ConfigError where a tier can't be read."""
    return _run(arguments, _places(arguments, _config(arguments)), _ls)


def _ls(_: TierPlace, tier: Tier) -> TierReport:
    totals = _totals(tier.list())
    without_key = tenant_digest(b"").hex()
    rows = [("MODEL", "TENANT", "OBJECTS", "BYTES", "NEWEST")]
    for total in totals:
        tenant = f"{total.tenant} (no API key)" if total.tenant == without_key else total.tenant
        rows.append((total.model, tenant, str(total.objects), _size_text(total.bytes), total.newest))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return TierReport([total._asdict() for total in totals], lines)


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
        "--key-file",
        type=Path,
        metavar="FILE",
        help="of encrypted objects: their key, for --verify; without, `key_file` of --config",
    )


def run_stat(arguments: argparse.Namespace) -> int:
    """Print totals; returns 0, or 1 where an object is damaged or can't be read.

    Raises ConfigError where a tier can't be read.
    """
    if arguments.key_file is not None and not arguments.verify:
        raise ConfigError("--key-file: only --verify reads objects; give both or none")
    config = _config(arguments)
    key = None
    if arguments.key_file is not None:
        key = read_key(str(arguments.key_file), setting="--key-file")
    elif arguments.verify and config is not None and config.kv_cache.tiers.key_file is not None:
        key = read_key(config.kv_cache.tiers.key_file)
    cipher = None if key is None else ObjectCipher(key)
    return _run(arguments, _places(arguments, config), partial(_stat, cipher=cipher, is_verifying=arguments.verify))


def _stat(place: TierPlace, tier: Tier, *, cipher: ObjectCipher | None, is_verifying: bool) -> TierReport:
    found = sorted(tier.list(), key=lambda info: info.key)
    times = [info.modified_s for info in found]
    result: dict[str, Any] = {
        "objects": len(found),
        "bytes": sum(info.num_bytes for info in found),
        **({} if place.max_bytes is None else {"quota": place.max_bytes}),
        "models": len({info.key.split("/")[0] for info in found}),
        "tenants": len({info.key.split("/")[1] for info in found}),
        "oldest": _moment(min(times)) if times else None,
        "newest": _moment(max(times)) if times else None,
        "quarantined": len(tier.quarantined()),
    }
    faults: Mapping[str, Mapping[str, str]] = {}
    if is_verifying:
        faults = _verify(tier, found, cipher)
        result["whole"] = len(found) - sum(map(len, faults.values()))
        result |= faults
    lines = []
    for name, value in result.items():
        shown = _size_text(value) if name in ("bytes", "quota") else value
        lines.append(f"{name:12} {len(value) if name in faults else 'none' if shown is None else shown}")
    for kind, objects in faults.items():
        lines += [f"{kind}: {key}: {why}" for key, why in objects.items()]
    if faults.get("other_cipher"):
        lines.append(
            "--key-file FILE reads objects that are encrypted with its key; without, --verify reads those that are not"
        )
    return TierReport(result, lines, 1 if faults.get("damaged") or faults.get("unreadable") else 0)


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
    parser.add_argument(
        "--max-bytes",
        metavar="SIZE",
        help="50GiB, 2TB: the oldest go until so much is left; without both, the disk's quota in --config",
    )
    parser.add_argument("--older-than", metavar="AGE", help="7d, 12h, 30m: what was written before that goes")
    parser.add_argument("--model", metavar="DIGITS", help="of this model alone, as `cache ls` shows it")
    _add_dry_run(parser)


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete the oldest; returns 0. Raises ConfigError for what is no size or age, and where a tier can't be used."""
    is_to_quota = arguments.max_bytes is None and arguments.older_than is None
    if is_to_quota and (arguments.path is not None or arguments.model is not None):
        raise ConfigError(
            "cache prune: say what goes, with --max-bytes SIZE or --older-than AGE; --config FILE alone prunes all "
            "models of its disk to the quota"
        )
    max_bytes = None if arguments.max_bytes is None else _size(arguments.max_bytes)
    max_age_s = None if arguments.older_than is None else _age(arguments.older_than)
    places = _places(arguments, _config(arguments))
    if is_to_quota:
        without = ", ".join(place.tier for place in places)
        places = [place for place in places if place.max_bytes is not None]
        if not places:
            raise ConfigError(f"cache prune: {without} has no quota; give --max-bytes SIZE or --older-than AGE")
    return _run(
        arguments,
        places,
        lambda place, tier: _prune(
            tier, arguments, max_bytes=place.max_bytes if is_to_quota else max_bytes, max_age_s=max_age_s
        ),
    )


def _prune(tier: Tier, arguments: argparse.Namespace, *, max_bytes: int | None, max_age_s: float | None) -> TierReport:
    found = sorted(tier.list(_model_prefix(arguments.model)), key=lambda info: info.modified_s)
    left = sum(info.num_bytes for info in found)
    before = -1.0 if max_age_s is None else time.time() - max_age_s
    doomed = []
    for info in found:  # the oldest first
        if info.modified_s >= before and (max_bytes is None or left <= max_bytes):
            break
        doomed.append(info)
        left -= info.num_bytes
    return _delete(tier, doomed, [], left=len(found) - len(doomed), is_dry_run=arguments.dry_run)


def add_drop_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `twostroke cache drop`."""
    _add_place(parser)
    parser.add_argument(
        "--tenant",
        metavar="TENANT",
        help=f"digits, as `cache ls` shows them; the name of an API key of --config; {_NO_KEY}: requests without a key",
    )
    parser.add_argument("--model", metavar="DIGITS", help="as `cache ls` shows it")
    _add_dry_run(parser)


def run_drop(arguments: argparse.Namespace) -> int:
    """Delete a tenant's objects, a model's, or a tenant's of a model, those in quarantine too; returns 0.

    Raises ConfigError where neither is named, or a tier can't be used.
    """
    if arguments.tenant is None and arguments.model is None:
        raise ConfigError("cache drop: say whose objects go, with --tenant TENANT or --model DIGITS")
    config = _config(arguments)
    tenant = None if arguments.tenant is None else _tenant(arguments.tenant, arguments, config)
    return _run(arguments, _places(arguments, config), lambda _, tier: _drop(tier, arguments, tenant=tenant))


def _drop(tier: Tier, arguments: argparse.Namespace, *, tenant: str | None) -> TierReport:
    def is_doomed(key: str) -> bool:
        return tenant is None or key.split("/")[1] == tenant

    prefix = _model_prefix(arguments.model)
    found = list(tier.list(prefix))
    doomed = [info for info in found if is_doomed(info.key)]
    aside = [
        name
        for name in tier.quarantined()
        if (key := key_in_quarantine(name)) is not None and key.startswith(prefix) and is_doomed(key)
    ]
    return _delete(tier, doomed, aside, left=len(found) - len(doomed), is_dry_run=arguments.dry_run)


def _delete(tier: Tier, doomed: Sequence[BlobInfo], aside: Sequence[str], *, left: int, is_dry_run: bool) -> TierReport:
    """Delete objects, and some in quarantine; `left`: objects that stay."""
    if not is_dry_run:
        with ThreadPoolExecutor(_DELETIONS_AT_ONCE) as threads:
            for _ in threads.map(tier.delete, [info.key for info in doomed]):
                pass
            for _ in threads.map(tier.delete_quarantined, aside):
                pass
        tier.clean()
    num_bytes = sum(info.num_bytes for info in doomed)
    verb = "would delete" if is_dry_run else "deleted"
    more = f" and {len(aside)} in quarantine" if aside else ""
    return TierReport(
        {
            "objects": len(doomed),
            "bytes": num_bytes,
            "quarantined": len(aside),
            "left": left,
            "dry_run": is_dry_run,
        },
        [f"{verb} {len(doomed)} objects of {_size_text(num_bytes)}{more}; {left} stay"],
    )


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the server's configuration: its disk on this node, and its shared tier",
    )
    parser.add_argument("--tier", choices=_TIERS, help="of --config, this tier alone")
    parser.add_argument(
        "--path", metavar="PLACE", help="of another tier: a directory, or a bucket as s3://BUCKET/PREFIX"
    )
    parser.add_argument("--endpoint", metavar="URL", help="of --path, where it is a bucket that is not Amazon's")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="delete nothing, and say what would go")


def _run(
    arguments: argparse.Namespace, places: Sequence[TierPlace], command: Callable[[TierPlace, Tier], TierReport]
) -> int:
    """Run a command on each tier, and print what it reports. Raises ConfigError where one can't be used.

    Places that can't be right are refused before anything is deleted from another.
    """
    reports: dict[str, TierReport] = {}
    opened = [(place, _tier(place, has_others=len(places) > 1)) for place in places]
    for place, tier in opened:
        try:
            report = reports[place.tier] = command(place, tier)
        except OSError as error:
            raise place.error(f"{error.strerror or error}: {error.filename or place.path}") from error
        if not arguments.json:
            heading = [f"{place.tier}: {place.path}"] if place.tier else []
            above = [""] if len(reports) > 1 else []
            print("\n".join([*above, *heading, *report.lines]))
    if arguments.json:
        documents = {name: report.document for name, report in reports.items()}
        print(json.dumps(documents.get("", documents)))
    return max(report.exit_code for report in reports.values())


def _config(arguments: argparse.Namespace) -> ClusterConfig | None:
    return None if arguments.config is None else read_config(load_yaml(arguments.config))


def _places(arguments: argparse.Namespace, config: ClusterConfig | None) -> list[TierPlace]:
    """Return the tiers to work on. Raises ConfigError where the options name none."""
    if arguments.path is not None:
        if arguments.tier is not None:
            raise ConfigError(f"--tier {arguments.tier}: --path names the tier already; give one of them")
        return [TierPlace("", "--path", arguments.path, arguments.endpoint)]
    if arguments.endpoint is not None:
        raise ConfigError(f"--endpoint {arguments.endpoint}: it belongs to a bucket of --path; give both or none")
    if config is None:
        raise ConfigError(
            "say where the tier lies: --config FILE, the server's configuration, or --path with a directory or "
            "s3://BUCKET/PREFIX"
        )
    tiers, places = config.kv_cache.tiers, list[TierPlace]()
    if tiers.disk.path is not None:
        places.append(TierPlace("disk", f"{SETTING}.disk.path", tiers.disk.path, max_bytes=tiers.disk.bytes))
    if tiers.shared.path is not None:
        places.append(TierPlace("shared", f"{SETTING}.shared.path", tiers.shared.path))
    if tiers.shared.url is not None:
        places.append(TierPlace("shared", f"{SETTING}.shared.url", tiers.shared.url, tiers.shared.endpoint))
    if not places:
        raise ConfigError(f"--config {arguments.config}: {SETTING} has neither disk nor shared, so nothing is stored")
    chosen = [place for place in places if arguments.tier in (None, place.tier)]
    if not chosen:
        raise ConfigError(f"--tier {arguments.tier}: {SETTING} of {arguments.config} has only {places[0].tier}")
    return chosen


def _tier(place: TierPlace, *, has_others: bool) -> Tier:
    if "://" in place.path:
        try:
            return BucketBlobs(place.path, endpoint=place.endpoint)
        except ConfigError as error:  # begins with the bucket's URL, or the endpoint's
            raise ConfigError(f"{place.setting}{':' if place.tier else ''} {error}") from error
    if place.endpoint is not None:
        raise ConfigError(f"--endpoint {place.endpoint}: only buckets have one; --path {place.path} is a directory")
    directory = Path(place.path)
    if not directory.is_dir():
        way_out = "run this where a worker runs" if place.tier else "give one, or s3://BUCKET/PREFIX"
        way_out += ", or choose the other tier by --tier" if has_others else ""
        raise place.error(f"there is no such directory on this machine; {way_out}")
    if OUR_FOLDER in directory.absolute().parts:
        parts = directory.absolute().parts
        above = Path(*parts[: parts.index(OUR_FOLDER)])
        raise place.error(f"it lies within a tier; give the directory above: {above}")
    return FileBlobs(directory, sync=False)


def _model_prefix(model: str | None) -> str:
    if model is None:
        return ""
    if not _DIGEST.fullmatch(model):
        raise ConfigError(f"--model {model}: it has no 16 hexadecimal digits; `twostroke cache ls` shows them")
    return f"{model}/"


def _tenant(text: str, arguments: argparse.Namespace, config: ClusterConfig | None) -> str:
    """Return the digits of a tenant. Raises ConfigError for a name that is no key's of the configuration."""
    if _DIGEST.fullmatch(text):
        return text
    if text == _NO_KEY:
        return tenant_digest(b"").hex()
    digits = "the 16 digits that `twostroke cache ls` shows"
    if config is None:
        raise ConfigError(
            f"--tenant {text}: the name of an API key is looked up in the server's configuration: give --config FILE, "
            f"or {digits}, or {_NO_KEY} for requests without a key"
        )
    key = next((key for key in api_keys(config) if key.name == text), None)
    if key is None:
        raise ConfigError(
            f"--tenant {text}: {arguments.config} has no API key of that name; of a key that is deleted or replaced, "
            f"give {digits}"
        )
    return tenant_digest(cache_salt(key)).hex()


def _size(text: str) -> int:
    """Return the bytes of a size. Raises ConfigError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--max-bytes {text}: write a number and its unit, as in 50GiB, 500MB or 2TB") from error


def _age(text: str) -> float:
    """Return the seconds of an age. Raises ConfigError."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--older-than {text}: write a number and its unit, as in 7d, 12h or 30m")
    return float(match[1]) * _AGE_UNITS[match[2]]


def _size_text(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(min(max(seconds, 0), _LAST_MOMENT), UTC).isoformat(timespec="seconds")
