"""HTTP only: load and comparisons against any OpenAI endpoint. Imports none of the other packages."""

import errno
from pathlib import Path


class LoadTestError(Exception):
    """A setting, file or server is wrong. The message is one line for people: what, and the way out."""


class RunLost(LoadTestError):
    """A run that had begun could not go on. What was sent until then has its records."""


def unwritable(path: Path, error: OSError) -> LoadTestError:
    """Return the error for a file that cannot be written: which, why, and what to do."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room, or name another folder" if full else "name another folder"
    return LoadTestError(f"{path}: {error.strerror}; {remedy}")
