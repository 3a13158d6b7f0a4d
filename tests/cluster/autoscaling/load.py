"""A load for the policy without a simulation: what arrives in each second, and workers that are there when ordered."""

from dataclasses import dataclass, field, replace

from twostroke.cluster.autoscaling.samples import Arrived, RoleSignals, ScalingDecision, Signals
from twostroke.cluster.autoscaling.scaling_decision import PolicyMemory, decide
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits
from twostroke.protocol.stats import StepCosts

COSTS = StepCosts(base_s=0.01, token_s=1e-4, pair_s=0.0, row_s=1e-4, context_s=1e-7)
"""A prompt of 900 tokens takes a prefill worker 0.1 s."""

EIGHT_EACH = AutoscalingConfig(prefill=RoleLimits(min=1, max=8), decode=RoleLimits(min=1, max=8), cooldown_s=300.0)
MINUTE_S = 60.0


@dataclass
class System:
    """Workers of both roles under a load that the test makes."""

    config: AutoscalingConfig = EIGHT_EACH
    prefill: RoleSignals = field(default_factory=lambda: RoleSignals(1, 1, costs=COSTS))
    decode: RoleSignals = field(default_factory=lambda: RoleSignals(1, 1, costs=COSTS))
    ttft_s: float | None = 2.0
    tpot_s: float | None = 0.05
    workers_come: bool = True
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    arrived: Arrived = field(default_factory=Arrived)
    now_s: float = 0.0
    decisions: list[ScalingDecision] = field(default_factory=list)  # one per sample

    def goes_on(
        self,
        seconds: float,
        rate: float = 0.0,
        prompt: int = 900,
        output: int = 100,
        ends: bool = True,
        every_s: float = 5.0,
    ) -> None:
        """Let `rate` requests a second arrive, which end at once if `ends`; a sample every `every_s`."""
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            was, count = self.arrived, rate * every_s
            self.arrived = was._replace(
                requests=was.requests + count,
                prompt_tokens=was.prompt_tokens + count * prompt,
                output_tokens=was.output_tokens + count * output * ends,
                ended=was.ended + count * ends,
            )
            self.looks()

    def looks(self) -> ScalingDecision:
        """Take a sample, and return what it orders."""
        signals = Signals(self.now_s, self.arrived, self.prefill, self.decode, self.ttft_s, self.tpot_s)
        decision, self.memory = decide(signals, self.memory, self.config)
        self.decisions.append(decision)
        self.prefill = self._after(self.prefill, decision.prefill)
        self.decode = self._after(self.decode, decision.decode)
        return decision

    @property
    def counts(self) -> tuple[int, int]:
        """Targets of prefill and decode."""
        return self.prefill.target, self.decode.target

    def reasons(self) -> set[str]:
        """All that were given so far."""
        return {str(reason) for one in self.decisions for reason in (one.prefill_reason, one.decode_reason)}

    def _after(self, role: RoleSignals, target: int) -> RoleSignals:
        return replace(role, target=target, running=target if self.workers_come else role.running)
