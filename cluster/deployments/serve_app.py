"""The Serve application: Router in front, PrefillWorker and DecodeWorker behind it.

    serve run twostroke.cluster.deployments.serve_app:app      the defaults: the bundled model, one worker of each kind
    serve run twostroke.cluster.deployments.serve_app:build_app prefill='{replicas: 2}'
    serve deploy FILE                                          with import_path ...serve_app:build_app and the sections
                                                               of the configuration under `args`

`twostroke serve` does the same on a Ray of its own.
"""

import logging
import os
import secrets
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from twostroke.cluster.autoscaling.scaling_state import ScalingOrder
from twostroke.cluster.autoscaling.serve_policy import DEPLOYMENTS, MISSING_POLICY, ROUTER
from twostroke.cluster.config.autoscaling import RoleLimits, WorkerCounts
from twostroke.cluster.config.config import ClusterConfig, check_keys, read_config
from twostroke.cluster.config.gpus import one_for_each_rank
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.deployments.router import RouterReplica, RouterSettings, router_options
from twostroke.cluster.deployments.workers import DecodeReplica, PrefillReplica, worker_options
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import to_plain
from twostroke.protocol.stats import ROLES, Role

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "TWOSTROKE_SECRET"
MIN_SECRET_CHARS = 16

_METRICS_INTERVAL_S = 0.5
_LOOK_BACK_S = 10.0  # of what routers noted, Serve's controller keeps so much; the newest of it is used


@dataclass(frozen=True)
class ReplicaClasses:
    """Replica classes of the deployments. Tests deploy ones that can be harmed."""

    prefill: type[PrefillReplica] = PrefillReplica
    decode: type[DecodeReplica] = DecodeReplica
    router: type[RouterReplica] = RouterReplica
    arguments: tuple[Any, ...] = ()  # of the workers' constructors, behind those that all have


_SOUND = ReplicaClasses()


def application(config: ClusterConfig, secret: bytes, replicas: ReplicaClasses = _SOUND) -> Application:
    """The application's graph. Nothing starts before Serve runs it. Raises ConfigError for a wrong file of keys or chat
    template.
    """
    config = check_keys(config)
    order = _scaling_order(config)

    def worker_app(role: Role, replica: type[PrefillReplica | DecodeReplica]) -> Application:
        section = config.roles[role]
        settings = WorkerSettings.of(config, section)
        options = worker_options(settings, section, grace_s=config.router.drain_grace_s)
        deployment = serve.deployment(replica, name=DEPLOYMENTS[role])
        app: Application = deployment.options(**options, **replica_options(config.counts[role], order)).bind(
            settings, section.worker, secret, *replicas.arguments
        )
        return app

    handles = [worker_app("decode", replicas.decode)]
    if config.has_prefill:
        handles.append(worker_app("prefill", replicas.prefill))
    fixed = WorkerCounts(config.router.replicas, config.router.replicas, config.router.replicas)
    options = {**router_options(config.router), **replica_options(fixed, order)}
    return (
        serve.deployment(replicas.router, name=ROUTER)
        .options(**options)
        .bind(RouterSettings.of(config), secret, *handles)
    )


def _scaling_order(config: ClusterConfig) -> ScalingOrder | None:
    if not config.autoscaling.enabled:
        return None
    scaling = config.autoscaling
    if not config.has_prefill:
        # Left out, as `prefill.replicas` says.
        scaling = scaling.model_copy(update={"prefill": RoleLimits(min=0, max=0)})
    roles = tuple(role for role, counts in config.counts.items() if counts.most > 0)
    scaling = scaling.model_copy(update={"change_roles": _may_change_roles(config, roles)})
    return ScalingOrder(scaling, config.gpus_each, roles)


def _may_change_roles(config: ClusterConfig, roles: Collection[Role]) -> bool:
    """Return True where a worker of either role can do the other one's work as well as its own."""
    if not config.autoscaling.change_roles or config.router.roles == "fixed" or len(roles) < len(ROLES):
        return False
    sections = [config.roles[role] for role in ROLES]
    return len(set(config.gpus_each.values())) == 1 and sections[0].parallel == sections[1].parallel


def replica_options(counts: WorkerCounts, order: ScalingOrder | None) -> dict[str, Any]:
    """Serve's options; without an order the number is fixed.

    Routers tell of demand only where their deployment can be scaled as well, if only from one number to the same.
    """
    if order is None:
        return {"num_replicas": counts.first}
    with warnings.catch_warnings():
        # Serve has environment variables in mind for the interval, which would have to be set on every node.
        warnings.simplefilter("ignore", DeprecationWarning)
        config = AutoscalingConfig(
            min_replicas=counts.least,
            initial_replicas=counts.first,
            max_replicas=counts.most,
            # How often routers note their numbers, and send them.
            metrics_interval_s=_METRICS_INTERVAL_S,
            look_back_period_s=_LOOK_BACK_S,
            # The policy itself knows when.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(
                policy_function=MISSING_POLICY, policy_kwargs={"order": msgspec.to_builtins(order, enc_hook=to_plain)}
            ),
        )
    return {"autoscaling_config": config}


def cluster_secret() -> bytes:
    """Return the secret that authenticates all our connections: from the environment, else random. Raises ConfigError
    for one that is too short."""
    given = os.environ.get(SECRET_VARIABLE)
    if given is None:
        return secrets.token_bytes(32)
    if len(given) < MIN_SECRET_CHARS:
        raise ConfigError(f"{SECRET_VARIABLE}: {len(given)} characters are too few, use {MIN_SECRET_CHARS} or more")
    return given.encode()


def build_app(args: dict[str, Any]) -> Application:
    """Build the application for Serve's own tools. `args` are the sections of the configuration. Raises ConfigError."""
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    shared = one_for_each_rank(args, has_gpus=has_gpus)
    if shared.line is not None:
        logger.warning(shared.line)
    return application(read_config(shared.settings), cluster_secret())


app = build_app({})
