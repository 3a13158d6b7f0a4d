"""What Ray Serve is told about how many replicas a deployment has."""

import warnings
from typing import Any

import msgspec

from twostroke.cluster.autoscaling.autoscaler import ScalingOrder
from twostroke.cluster.autoscaling.config import WorkerCounts


def replica_options(counts: WorkerCounts, order: ScalingOrder | None) -> dict[str, Any]:
    """Serve's options; without an order the number is fixed.

    Routers tell of demand only where their deployment can be scaled as well, if only from one number to the same.
    """
    if order is None:
        return {"num_replicas": counts.first}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    from twostroke.cluster.autoscaling.serve_policy import MISSING_POLICY

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
                policy_function=MISSING_POLICY, policy_kwargs={"order": msgspec.to_builtins(order)}
            ),
        )
    return {"autoscaling_config": config}


_METRICS_INTERVAL_S = 0.5
_LOOK_BACK_S = 10.0  # of what routers noted, Serve's controller keeps so much; the newest of it is used
