"""What helps to write a configuration: `twostroke config schema` for editors, `twostroke key new NAME` for API keys."""

import argparse
import json

from twostroke.cluster.config.config import ClusterConfig
from twostroke.cluster.config.reading import read_settings
from twostroke.router.http.tenants import KeyConfig, new_key


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("schema", help="print the JSON schema of the file, for editors to check and complete by")


def run_config(_: argparse.Namespace) -> int:
    """Print the schema; returns 0."""
    schema = ClusterConfig.model_json_schema()
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2))
    return 0


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="draw a key and print it with its line of YAML; nothing keeps it")
    new.add_argument("name", help="whose key it is")
    new.add_argument("--slo-class", metavar="CLASS", help="of requests that name none")
    new.add_argument("--admin", action="store_true", help="may also ask for /metrics, /status and /doctor")


def run_key(arguments: argparse.Namespace) -> int:
    """Print the key and its line; returns 0. Raises ConfigError for a name that can't be one."""
    key, sha256 = new_key()
    line = {"name": arguments.name, "sha256": sha256}
    if arguments.slo_class is not None:
        line["slo_class"] = arguments.slo_class
    read_settings(KeyConfig, line)
    admin = ", admin: true" if arguments.admin else ""
    fields = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in line.items())
    print(f"The key, which is shown this once:\n\n    {key}\n\nUnder `auth: keys:` of the server's configuration:\n")
    print(f"    - {{{fields}{admin}}}")
    return 0
