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
    """Requests that wait for their first step; a worker refuses what comes beyond with status 429."""
    queue: QueuePolicy = "edf"
    """Whose turn it is among requests of one priority: the one with the least time left (`edf`), the shortest by its
    prompt and, on decode workers, its predicted answer (`sjf`), or the first that came
    (docs/design/routing.md#queues-on-the-workers). `sjf` shortens the mean wait where KV memory is short
    and answers differ by SLO class or by the prompt's length."""
    pull_wait_s: Interval = 0.5
    """A prompt whose beginning is to be pulled waits so long for the other worker's offer, then is computed here."""
    min_pull_tokens: Count = 64
    """An offer that would spare fewer tokens, since more is cached here than the router knew, is declined; pulls that
    spare less than `router.pull_min_tokens` are not even asked for. Raise it where the wire is slow and the worker is
    fast."""
    max_step_s: Interval = 60.0
    """A step that takes longer is stuck: the worker takes nothing more and is replaced. Longer for huge steps on slow
    machines."""
    integrity_interval_s: NonNegativeFloat = 10.0
    """An idle worker checks its block accounting at most this often."""
    token_channel: TokenServerConfig = Field(default_factory=TokenServerConfig)
