"""Settings of prefill workers."""

from twostroke.protocol.settings import Count
from twostroke.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Settings of prefill workers: the bounds of a step."""

    max_step_tokens: Count = 2048
    """Prompt tokens of one step, over all prompts that share it. Larger steps compute more efficiently,
    and let a prompt that has just arrived wait longer."""
    max_batch: Count = 32
    """Prompts that share a step."""
    run_ahead: bool = True
    """Schedule a step shortly before the one before it is expected to end, so that the engine never waits for the event
    loop."""
