"""What simulations did: to see that they reach what they are meant to reach."""

from dataclasses import dataclass, field

from twostroke.protocol.stats import Role, WorkerStats


@dataclass
class Report:
    """Counts over one run or many."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0  # with 429, in an overload
    poisonous: int = 0  # that killed engines, and failed
    mistaken: int = 0  # for poisonous, having met two faults in a row
    third_deaths: int = 0  # of engines by one request, as two suspects were at the second one together
    orphaned: int = 0  # whose router was lost
    tokens: int = 0
    retries: int = 0
    prefill_failures: int = 0
    fired: dict[str, int] = field(default_factory=dict)  # faults that hit something, by kind
    preemptions: int = 0
    swaps: int = 0
    prefix_hits: int = 0
    transfers_done: int = 0
    transfers_failed: int = 0
    digest_failures: int = 0
    links_lost: int = 0
    pulled_tokens: int = 0
    pulled_by_decode: int = 0  # of them, by decode workers alone
    steps: int = 0
    steps_ahead: int = 0
    virtual_s: float = 0.0

    def add(self, other: "Report") -> None:
        """Sum up."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                for kind, times in value.items():
                    self.fired[kind] = self.fired.get(kind, 0) + times
            else:
                setattr(self, name, getattr(self, name) + value)

    def count(self, role: Role, stats: WorkerStats) -> None:
        """Add a worker's own counters."""
        self.preemptions += stats.preemptions
        self.swaps += stats.swaps
        self.prefix_hits += stats.prefix_hits
        self.transfers_done += stats.transfers_done
        self.transfers_failed += stats.transfers_failed
        self.digest_failures += stats.transfer_digest_failures
        self.links_lost += stats.transfer_links_lost
        self.pulled_tokens += stats.pulled_tokens
        self.pulled_by_decode += stats.pulled_tokens if role == "decode" else 0
        self.steps += stats.steps
