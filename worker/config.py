"""What a user may set about workers of both roles; each role's own config adds to it.

A file of its own, so that reading a configuration loads nothing of what a worker is made of.
"""

from pydantic import Field, NonNegativeFloat

from twostroke.protocol.settings import Count, Interval, Section
from twostroke.worker.queue_order import QueuePolicy
from twostroke.worker.token_server import TokenServerConfig


class WorkerConfig(Section):
    """Bounds of one step, and the worker's housekeeping."""

    max_step_tokens: Count
    """Tokens of one step."""
    max_batch: Count
    """Requests in one step."""
    max_waiting: Count = 1024
    """Requests that wait for their first step; more are refused with status 429."""
    queue: QueuePolicy = "edf"
    """Whose turn it is within a priority: least time left, fewest tokens, or first come."""
    pull_wait_s: Interval = 0.5
    """A prompt waits so long for another worker to offer its beginning."""
    min_pull_tokens: Count = 64
    """An offer that would spare fewer is declined: they are computed as quickly."""
    max_step_s: Interval = 60.0
    """A step that takes longer is stuck, and the worker unhealthy."""
    integrity_interval_s: NonNegativeFloat = 10.0
    """An idle worker checks its block accounting at most this often."""
    token_channel: TokenServerConfig = Field(default_factory=TokenServerConfig)
