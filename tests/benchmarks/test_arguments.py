"""Numbers that no bench can use are refused with the option's name."""

import argparse

import pytest

from twostroke.benchmarks import engine, machine
from twostroke.benchmarks.transfers import transfer


@pytest.mark.parametrize(
    ("bench", "option"),
    [
        (engine, "--rounds"),
        (engine, "--threads"),
        (machine, "--kv-tokens"),
        (transfer, "--rounds"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_a_number_below_one_is_refused(
    bench: object, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        parser.parse_args([option, value])
    assert f"argument {option}: expected a whole number of at least 1, found '{value}'" in capsys.readouterr().err
