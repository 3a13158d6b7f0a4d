"""A role of a worker: the settings and the step policy by which it is a prefill or a decode worker."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twostroke.protocol.stats import Role, StepCosts, StepRole
from twostroke.worker.config import PreemptionMode, WorkerConfig
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.step_policy import StepPolicy

MakePolicy = Callable[[WorkerConfig, Callable[[], StepCosts | None], BlockPool], StepPolicy]

Policies = Mapping[StepRole, MakePolicy]
"""The step policies of the roles that a worker can change to."""

NO_OTHERS: Policies = {}


@dataclass(frozen=True)
class WorkerRole:
    """Everything in which workers of different roles differ. Any of them computes prompts and decodes."""

    name: Role
    config: WorkerConfig
    make_policy: MakePolicy
    preemption: PreemptionMode = "recompute"
