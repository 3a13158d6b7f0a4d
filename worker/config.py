"""Settings of workers of both roles; each role's own config adds to them.

A file of its own, so that loading a configuration imports neither an engine nor the step loop.
"""

from pydantic import Field, NonNegativeFloat

from twostroke.protocol.settings import Count, Interval, Section
from twostroke.worker.scheduling.queue_order import QueuePolicy
from twostroke.worker.token_server import TokenServerConfig


class WorkerConfig(Section):
    """Bounds of one step, and the worker's housekeeping."""

    max_step_tokens: Count
    """Tokens of one step."""
    max_batch: Count
    """Requests in one step."""
    max_waiting: Count = 1024
    """Requests that wait for their first step; a worker refuses further ones with status 429."""
    queue: QueuePolicy = "edf"
    """Order of requests of one priority: the one with the least time left first (`edf`), the shortest by its prompt
    and, on decode workers, its predicted answer (`sjf`), or the first that arrived (`fcfs`); see
    docs/design/routing.md#queues-on-the-workers. `sjf` shortens the mean wait where KV memory is short
    and answers differ by SLO class or by the prompt's length."""
    pull_wait_s: Interval = 0.5
    """Seconds that a prompt whose prefix is pulled waits for the other worker's offer; then it is computed here."""
    min_pull_tokens: Count = 64
    """An offer that would spare fewer tokens is declined: more may be cached here than the router knew. The router
    requests no pulls that spare less than `router.pull_min_tokens`. Raise it where the wire is slow and the worker is
    fast."""
    max_step_s: Interval = 60.0
    """Seconds after which a step is stuck: the worker takes no more requests and is replaced. Raise it for huge steps
    on slow machines."""
    integrity_interval_s: NonNegativeFloat = 10.0
    """Seconds between checks of an idle worker's block accounting, at least."""
    token_channel: TokenServerConfig = Field(default_factory=TokenServerConfig)
