"""`twostroke key new NAME`: a fresh API key, shown once, and the line that lets a server know it."""

import argparse
import json

from twostroke.router.http.tenants import KeyConfig, new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="draw a key and print it with its line of YAML; nothing keeps it")
    new.add_argument("name", help="whose key it is")
    new.add_argument("--slo-class", metavar="CLASS", help="of requests that name none")
    new.add_argument("--admin", action="store_true", help="may also ask for /metrics, /status and /doctor")


def run(arguments: argparse.Namespace) -> int:
    """Print the key and its line; returns 0. Raises ConfigError for a name that can't be one."""
    key, sha256 = new_key()
    made = KeyConfig(arguments.name, sha256, slo_class=arguments.slo_class, admin=arguments.admin)
    line = {"name": made.name, "sha256": made.sha256}
    if made.slo_class is not None:
        line["slo_class"] = made.slo_class
    admin = ", admin: true" if made.admin else ""
    fields = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in line.items())
    print(f"The key, which is shown this once:\n\n    {key}\n\nUnder `auth: keys:` of the server's configuration:\n")
    print(f"    - {{{fields}{admin}}}")
    return 0
