"""The process that drives Ray for a chaos run: `twostroke serve`'s application, with workers that can be harmed.

It takes one line of JSON on its standard input, and serves until that input ends.
"""

import os
import sys
from typing import Any

import msgspec

from twostroke.cluster.config.config import read_config
from twostroke.cluster.deployments.proxies import haproxy_binary
from twostroke.cluster.local.ray import local_ray


class ServerOrder(msgspec.Struct, frozen=True):
    """What to serve, and where the driver listens for the workers' agents."""

    settings: dict[str, Any]  # the configuration, as YAML gives it
    port: int
    control: int


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerOrder)
    config = read_config(order.settings)
    ray = local_ray(host="127.0.0.1", port=order.port, num_cpus=config.num_ranks, haproxy=haproxy_binary() is not None)
    with ray:
        # Ray may be imported now: its switches are set.
        from ray import serve

        from tests.chaos.replicas import ChaosDecodeReplica, ChaosPrefillReplica
        from twostroke.cluster.deployments.serve_app import WorkerClasses, application, cluster_secret

        workers = WorkerClasses(ChaosPrefillReplica, ChaosDecodeReplica, (order.control,))
        serve.run(application(config, cluster_secret(), workers), name="twostroke", route_prefix="/")
        while os.read(0, 4096):  # until our starter is gone
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
