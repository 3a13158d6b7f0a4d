"""`twostroke loadtest ...`: the commands of `loadtests`, told like ours. They need packages that a server does not."""

import argparse
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from twostroke.loadtests.errors import LoadTestError
from twostroke.protocol.errors import ConfigError

NEEDED = ("locust", "matplotlib")


def prepare(module: str, parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the command's arguments; returns what runs it. Raises ConfigError where packages are missing, as that does
    for a LoadTestError."""
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"loadtest needs {' and '.join(missing)}: in the project's checkout, pip install '.[loadtest]'"
        )
    loaded = import_module(f"twostroke.{module}")
    loaded.add_arguments(parser)

    def run(arguments: argparse.Namespace) -> int:
        try:
            code: int = loaded.run(arguments)
            return code
        except LoadTestError as error:
            raise ConfigError(str(error)) from error

    return run
