"""Settings of KV tiers, and what a process checks of them on its own machine before it uses them."""

import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

from annotated_types import Ge, Gt, Le
from pydantic import Field, model_validator

from twostroke.kvtiers.storage.files import OUR_FOLDER
from twostroke.kvtiers.storage.threads import on_thread
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import ByteSize, Interval, Section

SETTING: Final = "kv_cache.tiers"
"""Path of TiersConfig in the configuration, with which errors begin."""

PASSING_BYTES = 512 * 2**20
"""Least host memory of a worker for objects on their way, where a disk or a shared tier is set."""

ANSWER_S = 5.0
"""Seconds that a start gives the directories to answer."""
KEY_BYTES = 32
_KEY_FILE_BYTES = 256
"""Bytes of a file of a key that are read: digits may have blanks around them."""

_S3_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/[A-Za-z0-9!_.*'()-]+)*/?")
_ENDPOINT = re.compile(r"https?://[^/\s@?#]+/?")


class DiskTierConfig(Section):
    """A directory on each worker's own disk."""

    path: str | None = None
    """Directory for the objects, an absolute path, the same on every node. Its parent must exist; workers make the
    directory itself, for their user alone. null: no disk tier."""
    bytes: ByteSize = 0
    """Quota of the directory, such as `100GiB`, or a number of bytes. Objects that have not been read for long are
    deleted to stay below it."""

    @model_validator(mode="after")
    def _check_disk(self) -> "DiskTierConfig":
        if self.path is not None:
            _check_absolute(self.path)
            if self.bytes == 0:
                raise ValueError("bytes: is required beside path: say how much of the disk KV may take, as 100GiB")
        elif self.bytes:
            raise ValueError(f"path: is required beside bytes ({self.bytes}): name a directory on a local disk")
        return self


class SharedTierConfig(Section):
    """A store that all workers reach: a directory (NFS, a mounted bucket), or an S3-compatible bucket. A text in its
    place is the path, or the URL."""

    path: str | None = None
    """Directory that all nodes mount, an absolute path. null: none, or `url`."""
    url: str | None = None
    """Bucket and prefix, such as `s3://bucket/prefix`. Credentials come from the environment or the instance, as AWS'
    own tools find them. null: none, or `path`."""
    endpoint: str | None = None
    """Address of an S3-compatible server, such as `https://minio.example.org:9000`; null: AWS."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"url": value} if "://" in value else {"path": value}
        return value

    @model_validator(mode="after")
    def _check_shared(self) -> "SharedTierConfig":
        if self.path is not None:
            if self.url is not None:
                raise ValueError("path: stands beside url: give one of the two")
            _check_absolute(self.path)
        if self.url is not None and (not _S3_URL.fullmatch(self.url) or "/../" in f"{self.url}/"):
            # The URL itself is not repeated: somebody may have written credentials into it.
            raise ValueError(
                "url: is no bucket: write s3://BUCKET or s3://BUCKET/PREFIX, and put credentials into the environment"
            )
        if self.endpoint is not None:
            if self.url is None:
                raise ValueError(
                    "endpoint: stands without url: give the bucket, as s3://BUCKET/PREFIX, or leave it out"
                )
            if not _ENDPOINT.fullmatch(self.endpoint):
                raise ValueError("endpoint: is no address: write http:// or https://, a host and, if need be, a port")
        return self


class TiersConfig(Section):
    """Places outside the engine's cache that keep KV of prefixes (docs/tiers.md). Without any, KV ends with its
    worker."""

    host_bytes: ByteSize = 0
    """Host memory of each worker, such as `4GiB`, in which objects are kept, and which they pass on their way from and
    to the other tiers: a prefix is read from those as far as this memory holds it. With a disk or a shared tier it is
    at least 512 MiB. 0: no tier of its own."""
    disk: DiskTierConfig = Field(default_factory=DiskTierConfig)
    shared: SharedTierConfig = Field(default_factory=SharedTierConfig)
    object_tokens: Annotated[int, Ge(16), Le(8192)] = 256
    """Tokens of one object, a multiple of both roles' `block_size`. Larger ones read faster, and find less of a prompt
    that ends or differs within one. Another value finds none of what was written before."""
    write_share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of its time that a worker's writer spends writing, at most. Less leaves more of the disk to reads; objects
    that then find no place in the queue are dropped."""
    read_wait_s: Interval = 10.0
    """Seconds that a prompt waits for its objects, at most, however quick the reads are predicted to be; the rest is
    computed. It bounds what a storage that hangs can cost."""
    key_file: str | None = None
    """File with a key of 32 bytes, plain or as 64 hexadecimal digits, by which objects are encrypted (AES-256-GCM); an
    absolute path, the same on every node, which others can't write. `openssl rand -hex 32` makes one. null: objects
    are not encrypted."""

    @model_validator(mode="after")
    def _check_tiers(self) -> "TiersConfig":
        if self.key_file is not None:
            if not os.path.isabs(self.key_file):
                raise ValueError(f"key_file: {self.key_file!r} is no absolute path: workers run in other folders")
            if not self.is_on:
                raise ValueError("key_file: there is no tier to encrypt: set disk or shared, or leave it out")
        disk, shared = self.disk.path, self.shared.path
        if disk is not None and shared is not None:
            disk, shared = os.path.normpath(disk), os.path.normpath(shared)
            if os.path.commonpath((disk, shared)) in (disk, shared):
                raise ValueError(f"shared.path: {shared} and disk.path {disk} lie in each other: give two directories")
        return self

    @property
    def is_on(self) -> bool:
        """True where there is a tier."""
        return self.host_bytes > 0 or self.has_storage

    @property
    def has_storage(self) -> bool:
        """True where objects outlive their worker."""
        return self.disk.path is not None or self.shared.path is not None or self.shared.url is not None

    @property
    def memory_bytes(self) -> int:
        """Host memory that tiers take of each worker."""
        return max(self.host_bytes, PASSING_BYTES if self.has_storage else 0)


def check_machine(tiers: TiersConfig) -> list[str]:
    """Check that this process can use directories and key on this machine. Returns warnings, a line each.

    A disk that does not answer within ANSWER_S is warned of: workers start without it. Raises ConfigError that begins
    with the setting at fault.
    """
    try:
        return on_thread("check-tiers", lambda: _check_machine(tiers)).result(ANSWER_S)
    except TimeoutError:
        return [f"{SETTING}: its directories have not answered for {ANSWER_S:g} s: workers start without them"]


def _check_machine(tiers: TiersConfig) -> list[str]:
    warnings: list[str] = []
    if tiers.shared.path is not None:
        _check_directory(f"{SETTING}.shared.path", Path(tiers.shared.path), warnings)
    if tiers.key_file is not None:
        read_key(tiers.key_file)
    if tiers.disk.path is None:
        return warnings
    found = _check_directory(f"{SETTING}.disk.path", directory := Path(tiers.disk.path), warnings)
    room = shutil.disk_usage(found).free
    if room < tiers.disk.bytes:
        room += _held_bytes(directory)
    if room >= tiers.disk.bytes:
        return warnings
    return [
        *warnings,
        f"{SETTING}.disk.bytes: the quota of {_gibibytes(tiers.disk.bytes)} is more than the {_gibibytes(room)} that "
        f"the disk of {tiers.disk.path} has for it: writes fail once it is full; lower the quota, or make room",
    ]


def check_objects(tiers: TiersConfig, token_bytes: int) -> None:
    """Check that memory and quota hold objects of a model whose KV takes `token_bytes` for each token, all layers and
    ranks together. Raises ConfigError that begins with the setting at fault."""
    size = tiers.object_tokens * token_bytes
    limits = {"disk.bytes": tiers.disk.bytes} if tiers.disk.path is not None else {}
    if tiers.is_on:
        limits["host_bytes"] = tiers.memory_bytes
    for name, limit in limits.items():
        if limit < size:
            raise ConfigError(
                f"{SETTING}.{name}: {limit} bytes hold no object: one of {tiers.object_tokens} tokens of this model "
                f"takes {size}: raise {name}, or lower object_tokens"
            )


def read_key(path: str, *, setting: str = f"{SETTING}.key_file") -> bytes:
    """Return the key in a file: its 32 bytes, or what its 64 hexadecimal digits stand for.

    Raises ConfigError that names the setting and the file, and never shows the key.
    """
    way_out = f"`openssl rand -hex {KEY_BYTES}` makes one"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_KEY_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{setting}: there is no file {path} of a key: {way_out}") from error
    except OSError as error:
        raise ConfigError(f"{setting}: {path} can't be read: {error.strerror}") from error
    if stat.S_ISREG(mode) and mode & 0o022:
        raise ConfigError(f"{setting}: others can write {path}: chmod 400 {path}, and make a new key if they may have")
    if len(raw) == KEY_BYTES:
        return raw
    if len(raw) <= _KEY_FILE_BYTES and re.fullmatch(rb"[0-9a-fA-F]{64}", digits := raw.strip()):
        return bytes.fromhex(digits.decode())
    raise ConfigError(
        f"{setting}: {path} has neither {KEY_BYTES} bytes nor {2 * KEY_BYTES} hexadecimal digits: {way_out}"
    )


def _check_absolute(path: str) -> None:
    if "://" in path:
        raise ValueError("path: is a URL: a bucket belongs under kv_cache.tiers.shared.url")
    if not os.path.isabs(path):
        raise ValueError(f"path: {path!r} is no absolute path: workers run in other folders")


def _check_directory(setting: str, path: Path, warnings: list[str]) -> Path:
    """Return `path`, or the parent in which it can be made. Raises ConfigError where it can't be used.

    A directory that was used before and can only be read is warned of: a disk that the system has made read-only must
    keep no worker from starting, and its objects can still be read.
    """
    try:
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"{setting}: {path} is no directory: name one, or move the file away")
            found = path
        elif path.parent.is_dir():
            found = path.parent
        else:
            # A whole path is not made: it would lie beside a disk that somebody forgot to mount.
            raise ConfigError(f"{setting}: there is no directory {path.parent}: mount the disk, or make the directory")
    except OSError as error:
        raise ConfigError(f"{setting}: {path} can't be reached: {error.strerror}") from error
    if not os.access(found, os.R_OK | os.W_OK | os.X_OK):
        if os.access(path / OUR_FOLDER, os.R_OK | os.X_OK):
            warnings.append(f"{setting}: {path} can't be written by user {os.geteuid()}: it is only read")
            return found
        raise ConfigError(
            f"{setting}: {found} can't be written by user {os.geteuid()}: give it to that user, or name another one"
        )
    return found


def _held_bytes(directory: Path) -> int:
    """Bytes of the objects that lie in the directory already, which the quota counts too."""
    held = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # another worker may have deleted it since
                held += Path(folder, name).stat().st_size
    return held


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
