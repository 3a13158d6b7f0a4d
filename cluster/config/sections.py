"""The sections that the cluster itself reads; each has the settings of its parts beside its own.

Imports no torch: the router's process reads them too.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, PlainValidator, StringConstraints, field_validator, model_validator

from twostroke.decode_worker.config import DecodeConfig
from twostroke.kvtransfer.config import TransferConfig
from twostroke.model.config import KVCacheDtype, PrefillKernel, Quantization
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.settings import Count, Section
from twostroke.router.channels.token_channels import TokenChannelConfig
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.observe.tracing import TracingConfig


def parse_cores(text: str) -> tuple[int, ...]:
    """Ascending. Raises ValueError for what is no list."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{text!r} is no list of cores like '0-3,8'")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < 4096:
            raise ValueError(f"{part.strip()} is no range of cores")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


BUNDLED_MODEL = "bundled"

Dtype = Literal["auto", "bfloat16", "float32"]
BlockSize = Annotated[int, Ge(1), Le(1024)]
Origin = Annotated[str, StringConstraints(pattern=r"^(\*|https?://[^/\s,*]+)$", max_length=256)]
"""As a browser sends it: scheme, host and, unless it is the scheme's own, port; no path. `*` is any."""
TransportChoice = Literal["auto", "tcp", "shm", "torch_distributed", "cuda_ipc", "nixl"]


class ModelSection(Section):
    """Which model, and how all workers hold it."""

    path: str = BUNDLED_MODEL
    """`bundled`, a folder, a GGUF file, or a Hugging Face hub id."""
    name: str | None = None
    """What clients call it; null: the folder's name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where the workers are given GPUs."""
    dtype: Dtype = "auto"
    quantization: Quantization = "auto"
    """Of the projections' weights, as they are loaded; auto: as the checkpoint has them, none: widened to dtype."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto: dtype. fp8 and fp8_e4m3: one byte a number, of keys and of values."""
    block_size: BlockSize | None = None
    """Tokens; null: 16 on CPUs, 64 on GPUs."""
    max_context: Annotated[int, Ge(2)] | None = None
    """Tokens; null: what model and cache allow."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling defaults: of the model's generation_config.json, or OpenAI's."""
    chat_template: str | None = None
    """A file's path, or a template's text, in place of the model's own."""
    response_template: str | None = None
    """How calls and thoughts are read out of answers: formats' names, a file, or none; null: told by the model."""


class HeldModel(Section):
    """How workers of one role hold the model, where that is not as `model` says."""

    block_size: BlockSize | None = None
    """Tokens; null: model.block_size."""
    dtype: Dtype | None = None
    """null: model.dtype."""
    quantization: Quantization | None = None
    """null: model.quantization."""


def held_as(dtype: str, weights: str | None) -> str:
    """How a model is held, for people; None: its weights are of the dtype."""
    return dtype if weights is None else f"{dtype} with {weights} weights"


def _gpu_count(value: object) -> "float | Literal['auto']":
    """By hand: pydantic would tell of both kinds, each with a path of its own."""
    if value == "auto":
        return "auto"
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 64:
        return float(value)
    raise ValueError(f"{value!r} is neither auto nor a number from 0 to 64")


GpuCount = Annotated[
    float | Literal["auto"],
    PlainValidator(_gpu_count, json_schema_input_type=Annotated[float, Ge(0), Le(64)] | Literal["auto"]),
]


class WorkerResources(Section):
    """What one worker takes of its machine."""

    tensor_parallel: Annotated[int, Ge(1), Le(8)] = 1
    """Ranks that share each stage of the model: 1, 2, 4 or 8. The settings beside it are each rank's."""
    pipeline_parallel: Annotated[int, Ge(1), Le(16)] = 1
    """Stages that share the model's layers; each is on one node, and all are where there is room for them."""
    expert_parallel: bool = False
    """Whether each rank has some of a mixture's experts whole, instead of a part of each."""
    redundant_experts: Annotated[int, Ge(0), Le(64)] = 0
    """For how many of other ranks' hot experts each rank has room in each layer, with `expert_parallel`; weights move
    while the worker serves."""
    threads: Annotated[int, Ge(1), Le(1024)] | None = None
    """Of a step; null: the cores shared among all workers."""
    cores: str | None = None
    """Which ones, as `0-3,8`; null: whichever the system chooses."""
    num_gpus: GpuCount = "auto"
    """auto: `twostroke serve` shares this machine's GPUs out; on a Ray cluster that has any, one for each rank."""
    kv_cache_gib: Annotated[float, Ge(0.001), Le(65536)] | None = None
    """null: what a GPU has left, or part of the host's free memory."""
    num_blocks: Count | None = None
    """Of the cache, instead of kv_cache_gib."""
    gpu_memory_utilization: Annotated[float, Ge(0.05), Le(1)] = 0.9
    """What weights, steps and cache may take of the worker's GPU, or of its part of one."""
    prefill_kernel: PrefillKernel = "auto"

    @model_validator(mode="after")
    def _check_resources(self) -> "WorkerResources":
        if self.tensor_parallel not in (1, 2, 4, 8):
            raise ValueError(f"tensor_parallel: {self.tensor_parallel} is none of 1, 2, 4, 8")
        if self.redundant_experts and not (self.expert_parallel and self.tensor_parallel > 1):
            raise ValueError(
                f"redundant_experts: {self.redundant_experts} copies of whole experts on ranks that don't divide them: "
                "set expert_parallel: true and tensor_parallel: 2, 4 or 8, or leave it out"
            )
        if self.redundant_experts and self.pipeline_parallel > 1:
            raise ValueError(
                f"redundant_experts: {self.redundant_experts} with pipeline_parallel: {self.pipeline_parallel}: "
                "experts move among the ranks of an only stage: leave out one of the two"
            )
        if self.num_ranks > 1 and self.num_gpus not in ("auto", 0, 1):
            raise ValueError(
                f"num_gpus: {self.num_gpus:g} for each of a worker's {self.num_ranks} ranks: give each one GPU, or none"
            )
        if self.cores is not None and self.threads not in (None, len(parse_cores(self.cores))):
            raise ValueError(f"threads: {self.threads} on the cores {self.cores}: give one of the two, or as many")
        if self.num_blocks is not None and self.kv_cache_gib is not None:
            raise ValueError(
                f"num_blocks: {self.num_blocks} beside kv_cache_gib {self.kv_cache_gib:g}: give one of them"
            )
        if self.cores is not None and self.num_ranks > 1:
            raise ValueError(f"cores: {self.cores} can't be shared by a worker's {self.num_ranks} ranks")
        return self

    @property
    def num_ranks(self) -> int:
        """Processes of one worker."""
        return self.tensor_parallel * self.pipeline_parallel

    @field_validator("cores")
    @classmethod
    def _check_cores(cls, cores: str | None) -> str | None:
        if cores is not None:
            parse_cores(cores)
        return cores

    @property
    def gpus(self) -> float:
        """What each rank takes; none as long as nobody has looked for any."""
        return 0.0 if self.num_gpus == "auto" else self.num_gpus

    @property
    def gpu_memory_share(self) -> float:
        """What the worker may use of its GPU's memory."""
        return self.gpu_memory_utilization * min(1.0, self.gpus)


_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_PREFIX = r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?"
_LABEL = re.compile(rf"(?:{_PREFIX}/)?{_NAME}")
_SELECTOR = re.compile(rf"!?{_NAME}|!?in\({_NAME}(?:, ?{_NAME})*\)")

# What workers take of these has settings of its own.
_OWN_SETTINGS = {"CPU": "threads", "GPU": "num_gpus"}
_NOT_FOR_SALE = {"memory", "object_store_memory"}

LEAST_RESOURCE = 0.0001
"""Ray counts resources in these."""


class Placement(Section):
    """Which nodes of a Ray cluster a role's processes may run on: by the nodes' labels, and by what the nodes have.

    Whatever is not said leaves the choice to Ray. The rules for names are Ray's, which are Kubernetes'.
    """

    node_labels: Mapping[str, str] = Field(default_factory=dict)
    """What a node's labels must be. Values as in Ray's selectors: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
    node_resources: Mapping[str, Annotated[float, Ge(LEAST_RESOURCE), Le(100_000)]] = Field(default_factory=dict)
    """What each worker takes of a node's custom resources: where a node has 1 slot and a worker takes 1, one runs. Of a
    worker of several stages, each stage takes so much."""

    @model_validator(mode="after")
    def _check_names(self) -> "Placement":
        """Ray would refuse other names and values, or no node could ever have them."""
        for name, value in self.node_labels.items():
            if not _LABEL.fullmatch(name):
                raise ValueError(f"node_labels: {name!r} is no label's name: letters, digits and - _ . between them")
            if not _SELECTOR.fullmatch(value):
                raise ValueError(f"node_labels: {name} can't be {value!r}: give a value, !value, in(a, b) or !in(a, b)")
        for name, amount in self.node_resources.items():
            if name in _OWN_SETTINGS:
                raise ValueError(f"node_resources: {name} is what {_OWN_SETTINGS[name]} takes: set that instead")
            if name in _NOT_FOR_SALE or not name:
                raise ValueError(f"node_resources: {name!r} is no custom resource")
            if amount > 1 and amount % 1:
                raise ValueError(f"node_resources: {name} is {amount:g}: above 1 Ray takes whole numbers only")
        return self

    @property
    def is_anywhere(self) -> bool:
        return not self.node_labels and not self.node_resources

    def actor_options(self) -> dict[str, Any]:
        """Ray's options for an actor there."""
        options: dict[str, Any] = {}
        if self.node_labels:
            options["label_selector"] = dict(self.node_labels)
        if self.node_resources:
            options["resources"] = dict(self.node_resources)
        return options


class PrefillSection(WorkerResources, HeldModel, Placement, PrefillConfig):
    """Prefill workers: how many, on what, where, and how they work."""

    replicas: Annotated[int, Ge(0), Le(1024)] = 1
    """0: aggregated, decode workers read prompts themselves."""

    @property
    def worker(self) -> PrefillConfig:
        """What each worker is told of its work."""
        return self.part(PrefillConfig)


class DecodeSection(WorkerResources, HeldModel, Placement, DecodeConfig):
    """Decode workers: how many, on what, where, and how they work."""

    replicas: Annotated[int, Ge(1), Le(1024)] = 1

    @property
    def worker(self) -> DecodeConfig:
        """What each worker is told of its work."""
        return self.part(DecodeConfig)


class RouterSection(Placement, PipelineConfig):
    """Routers: how many, where, what they take, and how they end."""

    replicas: Annotated[int, Ge(1), Le(256)] = 1
    max_body_mib: Annotated[float, Ge(0.001), Le(1024)] = 8.0
    """Of a request; longer ones are refused."""
    max_choices_in_flight: Count = 4096
    """Of one replica; more are refused."""
    strict: bool = False
    """Requests with unknown fields are refused, not served without them."""
    page: bool = True
    """The page at `/`, to talk to the model and to see requests on their way."""
    cors_origins: tuple[Origin, ...] = Field(default=(), strict=False)
    """Pages of these origins may use the API from a browser, such as https://chat.example.org; '*': any page."""
    drain_grace_s: Annotated[float, Ge(0), Le(3600)] = 20.0
    """After it others go on with a leaving worker's requests."""
    stream_grace_s: Annotated[float, Ge(0), Le(86400)] = 60.0
    """Of a leaving router, whose streams end then."""
    drain_notice_s: Annotated[float, Ge(0), Le(600)] = 0.0
    """Not ready, and still serving, before it ends."""
    token_channel: TokenChannelConfig = Field(default_factory=TokenChannelConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)

    @property
    def pipeline(self) -> PipelineConfig:
        """What the pipeline is told."""
        return self.part(PipelineConfig)


class TransferSection(TransferConfig):
    """How KV travels."""

    transport: TransportChoice = "auto"
    """auto: for each pair of workers the best that both have."""
    tcp_streams: Annotated[int, Ge(1), Le(64)] = 4
    """TCP connections of one link between machines."""
    tcp_max_bytes_per_s: Annotated[int, Ge(1000)] | None = None
    """Of one link; null: no limit."""

    @property
    def transfer(self) -> TransferConfig:
        """What senders and receivers are told."""
        return self.part(TransferConfig)

    @field_validator("transport", mode="before")
    @classmethod
    def _check_name(cls, transport: object) -> object:
        if isinstance(transport, str) and transport.lower() in ("nccl", "gloo"):
            raise ValueError(f"{transport} is not a name here: set torch_distributed, which uses it")
        return transport

    @model_validator(mode="after")
    def _check_bounds(self) -> "TransferSection":
        """Less would work on the wires of tests alone."""
        for name, least in (("lease_s", 0.1), ("progress_s", 1), ("max_chunk_bytes", 4096)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: {value} must be at least {least}")
        if self.progress_s < self.lease_s:
            raise ValueError(f"progress_s: {self.progress_s:g} must be at least kv_transfer.lease_s ({self.lease_s:g})")
        return self
