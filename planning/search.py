"""Search for the fleet that serves a load best: every worker profile that fits, in numbers within a budget, by
formulas.

Pools of one role are searched alone; disaggregated fleets are put together from them (Zhong et al., DistServe, OSDI
2024, algorithm 1), and the most promising are then computed whole.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from twostroke.model.config import ModelConfig, Quantization
from twostroke.model.costs.operations import NumberFormats
from twostroke.model.costs.sizes import Fit, StepBounds, check_size, fit, weight_bytes
from twostroke.model.parallel.form import ParallelForm
from twostroke.model.published.hardware import EFFICIENCY, GIB, Efficiency, Hardware
from twostroke.planning.costs.drafted_steps import most_tokens
from twostroke.planning.costs.roofline import WorkerHardware, step_costs, tpot_floor_s, ttft_floor_s
from twostroke.planning.layouts import TRIED_MODES, Layout, Mode, Pools, Work, idle_share
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.protocol.errors import ConfigError
from twostroke.worker.profile import WorkerProfile

RANKS = (1, 2, 4, 8)
MEMORY_SHARE = 0.9  # of a GPU, as gpu_memory_utilization is
MAX_GPUS = 64  # where nobody says
BLOCK_SIZES = (16, 32, 64, 128)
BLOCK_WASTE = 0.02  # of a request's KV, that its last block may leave empty: longer blocks are fewer pieces on a link
NUM_COMPUTED_WHOLE = 10  # layouts that are computed whole
NAMES = {4.0: "float32", 2.0: "bfloat16", 1.0: "float8_e4m3fn"}


@dataclass(frozen=True)
class PlanConstraints:
    """Limits of workers and their steps that hold for all profiles."""

    kv_itemsize: float | None = None  # None: as activations
    link_bytes_per_s: float = 25e9  # between workers, of one GPU
    step_tokens: int = 2048
    max_batch: int = 256
    efficiency: Efficiency = EFFICIENCY

    @property
    def bounds(self) -> StepBounds:
        return StepBounds(self.step_tokens, self.max_batch)


def worker_hardware(
    hardware: Hardware,
    ranks: int,
    quantization: Quantization,
    terms: PlanConstraints,
    *,
    shares_contexts: bool = False,
) -> WorkerHardware:
    itemsize = hardware.itemsize
    held = NumberFormats(quantization, itemsize, terms.kv_itemsize or itemsize)
    return WorkerHardware(hardware, ranks, held, terms.efficiency, shares_contexts)


def model_fit(shape: ModelConfig, machine: WorkerHardware, terms: PlanConstraints) -> Fit:
    """Raises ConfigError where so many ranks can't share the model."""
    check_size(shape, machine.ranks)
    return fit(
        shape,
        _weight_bytes(shape, int(machine.held.itemsize), machine.held.quantization, machine.ranks),
        itemsize=int(machine.held.itemsize),
        kv_itemsize=int(machine.held.kv_itemsize),
        memory=int(machine.hardware.memory_bytes * (MEMORY_SHARE if machine.hardware.is_gpu else 1.0)),
        parallel=ParallelForm(machine.ranks, shares_contexts=machine.shares_contexts),
        is_gpu=machine.hardware.is_gpu,
        bounds=terms.bounds,
    )


@cache
def _weight_bytes(shape: ModelConfig, itemsize: int, quantization: Quantization, ranks: int) -> int:
    """Remembered: of hundreds of experts it takes a while."""
    return weight_bytes(shape, itemsize, quantization, None, ParallelForm(ranks))


def possible_ranks(hardware: Hardware) -> Sequence[int]:
    """Return how many ranks may share a model. A measured CPU is a whole machine, and no machine has two."""
    return RANKS if hardware.is_gpu else RANKS[:1]


def profiles_of(
    shape: ModelConfig,
    hardware: Hardware,
    quantizations: Iterable[Quantization],
    workload: Workload,
    terms: PlanConstraints,
) -> list[WorkerProfile]:
    """Return profiles of workers on such GPUs that have room for the workload's longest request."""
    found = []
    for count in possible_ranks(hardware):
        # Latents can be on all ranks, or shared where all of them are attended to.
        ways = (False, True) if shape.kv_kinds == 1 and shape.index is None and count > 1 else (False,)
        for quantization, shares_contexts in product(quantizations, ways):
            machine = worker_hardware(hardware, count, quantization, terms, shares_contexts=shares_contexts)
            try:
                room = model_fit(shape, machine, terms)
            except ConfigError:
                continue
            if room.max_context >= workload.longest:
                found.append(_profile(shape, machine, quantization, workload, terms, room))
    return found


def _profile(
    shape: ModelConfig,
    machine: WorkerHardware,
    quantization: Quantization,
    workload: Workload,
    terms: PlanConstraints,
    room: Fit,
) -> WorkerProfile:
    held = max(1, round(workload.held[0]))
    block = max((size for size in BLOCK_SIZES if size / 2 <= BLOCK_WASTE * held), default=BLOCK_SIZES[0])
    layout = shape.kv_layout("planned", NAMES[machine.held.kv_itemsize], block)
    hardware, prompt = machine.hardware, max(1.0, workload.mean_prompt)
    copies = 1 if machine.shares_contexts else max(1, machine.ranks // shape.num_kv_heads)
    rows = shape.kv_groups.blocks_of(held + block // 2, 1, 1)
    return WorkerProfile(
        source="the roofline of a published sheet",
        name=f"{hardware.name} x{machine.ranks} {quantization}{' cp' if machine.shares_contexts else ''}",
        costs=step_costs(machine, shape, workload.mean_context, terms.step_tokens),
        kv_tokens=int(room.rows / rows * held),
        kv_bytes=layout.sent_bytes(round(prompt)) / round(prompt),
        link_bytes_per_s=terms.link_bytes_per_s * machine.ranks,
        num_layers=layout.num_layers,
        step_tokens=terms.step_tokens,
        max_batch=terms.max_batch,
        gpus=machine.ranks,
        usd_per_hour=hardware.usd_per_hour * machine.ranks,
        hardware=hardware.name,
        ranks=machine.ranks,
        quantization=quantization,
        block_size=block,
        shares_contexts=machine.shares_contexts,
        copies=copies,
    )


def nowhere(
    shape: ModelConfig, hardware: Sequence[Hardware], workload: Workload, terms: PlanConstraints
) -> ConfigError:
    """Return the error that says why no worker has room, and what would be needed."""
    largest = max(hardware, key=lambda one: one.memory_bytes)
    needs = []
    for count in possible_ranks(largest):
        for quantization in ("auto", "int8", "int4"):
            machine = worker_hardware(replace(largest, memory_bytes=1 << 50), count, quantization, terms)
            try:
                room = model_fit(shape, machine, terms)
            except ConfigError:
                continue
            rows = shape.kv_groups.blocks_of(workload.longest, 1, terms.step_tokens)
            kv = rows * room.kv_bytes_per_token / max(1, shape.kv_groups.count - len(shape.kv_groups.windowed))
            needs.append((room.weight_bytes + room.step_bytes + kv, count, quantization))
    least, count, quantization = min(needs)
    gib = least / MEMORY_SHARE / GIB
    return ConfigError(
        f"--gpu {','.join(one.name for one in hardware)}: the model fits on none of them with a request of "
        f"{workload.longest:,} tokens: the least is {gib:.0f} GiB of each of {count} GPUs that share it, with "
        f"--quantization {quantization}; take GPUs with more memory, or shorter requests"
    )


def check_floors(
    shape: ModelConfig,
    hardware: Sequence[Hardware],
    quantizations: Sequence[Quantization],
    workload: Workload,
    promise: SLOTargets,
    terms: PlanConstraints,
    repeated: float = 0.0,
    computed: float = 1.0,
) -> None:
    """Raises ConfigError, with the floor, for a promise that not even an idle worker could keep.

    `repeated` is the share of the answers that drafts may find, `computed` that of the prompts that no tier holds.
    """
    prompts = sorted(prompt for prompt, _ in workload.lengths)
    prompt = prompts[min(len(prompts) - 1, int(promise.ttft_share * len(prompts)))]
    machines = []
    for one in hardware:
        for count in possible_ranks(one):
            for quantization in quantizations:
                machine = worker_hardware(one, count, quantization, terms)
                try:
                    check_size(shape, count)
                except ConfigError:
                    continue
                machines.append(machine)
    for name, asked_s, floor_s in (
        ("ttft", promise.ttft_s, computed * min(ttft_floor_s(machine, shape, prompt) for machine in machines)),
        (
            "tpot",
            promise.tpot_s,
            min(tpot_floor_s(machine, shape, workload.mean_context) for machine in machines) / most_tokens(repeated),
        ),
    ):
        if asked_s < floor_s:
            raise ConfigError(
                f"--slo {name} of {asked_s:g} s: below the floor of {floor_s:.3g} s, which no worker of these GPUs can "
                "beat with nothing else to do; ask for more time, or take faster GPUs"
            )


@dataclass(frozen=True)
class Budget:
    """Limits of a purchase. None means no limit."""

    gpus: int | None = None
    usd_per_hour: float | None = None

    def most(self, profile: WorkerProfile, beside: float = 0.0, beside_usd: float = 0.0) -> int:
        """Return how many workers of a profile fit, where `beside` GPUs and `beside_usd` go elsewhere."""
        gpus = MAX_GPUS if self.gpus is None and self.usd_per_hour is None else self.gpus
        counts = [1 << 10]
        if gpus is not None:
            counts.append(int((gpus - beside) // profile.gpus))
        if self.usd_per_hour is not None and profile.usd_per_hour > 0:
            counts.append(int((self.usd_per_hour - beside_usd + 1e-9) // profile.usd_per_hour))
        return min(counts)


@dataclass(frozen=True)
class Planned:
    """A layout, and what it serves. Requests a second."""

    layout: Layout
    goodput: float

    def rank(self, rate: float | None) -> tuple[float, ...]:
        """The best is the largest: what serves the rate, then what costs least, then what quantises least and serves
        most. Where nothing serves the rate, what serves most."""
        layout = self.layout
        if rate is not None and self.goodput >= rate:
            return 1.0, -layout.usd_per_hour, -float(layout.gpus), -float(layout.num_quantised), self.goodput
        return 0.0, self.goodput, -layout.usd_per_hour, -float(layout.num_quantised), 0.0


def best_of_each(planned: Iterable[Planned], rate: float | None) -> list[Planned]:
    """Return the best layout of each structure, the best of all first."""
    found: dict[tuple[str, str, str], Planned] = {}
    for one in sorted(planned, key=lambda one: one.rank(rate), reverse=True):
        found.setdefault(one.layout.structure, one)
    return list(found.values())


class FleetSearch:
    """All that is asked of the fleets but their number: what was computed is remembered from search to search."""

    def __init__(
        self,
        prefill: Sequence[WorkerProfile],
        decode: Sequence[WorkerProfile],
        workload: Workload,
        promise: SLOTargets,
        budget: Budget,
        modes: Collection[Mode] = TRIED_MODES,
    ) -> None:
        self._modes = modes
        self._prefill, self._decode = prefill, decode
        self._workload, self._promise, self._budget = workload, promise, budget
        self._pools = Pools(workload, promise)
        self._goodputs: dict[Layout, float] = {}

    def best(self, rate: float | None, weights: dict[tuple[str, str, str], float] | None = None) -> list[Planned]:
        """The best layout of each structure, the best of all first.

        `weights`: by structure, what a layout really serves as a part of what formulas say.
        """
        known = weights or {}
        rough: list[Planned] = []
        for profile in self._decode:
            target = self._over(rate, known.get(("aggregated", "", profile.name), 1.0))
            count = self._count("both", profile, self._budget.most(profile), target)
            if count:
                rough.append(Planned(Layout("aggregated", profile, count), self._pools.rate("both", profile, count)))
        for prefill in self._prefill:
            for decode in self._decode:
                target = self._over(rate, known.get(("disaggregated", prefill.name, decode.name), 1.0))
                counts = self._pair(prefill, decode, target)
                if counts is not None:
                    served = min(
                        self._pools.rate("prefill", prefill, counts[0]), self._pools.rate("decode", decode, counts[1])
                    )
                    rough.append(Planned(Layout("disaggregated", decode, counts[1], prefill, counts[0]), served))
        rough.sort(key=lambda one: one.rank(rate), reverse=True)
        chosen = rough[:NUM_COMPUTED_WHOLE]
        chosen += [
            replace(one, layout=hybrid)
            for one in chosen[: NUM_COMPUTED_WHOLE // 2]
            for hybrid in self._hybrids(one, rate)
        ]
        planned = [
            replace(one, goodput=self.goodput(one.layout, one.goodput) * known.get(one.layout.structure, 1.0))
            for one in chosen
            if one.layout.mode in self._modes
        ]
        return best_of_each(planned, rate)

    def goodput(self, layout: Layout, near: float = 1.0) -> float:
        """Return the goodput by formulas. `near` is a guess."""
        if layout not in self._goodputs:
            self._goodputs[layout] = (
                self._pools.rate("both", layout.decode, layout.num_decode)
                if layout.prefill is None
                else layout.goodput(self._workload, self._promise, near or 1.0)
            )
        return self._goodputs[layout]

    @staticmethod
    def _over(rate: float | None, weight: float) -> float | None:
        return None if rate is None else rate / max(weight, 0.05)

    def _hybrids(self, one: Planned, rate: float | None) -> list[Layout]:
        """The same workers, and fewer of a role: one, and of decode workers as many more as idle prefill workers."""
        layout = one.layout
        if layout.prefill is None:
            return []
        counts = [(layout.num_prefill, layout.num_decode), (layout.num_prefill - 1, layout.num_decode)]
        served = min(one.goodput, rate or one.goodput)
        idle = layout.num_prefill * idle_share(layout.prefill, layout.num_prefill, self._workload, served)
        counts += [(layout.num_prefill, layout.num_decode - fewer) for fewer in range(1, 2 + round(idle))]
        modes: list[Mode] = [mode for mode in ("hybrid", "fixed") if mode in self._modes]
        return [
            replace(layout, mode=mode, num_prefill=prefill, num_decode=decode)
            for mode, (prefill, decode) in product(modes, counts)
            if min(prefill, decode) >= 1
        ]

    def _pair(self, prefill: WorkerProfile, decode: WorkerProfile, rate: float | None) -> tuple[int, int] | None:
        """Return how many workers of each role: as many as the rate needs, or else what serves most."""
        pools, most = self._pools, self._budget.most(prefill, decode.gpus, decode.usd_per_hour)
        if most < 1:
            return None

        def left(num_prefill: int) -> int:
            return self._budget.most(decode, num_prefill * prefill.gpus, num_prefill * prefill.usd_per_hour)

        if rate is not None and pools.holds("prefill", prefill, most, rate):
            num_prefill = self._count("prefill", prefill, most, rate)
            if left(num_prefill) >= 1 and pools.holds("decode", decode, left(num_prefill), rate):
                return num_prefill, self._count("decode", decode, left(num_prefill), rate)
        low, high = 1, most  # num_prefill: what they serve rises with them, what is left for writers falls
        while low < high:
            middle = (low + high) // 2
            if pools.rate("prefill", prefill, middle) >= pools.rate("decode", decode, left(middle)):
                high = middle
            else:
                low = middle + 1
        tried = [count for count in (low - 1, low) if count >= 1 and left(count) >= 1]
        return max(
            ((num_prefill, left(num_prefill)) for num_prefill in tried),
            key=lambda pair: min(pools.rate("prefill", prefill, pair[0]), pools.rate("decode", decode, pair[1])),
            default=None,
        )

    def _count(self, work: Work, profile: WorkerProfile, most: int, rate: float | None) -> int:
        """The fewest that serve the rate, or `most`."""
        if most < 1:
            return 0
        if rate is None or not self._pools.holds(work, profile, most, rate):
            return most
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._pools.holds(work, profile, middle, rate) else (middle + 1, high)
        return low
