"""How reports are written."""

from pathlib import Path

from twostroke.loadtests.errors import unwritable


def write(path: Path, content: str | bytes) -> None:
    """Raises LoadTestError where it can't be: the disk is full, or the folder somebody else's."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise unwritable(path, error) from error
