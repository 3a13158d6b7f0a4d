"""`twostroke await` and `twostroke drain`, for an application on a Ray cluster.

`serve deploy` reports success once the cluster has taken the file; `await` waits until the application runs. `serve
shutdown` ends the proxies first and cuts every stream; `drain` lets them end. Both run on a node of the Ray cluster,
with Ray's token in the environment. `drain WORKER` is about one worker, and asks the server.
"""

import argparse
import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from twostroke.cluster.commands.workers import drain_workers
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConfigError

LOOK_S = 2.0
REACH_S = 5.0
MOST_S = 86400.0

StatusFetch = Callable[[], Mapping[str, Any] | None]
"""Serve's view of the application. It returns None where no application has the name, or nothing answers yet."""


def add_await_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="http://127.0.0.1:8265", help="of Ray's dashboard (default: %(default)s)")
    parser.add_argument("--app", default="twostroke", help="the application's name (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="to wait at most (%(default)g)")


def run_await(arguments: argparse.Namespace) -> int:
    """Returns 0 once the application runs, 1 where it has failed to, or takes longer. Raises ConfigError."""
    if not 0 < arguments.timeout <= MOST_S:
        raise ConfigError(f"--timeout {arguments.timeout:g}: seconds, more than 0, up to {MOST_S:g}")
    failure = failure_of(lambda: _status(arguments.address, arguments.app), arguments.timeout)
    print(failure or f"{arguments.app} is running")
    return 0 if failure is None else 1


def failure_of(
    fetch: StatusFetch, patience_s: float, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """None once the application runs; else why it does not, with what each deployment says."""
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
    """Returns 0 once nothing is under way; the routers take nothing until they are replaced. Raises ConfigError."""
    for name in ("grace", "notice"):
        if not 0 <= getattr(arguments, name) <= MOST_S:
            raise ConfigError(f"--{name} {getattr(arguments, name):g}: seconds, from 0 to {MOST_S:g}")
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
