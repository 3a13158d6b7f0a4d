"""The role of decode workers: streams flow, and prompts beside them lengthen a step by little. Pure.

`EvenPolicy` is that of a worker that is asked to prefer neither.
"""

from typing import ClassVar

from twostroke.decode_worker.config import DecodeConfig
from twostroke.worker.role import WorkerRole
from twostroke.worker.scheduling.step_policy import StepPolicy


class DecodePolicy(StepPolicy):
    """Bounds a step by a pause that people hardly notice between two words."""

    longest_chunk: ClassVar[int] = 384
    most_stall_s: ClassVar[float] = 0.25


class EvenPolicy(StepPolicy):
    """Lets prompts lengthen a step by more than streams like, and by less than prompts do."""

    longest_chunk: ClassVar[int] = 1024
    most_stall_s: ClassVar[float] = 0.35


def decode_role(config: DecodeConfig) -> WorkerRole:
    """Return the role of a decode worker with these settings."""
    return WorkerRole("decode", config, DecodePolicy, config.preemption)
