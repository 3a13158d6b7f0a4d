"""What a user may set about prefill workers."""

from dataclasses import dataclass
from typing import ClassVar

from twostroke.worker.worker import WorkerConfig


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    """Bounds of one step, and the worker's housekeeping. Raises ConfigError for values that can't work."""

    section: ClassVar[str] = "prefill"

    max_step_tokens: int = 2048  # prompt tokens of one step, over all prompts that share it
    max_batch: int = 32  # prompts in one step
