"""Which nodes Ray's autoscaler starts for workers that find no place: its scheduler, which is pure, on our files."""

from collections.abc import Mapping
from typing import Any

from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.common_pb2 import LabelSelectorOperator


def launched_for(
    config: Mapping[str, Any], demand: Mapping[str, float], labels: Mapping[str, str], count: int
) -> dict[str, int]:
    """How many nodes of each type an empty cluster gets for `count` actors with this demand and these labels."""
    types = AutoscalingConfig(dict(config), skip_content_hash=True)
    selector = [(name, LabelSelectorOperator.LABEL_OPERATOR_IN, [value]) for name, value in labels.items()]
    actors = [ResourceRequestUtil.make(dict(demand), label_selectors=[selector]) for _ in range(count)]
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=types.get_node_type_configs(),
            max_num_nodes=types.get_max_num_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(actors),
        )
    )
    assert not reply.infeasible_resource_requests
    return {launch.instance_type: launch.count for launch in reply.to_launch}
