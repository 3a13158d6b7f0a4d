"""Numbers of cores as Linux' tools write them: `0-3,8`."""

import re

from twostroke.protocol.errors import ConfigError


def parse_cores(text: str) -> tuple[int, ...]:
    """Ascending. Raises ConfigError for what is no list."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f"cores: {text!r} is no list of cores like '0-3,8'")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < 4096:
            raise ConfigError(f"cores: {part.strip()} is no range of cores")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))
