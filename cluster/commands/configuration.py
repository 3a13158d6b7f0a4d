"""Commands that help to write a configuration: `config check`, `config schema` for editors, and `config reference` for
the documentation."""

import argparse
import json
from pathlib import Path

from twostroke.cluster.config.config import ClusterConfig, config_faults
from twostroke.cluster.config.reference import reference

WRONG_EXIT = 2


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="for `twostroke serve --config`, or for `serve deploy`, with the configuration under `args`",
    )


def run_check(arguments: argparse.Namespace) -> int:
    """Print every fault with its file and line; returns 0, or WRONG_EXIT where there are any. Raises ConfigError."""
    is_right = True
    for file in arguments.files:
        for fault in (faults := config_faults(file)):
            print(f"{file}:{fault.line}: {fault.text}")
        if not faults:
            print(f"{file}: nothing is wrong")
        is_right = is_right and not faults
    return 0 if is_right else WRONG_EXIT


def add_schema_arguments(_: argparse.ArgumentParser) -> None:
    """There are none."""


def run_schema(_: argparse.Namespace) -> int:
    """Print the schema; returns 0."""
    schema = ClusterConfig.model_json_schema()
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2))
    return 0


def add_reference_arguments(_: argparse.ArgumentParser) -> None:
    """There are none."""


def run_reference(_: argparse.Namespace) -> int:
    """Print the tables; returns 0."""
    print(reference(), end="")
    return 0
