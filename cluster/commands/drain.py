"""`twostroke drain`: before `serve shutdown`, which cuts every stream, as it ends the proxies first.

Runs on a node of the Ray cluster, with Ray's token in its environment.
"""

import argparse
import asyncio
from functools import partial

from twostroke.cluster.deployments.router_drain import drain_application
from twostroke.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 once nothing is under way; the routers take nothing until they are replaced. Raises ConfigError."""
    for name in ("grace", "notice"):
        if not 0 <= getattr(arguments, name) <= 86400:
            raise ConfigError(f"--{name} {getattr(arguments, name):g}: seconds, from 0 to 86400")
    import ray
    from ray.serve.exceptions import RayServeException

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
