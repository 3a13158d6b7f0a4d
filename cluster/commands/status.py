"""`twostroke status`: the workers of a running server, as its router sees them; once, or for as long as one watches."""

import argparse
import json
import math
import time
from http.client import HTTPException
from typing import Any

from twostroke.cluster.commands.asking import ask, endpoint, no_answer, table_console
from twostroke.cluster.commands.status_tables import show_status
from twostroke.cluster.commands.status_watch import watch
from twostroke.protocol.errors import ConfigError

LEAST_INTERVAL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds over which rates are taken")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print what the router says, as it is")
    how.add_argument("--watch", action="store_true", help="show it again after each interval, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Print once; returns 0, or 1 for a server that is not ready. Raises ConfigError where none answers.

    With --watch, until Ctrl-C; returns 0 then, whatever became of the server.
    """
    if not LEAST_INTERVAL_S <= arguments.interval < math.inf:
        raise ConfigError(f"--interval {arguments.interval:g}: seconds between two looks, at least {LEAST_INTERVAL_S}")
    if arguments.watch:
        endpoint(arguments.url, "status")  # raises for what is no address
        return watch(arguments.url, lambda: fetch_status(arguments.url), arguments.interval, table_console())
    before = fetch_status(arguments.url)
    if arguments.json:
        print(json.dumps(before))
        return 0 if before["ready"] else 1
    began = time.monotonic()
    time.sleep(arguments.interval)
    after = fetch_status(arguments.url)
    show_status(before, after, time.monotonic() - began, table_console())
    return 0 if after["ready"] else 1


def fetch_status(url: str, api_key: str | None = None, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """What GET /status says. Raises ConfigError where no server of ours answers."""
    try:
        with ask(url, "status", timeout_s=timeout_s, api_key=api_key) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(no_answer(url, error)) from error
