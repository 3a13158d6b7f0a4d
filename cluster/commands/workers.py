"""`twostroke role WORKER ROLE` and `twostroke drain WORKER`: orders to workers of a running server, by HTTP."""

import argparse
import json
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import Any

from twostroke.cluster.local.asking import ask, fetch_status, no_answer
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import STEP_ROLES

ANSWER_S = 15.0
LOOK_S = 0.25

Rows = Sequence[Mapping[str, Any]]
"""Workers as /status lists them."""
WORKER_HELP = "its id as `twostroke status` shows it, the id's beginning, or a host's address: all workers there"


def add_role_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help=WORKER_HELP)
    parser.add_argument("role", choices=STEP_ROLES, help="what its steps prefer from now on")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")


def run_role(arguments: argparse.Namespace) -> int:
    """Returns 0 once the worker has the role. Raises ConfigError where it can't be had."""
    url = arguments.url
    for worker in chosen(fetch_status(url)["workers"], arguments.worker):
        began = time.monotonic()
        order(url, worker["worker_id"], {"role": arguments.role})
        print(f"{worker['worker_id']} is a {arguments.role} worker now, after {time.monotonic() - began:.2f} s")
    return 0


def drain_workers(url: str, name: str, *, grace_s: float, is_resumed: bool) -> int:
    """Have workers drain, and wait for their requests to end or to move; or have them resume.

    Returns 0 once nothing is under way there, 1 where something still is after `grace_s`. Raises ConfigError.
    """
    workers = [one["worker_id"] for one in chosen(fetch_status(url)["workers"], name)]
    for number, worker in enumerate(workers):
        try:
            order(url, worker, {"draining": not is_resumed})
        except ConfigError:
            for drained in [] if is_resumed else workers[:number]:  # all of them, or none
                order(url, drained, {"draining": False})
            raise
        print(f"{worker} {'takes requests again' if is_resumed else 'takes no new requests'}", flush=True)
    if is_resumed:
        return 0
    began = time.monotonic()
    left = wait_until_empty(lambda: fetch_status(url)["workers"], workers, grace_s)
    if left:
        print(f"after {grace_s:g} s {left} requests are still there: no other worker takes them")
        return 1
    print(f"drained in {time.monotonic() - began:.1f} s; `twostroke drain {name} --resume` takes it back")
    return 0


def wait_until_empty(
    fetch: Callable[[], Rows],
    workers: Sequence[str],
    grace_s: float,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until nothing is under way at the workers; return how many requests are left after `grace_s`.

    A worker that has gone meanwhile, or that nobody can reach, has none.
    """
    deadline, told = clock() + grace_s, -1
    while True:
        left = sum(num_requests(row) for row in fetch() if row["worker_id"] in workers)
        if left == 0 or clock() >= deadline:
            return left
        if left != told:
            print(f"{left} requests are under way", flush=True)
            told = left
        sleep(LOOK_S)


def num_requests(row: Mapping[str, Any]) -> int:
    """Return the requests and the transfers under way at a worker."""
    stats = row["stats"]
    return 0 if stats is None else stats["num_running"] + stats["num_waiting"] + stats["num_transfers"]


def chosen(rows: Rows, name: str) -> Rows:
    """Return the workers that a name means: one, by its id or the beginning of it, or all of a host, by its address.

    Raises ConfigError.
    """
    if of_host := [row for row in rows if name == row["node"] or name in row["nodes"]]:
        return of_host
    exact = [row for row in rows if row["worker_id"] == name]
    found = exact or [row for row in rows if row["worker_id"].startswith(name)]
    if len(found) == 1:
        return found
    listed = ", ".join(f"{row['worker_id']} ({row['role']}, {row['node']})" for row in (found or rows))
    problem = "several workers begin so" if found else "no worker has this id or address"
    raise ConfigError(f"{name}: {problem}; there are {listed or 'none'}")


def order(url: str, worker_id: str, body: Mapping[str, Any], api_key: str | None = None) -> None:
    """Send an order to a worker. Raises ConfigError with the server's reason where it refuses."""
    try:
        with ask(url, f"workers/{worker_id}", timeout_s=ANSWER_S, api_key=api_key, body=body):
            return
    except urllib.error.HTTPError as error:
        with error:
            try:
                reason = json.load(error)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                reason = no_answer(url, error)
        raise ConfigError(reason) from error
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(no_answer(url, error)) from error
