"""The dependencies of a worker: what it is given by whoever starts it."""

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.kvtiers.kv_tiers import KVTiers
from twostroke.kvtransfer.link import KVStore
from twostroke.kvtransfer.ranks import ReceivingSide, SendingSide
from twostroke.model.costs.operations import MachineLimits, StepWork
from twostroke.model.step import Engine
from twostroke.protocol.clock import Clock
from twostroke.protocol.grammars import Grammars
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import GpuUse
from twostroke.worker.experts import ExpertBalance, ReadHits
from twostroke.worker.scheduling.block_pool import BlockPool


@dataclass(frozen=True)
class WorkerDeps:
    """The dependencies of a worker. Pool, store and engine belong to it alone while it runs."""

    peer: Peer  # its name
    engine: Engine
    store: KVStore
    pool: BlockPool
    network: Network
    sender: SendingSide  # closed by the worker's `stop`, like the receiver
    receiver: ReceivingSide
    clock: Clock
    max_context: int  # tokens; the model's
    weights: str | None = None  # the storage format of quantised ones
    expert_share: float = 0.0  # of the model's experts, that a token takes; 0: it has none
    expert_hits: ReadHits | None = None  # None: they are not counted
    expert_balance: ExpertBalance | None = None  # None: ranks hold no copies of experts
    grammars: Grammars | None = None  # the model's; None: requests with a grammar are refused
    vocab_size: int | None = None  # the model's; None: unknown
    work: StepWork | None = None  # the model's; None: utilisation is not reported
    limits: MachineLimits | None = None  # of the machine, for all ranks together
    gpu_use: Callable[[], GpuUse | None] = lambda: None
    dropped_log_lines: Callable[[], int] = lambda: 0
    machine: str = ""  # as WorkerInfo has it
    tiers: KVTiers | None = None  # closed by the worker's `stop`; None: KV dies with the worker
