"""Settings of prefill workers."""

from twostroke.protocol.settings import Count, TokenCount
from twostroke.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """Settings of prefill workers: the bounds of a step."""

    max_step_tokens: TokenCount = 2048
    """Prompt tokens of one step, over all prompts that share it. Larger steps compute more efficiently,
    and let a prompt that has just arrived wait longer."""
    max_batch: Count = 32
    """Prompts and streams that share a step."""
