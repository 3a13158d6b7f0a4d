"""Which transport a pair of ranks uses. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.kv_layout import Encoding
from protocol.messages import Reach


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport for a pair, and how that came."""

    transport: str
    why: str  # in words for people
    missing: tuple[str, ...]  # for each better transport: what it would need


def choose_transport(source: Reach, target: Reach, encoding: Encoding, without: Sequence[str] = ()) -> Choice:
    """The best transport that both ends have, one in `without` only where there is no other.

    Raises ConfigError where they have none in common, with both sides' lists.
    """
    raise ConfigError("not written yet")
