"""`twostroke await`, `drain` and `role`: orders to an application on a Ray cluster, and to workers of a running server.

`serve deploy` reports success once the cluster has taken the file; `await` waits until the application runs. `serve
shutdown` ends the proxies first and cuts every stream; `drain` lets them end. Both run on a node of the Ray cluster,
with Ray's token in the environment. `drain WORKER` and `role WORKER ROLE` ask the server by HTTP.
"""

import argparse
import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from twostroke.cluster.local.asking import answered, fetch_status
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import STEP_ROLES

LOOK_S = 2.0
ANSWER_S = 15.0
ORDER_LOOK_S = 0.25  # between two looks at a worker that drains
REACH_S = 5.0
MAX_WAIT_S = 86400.0

StatusFetch = Callable[[], Mapping[str, Any] | None]
"""Serve's view of the application. It returns None where no application has the name, or nothing answers yet."""


def add_await_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="http://127.0.0.1:8265", help="of Ray's dashboard (default: %(default)s)")
    parser.add_argument("--app", default="twostroke", help="the application's name (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="to wait at most (%(default)g)")


def run_await(arguments: argparse.Namespace) -> int:
    """Wait for the application; return 0 once it runs, 1 where it fails or takes too long. Raises ConfigError."""
    if not 0 < arguments.timeout <= MAX_WAIT_S:
        raise ConfigError(f"--timeout {arguments.timeout:g}: seconds, more than 0, up to {MAX_WAIT_S:g}")
    failure = await_application(lambda: _status(arguments.address, arguments.app), arguments.timeout)
    print(failure or f"{arguments.app} is running")
    return 0 if failure is None else 1


def await_application(
    fetch: StatusFetch, patience_s: float, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """Return None once the application runs, else the reason why it does not, with each deployment's message."""
    deadline = clock() + patience_s
    while True:
        application = fetch()
        status = "not known to Serve" if application is None else application["status"]
        if status == "RUNNING":
            return None
        if status == "DEPLOY_FAILED" or clock() >= deadline:
            return "\n".join([f"the application is {status}", *_messages(application or {})])
        sleep(LOOK_S)


def _messages(status: Mapping[str, Any]) -> list[str]:
    messages = [status.get("message", "")]
    messages += [f"{name} is {one['status']}: {one['message']}" for name, one in status.get("deployments", {}).items()]
    return [one for one in messages if one]


def _status(address: str, app_name: str) -> Mapping[str, Any] | None:
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
    from ray.exceptions import AuthenticationError

    try:
        details = ServeSubmissionClient(address).get_serve_details()
    except ConnectionError:  # the dashboard of a head that has just started
        return None
    except (AuthenticationError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--address {address}: {error}") from error
    status: Mapping[str, Any] | None = details["applications"].get(app_name)
    return status


def add_drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "worker",
        metavar="WORKER",
        nargs="?",
        help="one worker, by its id or the beginning of it, or all of a host, by its address, instead of the whole "
        "application: running answers move to other workers",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the worker's server (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="have the worker take requests again")
    parser.add_argument("--address", default="auto", help="of Ray's head, as HOST:6379 (default: this node's Ray)")
    parser.add_argument("--app", default="twostroke", help="the application's name (default: %(default)s)")
    parser.add_argument(
        "--grace", type=float, default=60.0, metavar="SECONDS", help="for answers to end; the rest is cut (%(default)g)"
    )
    parser.add_argument(
        "--notice",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="not ready, and still serving: for load balancers to notice (default: none)",
    )


def run_drain(arguments: argparse.Namespace) -> int:
    """Drain the routers, which then take nothing until they are replaced; return 0 once nothing is under way.

    Raises ConfigError.
    """
    for name in ("grace", "notice"):
        if not 0 <= getattr(arguments, name) <= MAX_WAIT_S:
            raise ConfigError(f"--{name} {getattr(arguments, name):g}: seconds, from 0 to {MAX_WAIT_S:g}")
    if arguments.worker is not None:
        return drain_workers(arguments.url, arguments.worker, grace_s=arguments.grace, is_resumed=arguments.resume)
    if arguments.resume:
        raise ConfigError("--resume: name a worker; an application that was drained takes `serve deploy`")
    _check_reachable(arguments.address)
    import ray
    from ray.serve.exceptions import RayServeException

    from twostroke.cluster.deployments.router import drain_application

    try:
        ray.init(address=arguments.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(f"--address {arguments.address}: no Ray can be reached: {error}") from error
    try:
        tell = partial(print, flush=True)
        asyncio.run(drain_application(arguments.app, arguments.grace, arguments.notice, tell))
    except RayServeException as error:
        raise ConfigError(f"--app {arguments.app}: {error}") from error
    finally:
        ray.shutdown()
    return 0


def _check_reachable(address: str) -> None:
    """Ray itself tries a dead head for more than ten minutes, and systemd starts no new one until `twostroke drain` has
    ended. Raises ConfigError where nobody listens."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal()):
        return  # `auto`, or what Ray makes of it
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--address {address}: nobody listens there: {error}") from error


Rows = Sequence[Mapping[str, Any]]
"""Workers as /status lists them."""
WORKER_HELP = "its id as `twostroke status` shows it, the id's beginning, or a host's address: all workers there"


def add_role_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help=WORKER_HELP)
    parser.add_argument("role", choices=STEP_ROLES, help="what its steps prefer from now on")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")


def run_role(arguments: argparse.Namespace) -> int:
    """Give workers a role; return 0 once they have it. Raises ConfigError where they can't have it."""
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
        sleep(ORDER_LOOK_S)


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
    with answered(url, f"workers/{worker_id}", timeout_s=ANSWER_S, api_key=api_key, body=body):
        return
