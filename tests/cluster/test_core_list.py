"""Lists of cores as users write them."""

import pytest

from twostroke.cluster.config.sections import parse_cores
from twostroke.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "cores"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), (" 5 , 2-2,1-2", (1, 2, 5)), ("7,7", (7,))]
)
def test_ranges_and_single_cores_are_read(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-100000", "1.5"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cores: "):
        parse_cores(text)
