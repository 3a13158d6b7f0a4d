"""What a user may set about prefill workers."""

from twostroke.protocol.settings import Count
from twostroke.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Bounds of one step, and the worker's housekeeping."""

    max_step_tokens: Count = 2048
    """Prompt tokens of one step, over all prompts that share it. Larger steps compute better, and let a prompt that has
    just come wait longer."""
    max_batch: Count = 32
    """Prompts that share a step."""
    run_ahead: bool = True
    """Whether a step is scheduled shortly before the one before it is expected to end, so that the engine never waits
    for the event loop."""
