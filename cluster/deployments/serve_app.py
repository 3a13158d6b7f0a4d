"""The Serve application: Router in front, PrefillWorker and DecodeWorker behind it.

    serve run cluster.serve_app:app                            the defaults: the bundled model, one worker of each kind
    serve run cluster.serve_app:build_app prefill='{replicas: 2}'
    serve deploy FILE                                          with import_path cluster.serve_app:build_app and the
                                                               sections of the configuration under `args`

`twostroke serve` does the same on a Ray of its own.
"""

import os
import secrets
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from ray.serve import Application

from twostroke.cluster.autoscaling.autoscaler import ScalingOrder
from twostroke.cluster.autoscaling.config import RoleLimits, WorkerCounts
from twostroke.cluster.autoscaling.deployment_options import replica_options
from twostroke.cluster.config.config import ClusterConfig, read_config, with_keys_of_file
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.deployments.router import RouterReplica, RouterSettings, router_options
from twostroke.cluster.deployments.workers import DecodeReplica, PrefillReplica, worker_options
from twostroke.protocol.errors import ConfigError

SECRET_VARIABLE = "TWOSTROKE_SECRET"
MIN_SECRET_CHARS = 16


@dataclass(frozen=True)
class WorkerClasses:
    """What the workers are replicas of; tests deploy ones that can be harmed."""

    prefill: type[PrefillReplica] = PrefillReplica
    decode: type[DecodeReplica] = DecodeReplica
    arguments: tuple[Any, ...] = ()  # of their constructors, behind those that all have


_SOUND = WorkerClasses()


def application(config: ClusterConfig, secret: bytes, workers: WorkerClasses = _SOUND) -> Application:
    """The application's graph. Nothing starts before Serve runs it. Raises ConfigError for a wrong file of keys."""
    config = with_keys_of_file(config)
    counts, order, grace_s = config.counts, _scaling_order(config), config.router.drain_grace_s
    decode = WorkerSettings.of(config, config.decode)
    decode_app = (
        serve.deployment(workers.decode, name="DecodeWorker")
        .options(**worker_options(decode, config.decode.placement, grace_s=grace_s))
        .options(**replica_options(counts["decode"], order))
        .bind(decode, config.decode.worker, secret, *workers.arguments)
    )
    handles = [decode_app]
    if config.has_prefill:
        prefill = WorkerSettings.of(config, config.prefill)
        handles.append(
            serve.deployment(workers.prefill, name="PrefillWorker")
            .options(**worker_options(prefill, config.prefill.placement, grace_s=grace_s))
            .options(**replica_options(counts["prefill"], order))
            .bind(prefill, config.prefill.worker, secret, *workers.arguments)
        )
    routers = WorkerCounts(config.router.replicas, config.router.replicas, config.router.replicas)
    return (
        serve.deployment(RouterReplica, name="Router")
        .options(**router_options(config.router))
        .options(**replica_options(routers, order))
        .bind(RouterSettings.of(config), secret, *handles)
    )


def _scaling_order(config: ClusterConfig) -> ScalingOrder | None:
    if not config.autoscaling.enabled:
        return None
    scaling = config.autoscaling
    if not config.has_prefill:
        scaling = replace(scaling, prefill=RoleLimits(min=0, max=0))  # left out, as `prefill.replicas` says
    roles = tuple(role for role, counts in config.counts.items() if counts.most > 0)
    return ScalingOrder(scaling, config.gpus_each, roles)


def cluster_secret() -> bytes:
    """What all parts authenticate their connections with: from the environment, else random and of this application.

    Raises ConfigError for one that is too short to be a secret.
    """
    given = os.environ.get(SECRET_VARIABLE)
    if given is None:
        return secrets.token_bytes(32)
    if len(given) < MIN_SECRET_CHARS:
        raise ConfigError(f"{SECRET_VARIABLE}: {len(given)} characters are too few, use {MIN_SECRET_CHARS} or more")
    return given.encode()


def build_app(args: dict[str, Any]) -> Application:
    """For Serve's own tools: `args` are the sections of the configuration. Raises ConfigError."""
    return application(read_config(args), cluster_secret())


def build_local_app(args: dict[str, Any]) -> Application:
    """As `build_app`, for `twostroke serve`, which has added a key of its own. Raises ConfigError."""
    return application(read_config(args, has_own_key=True), cluster_secret())


app = build_app({})
