"""Blobs as files of a local or shared directory.

    <root>/twostroke-kv/v1/FORMAT                              names the version, for people
    <root>/twostroke-kv/v1/objects/<model>/<tenant>/<2>/<name>.kv
    <root>/twostroke-kv/v1/quarantine/<moment>-<key>           damaged ones, the newest 16

Another version has a folder of its own, which is neither read nor changed. Folders have mode 0700, files 0600. A file
is written under a temporary name beside its own and renamed, so that whatever dies leaves a whole file or none; what
dead writers leave is removed after ten minutes. Symbolic links below the root are never followed.

`sync` says whether files and folders are flushed to the disk before a write returns. Without, a power failure may leave
files whose bytes are not theirs: their digests tell.

Errors are OSErrors that name the file.
"""

import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from twostroke.kvtiers.identity import FORMAT_VERSION
from twostroke.kvtiers.storage.blobs import BlobInfo, BlobMissing

_log = logging.getLogger(__name__)

OUR_FOLDER = "twostroke-kv"
STALE_S = 600.0
"""Seconds after which a temporary file's writer counts as dead."""
MAX_QUARANTINED = 16
IOV_MAX = os.sysconf("SC_IOV_MAX")

_KEY = re.compile(r"[0-9a-f]{2,64}/[0-9a-f]{2,64}/[0-9a-f]{2}/[0-9a-f]{2,64}\.kv")
_FOLDER = re.compile(r"[0-9a-f]{2,64}")
_NAME = re.compile(r"[0-9a-f]{2,64}\.kv")
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


def check_key(key: str) -> None:
    """Raise ValueError for what is no ObjectKey.path, as a path that leads elsewhere."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key of a KV object")


def quarantine_name(key: str) -> str:
    """Return a name in quarantine, which tells when it came and its key."""
    # The time only orders them, so a clock that jumps lets the wrong ones go and does no other harm.
    return f"{time.time_ns():020d}-{key.replace('/', '-')}"


def key_in_quarantine(name: str) -> str | None:
    """Return the key of a name in quarantine; None for what is no such name."""
    key = name.partition("-")[2].replace("-", "/")
    return key if _KEY.fullmatch(key) else None


class FileReader:
    """One open file."""

    def __init__(self, descriptor: int, num_bytes: int):
        self.num_bytes = num_bytes
        self._descriptor = descriptor
        self._offset = 0

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill these buffers with the next bytes. Raises EOFError where the file ends before, OSError otherwise."""
        self._offset = _transfer(os.preadv, self._descriptor, buffers, self._offset)

    def skip(self, num_bytes: int) -> None:
        """Pass over the next bytes."""
        self._offset += num_bytes


class FileBlobs:
    """A directory as a BlobStore. All threads may use one, and all processes of a user one directory."""

    def __init__(self, root: Path, *, sync: bool):
        """`root` must exist when something is written; our folders are made in it then."""
        self.root = root.absolute()
        self._base = self.root / OUR_FOLDER / f"v{FORMAT_VERSION}"
        self._objects = self._base / "objects"
        self._quarantine = self._base / "quarantine"
        self._sync = sync
        self._is_prepared = False

    def prepare(self) -> None:
        """Make our folders where they lack.

        Raises OSError where they are somebody else's, others could read them, or nothing can be written.
        """
        ours = self.root / OUR_FOLDER
        for folder in (ours, self._base, self._objects, self._quarantine):
            with suppress(FileExistsError):
                folder.mkdir(0o700)
        found = ours.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is no folder; where it is a link, name the folder", str(ours))
        if found.st_uid != (user := os.geteuid()):
            what = f"it belongs to user {found.st_uid}, not to user {user} who runs this"
            raise PermissionError(errno.EPERM, f"{what}; chown -R {user} {ours}, or name another folder", str(ours))
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, f"others could read KV there; chmod 700 {ours}", str(ours))
        note = self._base / "FORMAT"
        if not note.exists():
            with suppress(FileExistsError), open(note, "x", opener=_private) as file:
                file.write(f"KV objects of Twostroke, version {FORMAT_VERSION}. See kvtiers/objects.py.\n")
        self._is_prepared = True

    @contextmanager
    def open(self, key: str) -> Iterator[FileReader]:
        """Open a file for reading. Raises BlobMissing, and OSError."""
        try:
            with self._open_folder(key) as (folder, name):
                descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK, dir_fd=folder)
        except FileNotFoundError as error:
            raise BlobMissing(key) from error
        except OSError as error:
            raise self._named(error, key) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file", str(self._objects / key))
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield FileReader(descriptor, found.st_size)
        finally:
            os.close(descriptor)

    def write(self, key: str, parts: Sequence[memoryview]) -> None:
        """Store a file in one piece. Raises OSError, and leaves nothing then."""
        try:
            if not self._is_prepared:
                self.prepare()
            try:
                self._write(key, parts)
            except FileNotFoundError:  # `clean` has just removed the folder, which was empty, or all is deleted
                self.prepare()
                self._write(key, parts)
        except OSError as error:
            raise self._named(error, key) from error

    def _write(self, key: str, parts: Sequence[memoryview]) -> None:
        with self._open_folder(key, make=True) as (folder, name):
            temporary = f".tmp-{secrets.token_hex(8)}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600, dir_fd=folder)
            try:
                try:
                    _transfer(os.pwritev, descriptor, parts, 0)
                    if self._sync:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            if self._sync:
                os.fsync(folder)

    def delete(self, key: str) -> None:
        """Delete a file. Harmless where there is none."""
        try:
            with self._open_folder(key) as (folder, name):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._named(error, key) from error

    def quarantine(self, key: str) -> None:
        """Move a damaged file aside, for people to look at; the newest 16 are kept. Harmless where there is none."""
        try:
            with self._open_folder(key) as (folder, name):
                os.rename(name, self._quarantine / quarantine_name(key), src_dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._named(error, key) from error
        for old in self.quarantined()[:-MAX_QUARANTINED]:
            self.delete_quarantined(old)

    def quarantined(self) -> Sequence[str]:
        """Return the names of files in quarantine, the oldest first: `key_in_quarantine` tells their keys."""
        try:
            return sorted(name for name in os.listdir(self._quarantine) if key_in_quarantine(name))
        except FileNotFoundError:
            return []

    def delete_quarantined(self, name: str) -> None:
        """Delete a file in quarantine. Harmless where there is none."""
        (self._quarantine / name).unlink(missing_ok=True)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield the files whose keys begin with `prefix`, in no order. Removes what dead writers have left."""
        if not any(folder.is_symlink() for folder in (self._base.parent, self._base, self._objects)):
            yield from self._walk(self._objects, "", prefix)

    def clean(self) -> None:
        """Remove what dead writers have left, and empty folders."""
        for _ in self.list():
            pass
        for folder, _, _ in os.walk(self._objects, topdown=False):
            if Path(folder) != self._objects:
                try:
                    os.rmdir(folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        raise

    def _walk(self, folder: Path, above: str, prefix: str) -> Iterator[BlobInfo]:
        """Yield the files of a folder; `above` is its part of their keys."""
        depth = above.count("/")
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        except OSError as error:
            if not above:
                raise
            _log.warning("%s can't be listed, and its objects are passed over: %s", folder, error)
            return
        for entry in entries:
            key = above + entry.name
            try:
                if depth < 3:
                    inside = f"{key}/"
                    if (
                        _FOLDER.fullmatch(entry.name)
                        and (inside.startswith(prefix) or prefix.startswith(inside))
                        and entry.is_dir(follow_symlinks=False)
                    ):
                        yield from self._walk(Path(entry.path), inside, prefix)
                elif _NAME.fullmatch(entry.name) and key.startswith(prefix):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield BlobInfo(key, found.st_size, found.st_mtime)
                elif _TEMPORARY.fullmatch(entry.name):
                    _remove_stale(entry)
            except FileNotFoundError:  # deleted meanwhile
                continue

    @contextmanager
    def _open_folder(self, key: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a key's file; gives its descriptor and the file's name in it.

        Each folder on the way is opened in the one above, so that none can be a link.
        """
        check_key(key)
        *folders, name = key.split("/")
        descriptor = os.open(self.root, _DIRECTORY_FLAGS)
        try:
            for folder in (*self._objects.relative_to(self.root).parts, *folders):
                try:
                    inner = os.open(folder, _DIRECTORY_FLAGS | _NO_LINK, dir_fd=descriptor)
                except FileNotFoundError:
                    if not make:
                        raise
                    with suppress(FileExistsError):
                        os.mkdir(folder, 0o700, dir_fd=descriptor)
                    if self._sync:
                        os.fsync(descriptor)
                    inner = os.open(folder, _DIRECTORY_FLAGS | _NO_LINK, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor, name
        finally:
            os.close(descriptor)

    def _named(self, error: OSError, key: str) -> OSError:
        """Return the error with the file's whole path, which errors of a folder's descriptor lack."""
        if error.filename is not None and os.path.isabs(error.filename):
            return error
        return OSError(error.errno, error.strerror, str(self._objects / key))


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], descriptor: int, buffers: Sequence[memoryview], offset: int
) -> int:
    """Read or write all of these buffers at an offset; returns the offset behind them. Raises EOFError."""
    waiting = [view for view in buffers if len(view)]
    first = 0
    while first < len(waiting):
        done = call(descriptor, waiting[first : first + IOV_MAX], offset)
        if done == 0:
            raise EOFError("the file ends before")
        offset += done
        while done and done >= len(waiting[first]):
            done -= len(waiting[first])
            first += 1
        if done:
            waiting[first] = waiting[first][done:]
    return offset


def _private(path: str, flags: int) -> int:
    """Open a file that only its user may read."""
    return os.open(path, flags | _NO_LINK, 0o600)


def _remove_stale(entry: "os.DirEntry[str]") -> None:
    """Remove a temporary file whose writer is dead, unless this process may only read."""
    # A time far ahead is a dead writer's too: the clock was wrong then.
    if abs(time.time() - entry.stat(follow_symlinks=False).st_mtime) <= STALE_S:
        return
    try:
        os.unlink(entry.path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
