"""The whole configuration, from one YAML file: the sections together, what follows from them, and what is wrong in it.

Imports no torch: the router's process reads it too.
"""

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from twostroke.cluster.config.autoscaling import AutoscalingConfig, WorkerCounts, check_counts, worker_counts
from twostroke.cluster.config.process_logs import LoggingConfig
from twostroke.cluster.config.reading import load_yaml, load_yaml_and_text, read_settings, setting_fault
from twostroke.cluster.config.sections import (
    DecodeSection,
    HeldModel,
    KVCacheSection,
    ModelSection,
    PrefillSection,
    RouterSection,
    WorkerResources,
    parse_cores,
)
from twostroke.kvtiers.config import SETTING as TIERS
from twostroke.kvtiers.config import TiersConfig
from twostroke.kvtransfer.config import TransferConfig, TransportName
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import UNKNOWN_SETTING, Section
from twostroke.protocol.stats import Role
from twostroke.router.http.tenants import AuthConfig, KeyConfig
from twostroke.router.slo.classes import SLOConfig
from twostroke.router.token_channels import TokenChannelConfig
from twostroke.worker.token_server import TokenServerConfig

CPU_BLOCK_SIZE = 16
GPU_BLOCK_SIZE = 64
"""Tokens of a block on GPUs: a step of the attention kernels reads one, by one look-up in the block table."""


class ClusterConfig(Section):
    """Everything that `twostroke serve` and the Serve application are told."""

    model: ModelSection = Field(default_factory=ModelSection)
    prefill: PrefillSection = Field(default_factory=PrefillSection)
    decode: DecodeSection = Field(default_factory=DecodeSection)
    router: RouterSection = Field(default_factory=RouterSection)
    kv_transfer: TransferConfig = Field(default_factory=TransferConfig)
    kv_cache: KVCacheSection = Field(default_factory=KVCacheSection)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    slo: SLOConfig = Field(default_factory=SLOConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)
    autoscaling: AutoscalingConfig = Field(default_factory=AutoscalingConfig)

    @model_validator(mode="after")
    def _check_sections(self) -> "ClusterConfig":
        """Sections must not contradict each other."""
        known = [one.name for one in self.slo.classes]
        for key in self.auth.keys:
            if key.slo_class is not None and key.slo_class not in known:
                raise ValueError(f"auth.keys: {key.name}'s slo_class {key.slo_class} is none of {', '.join(known)}")
        for role, section in self.roles.items():
            _check_signs_of_life(role, section.token_channel, self.router.token_channel)
        dtypes = [self.model_section(section).dtype for section in (self.prefill, self.decode)]
        if self.has_prefill and len(set(dtypes)) > 1:
            raise ValueError(
                f"prefill.dtype: {dtypes[0]} beside decode.dtype {dtypes[1]}: KV is of a worker's dtype, which both "
                "must have to exchange it: give them the same (quantization may differ)"
            )
        encoding = self.kv_transfer.encoding
        if self.model.kv_cache_dtype != "auto" and encoding != "raw":
            raise ValueError(
                f"kv_transfer.encoding: {encoding} beside model.kv_cache_dtype {self.model.kv_cache_dtype}, which has "
                "one byte a number already: set encoding to raw"
            )
        if self.kv_cache.tiers.is_on and encoding != "raw":
            raise ValueError(
                f"kv_transfer.encoding: {encoding} beside {TIERS}, whose objects hold KV exactly as it was computed: "
                "set encoding to raw, or leave the tiers out"
            )
        _check_transfer(self.kv_transfer)
        check_counts(self.autoscaling, self.counts, self.gpus_each)
        return self

    @property
    def roles(self) -> Mapping[Role, PrefillSection | DecodeSection]:
        """The sections of both kinds of workers."""
        return {"prefill": self.prefill, "decode": self.decode}

    def model_section(self, section: HeldModel) -> ModelSection:
        """The model as one role's workers hold it."""
        return self.model.model_copy(update=section.part(HeldModel).model_dump(exclude_none=True))

    @property
    def counts(self) -> Mapping[Role, WorkerCounts]:
        """Return the numbers of workers of each role."""
        return {role: worker_counts(self.autoscaling, role, each.replicas) for role, each in self.roles.items()}

    @property
    def gpus_each(self) -> Mapping[Role, float]:
        """Return the GPUs of one worker of each role, all ranks together."""
        return {role: section.gpus * section.num_ranks for role, section in self.roles.items()}

    @property
    def has_prefill(self) -> bool:
        """Return whether there are, or may be, prefill workers. Otherwise decode workers compute all prompts."""
        return self.counts["prefill"].most > 0

    @property
    def num_workers(self) -> int:
        """Return the largest number of workers that there may be."""
        return sum(of_role.most for of_role in self.counts.values())

    @property
    def num_ranks(self) -> int:
        """Processes, at most, that run an engine or a part of one."""
        return sum(self.counts[role].most * section.num_ranks for role, section in self.roles.items())

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Return where the workers compute. Raises ConfigError where that differs between workers."""
        with_gpu = [section.gpus > 0 for role, section in self.roles.items() if role == "decode" or self.has_prefill]
        if self.model.device == "cpu":
            return "cpu"
        if all(with_gpu):
            return "cuda"
        if any(with_gpu):
            raise ConfigError(
                "prefill.num_gpus and decode.num_gpus: give GPUs to both kinds of workers or to none, since KV does "
                "not travel between GPU and host memory"
            )
        if self.model.device == "cuda":
            raise ConfigError("model.device: cuda needs prefill.num_gpus and decode.num_gpus above 0")
        return "cpu"

    @property
    def has_mtp(self) -> bool:
        """Return whether workers load the model's MTP head. Raises ConfigError where that differs between workers."""
        methods = [
            section.speculation.method for role, section in self.roles.items() if role == "decode" or self.has_prefill
        ]
        if "mtp" in methods and len({*methods}) > 1:
            raise ConfigError(
                "prefill.speculation.method and decode.speculation.method: set both to mtp or none, since a prompt's "
                "KV has the MTP head's layer then"
            )
        return "mtp" in methods

    def block_size(self, section: PrefillSection | DecodeSection) -> int:
        """Tokens of a block of a role's workers."""
        return section.block_size or self.default_block_size

    @property
    def default_block_size(self) -> int:
        """Tokens of a block where a worker has no size of its own."""
        if self.model.block_size is not None:
            return self.model.block_size
        # Of ranks that share blocks each has as many tokens as attention reads at a time.
        usual = GPU_BLOCK_SIZE if self.device == "cuda" else CPU_BLOCK_SIZE
        return max(usual, *(CPU_BLOCK_SIZE * section.parallel.context_ranks for section in self.roles.values()))

    @property
    def transfer(self) -> TransferConfig:
        """Return the settings of KV transfer. Raises ConfigError where these workers or the encoding rule them out."""
        chosen, encoding = self.kv_transfer.transport, self.kv_transfer.encoding
        elsewhere = {"cpu": ("cuda_ipc",), "cuda": ("tcp", "shm")}[self.device]
        if chosen in elsewhere:
            others = ", ".join(name for name in get_args(TransportName) if name not in elsewhere)
            raise ConfigError(f"kv_transfer.transport: {chosen} can't reach a cache on {self.device}: use {others}")
        if chosen in ("shm", "cuda_ipc") and encoding != "raw":
            raise ConfigError(
                f"kv_transfer.encoding: {chosen} moves KV as it is stored, not as {encoding}: set encoding to raw, or "
                "transport to auto"
            )
        return self.kv_transfer

    @property
    def tiers(self) -> TiersConfig:
        """Return the KV tiers. Raises ConfigError where these workers can't use them."""
        tiers = self.kv_cache.tiers
        if not tiers.is_on:
            return tiers
        if self.device == "cuda":
            raise ConfigError(f"{TIERS}: tiers of caches on GPUs are not supported yet: leave them out")
        for role, section in self.roles.items():
            block_size = self.block_size(section)
            if (role == "decode" or self.has_prefill) and tiers.object_tokens % block_size:
                raise ConfigError(
                    f"{TIERS}.object_tokens: {tiers.object_tokens} is no multiple of the {block_size} tokens of a "
                    f"block of {role} workers: give one"
                )
        return tiers

    def threads(self, resources: WorkerResources) -> int:
        """Cores for the steps of one worker's rank: what is asked for, else an equal share of this machine's."""
        if resources.cores is not None:
            return len(parse_cores(resources.cores))
        return resources.threads or max(1, len(os.sched_getaffinity(0)) // self.num_ranks)


def read_config(raw: object) -> ClusterConfig:
    """The configuration in `raw`, as YAML gives it. Raises ConfigError that begins with the setting at fault."""
    return read_settings(ClusterConfig, raw)


def lay_over(raw: dict[str, Any], *, dtype: str | None, quantization: str | None) -> None:
    """Have all workers hold the model so, whatever `raw` says of all of them or of one role; None: as it is."""
    given = {name: value for name, value in (("dtype", dtype), ("quantization", quantization)) if value is not None}
    for role in get_args(Role):
        if raw.get(role):
            raw[role] = {name: value for name, value in raw[role].items() if name not in given}
    if given:
        raw["model"] = {**(raw.get("model") or {}), **given}


def with_keys(config: ClusterConfig, keys: Sequence[KeyConfig]) -> ClusterConfig:
    """The configuration with these keys behind its own. Raises ConfigError where they collide."""
    auth = {"keys": [*config.auth.keys, *keys], "keys_file": config.auth.keys_file}
    return read_settings(ClusterConfig, {**dict(config), "auth": auth})


def api_keys(config: ClusterConfig) -> tuple[KeyConfig, ...]:
    """Return the keys of the configuration and of its file, as it is now. Raises ConfigError that names the file."""
    if config.auth.keys_file is None:
        return config.auth.keys
    path = Path(config.auth.keys_file)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError("must be a plain file, since routers read it again and again")
        listed = read_settings(AuthConfig, load_yaml(path))
        if listed.keys_file is not None:
            raise ConfigError("keys_file: there is no such setting in a file of keys")
        if "keys" not in listed.model_fields_set:  # cut short by an editor or a full disk, it must not revoke all keys
            raise ConfigError("has no `keys`: write `keys: []` where there are none")
        return with_keys(config, listed.keys).auth.keys
    except (ConfigError, OSError) as error:
        message = str(error).removeprefix(f"{path}: ").removeprefix("auth.")
        raise ConfigError(f"auth.keys_file: {path}: {message}") from error


def check_keys(config: ClusterConfig) -> ClusterConfig:
    """The configuration, with the whole path of its file of keys: routers read it in other folders. Raises ConfigError
    where that can't be read, or has no keys."""
    if config.auth.keys_file is None:
        return config
    if not api_keys(config):
        raise ConfigError(
            f"auth.keys_file: {config.auth.keys_file}: has no keys, so nobody could get in: `twostroke key new NAME` "
            "makes one; or delete auth.keys_file"
        )
    auth = config.auth.model_copy(update={"keys_file": str(Path(config.auth.keys_file).absolute())})
    return config.model_copy(update={"auth": auth})


def _check_transfer(config: TransferConfig) -> None:
    """Check the bounds of KV transfer, of which tests use smaller ones. Raises ValueError."""
    for name, least in (("lease_s", 0.1), ("progress_s", 1), ("max_chunk_bytes", 4096)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"kv_transfer.{name}: {value} must be at least {least}")
    if config.progress_s < config.lease_s:
        raise ValueError(
            f"kv_transfer.progress_s: {config.progress_s:g} must be at least kv_transfer.lease_s ({config.lease_s:g})"
        )


def _check_signs_of_life(role: str, worker: TokenServerConfig, router: TokenChannelConfig) -> None:
    """Check that neither side of a token channel takes the other for lost between two pings. Raises ValueError."""
    if router.silence_s < 2 * worker.stats_interval_s:
        raise ValueError(
            f"router.token_channel.silence_s: {router.silence_s:g} must be at least twice "
            f"{role}.token_channel.stats_interval_s ({worker.stats_interval_s:g}): lower that, or raise this"
        )
    if router.ping_s > worker.lease_s / 3:
        raise ValueError(
            f"router.token_channel.ping_s: {router.ping_s:g} must be at most a third of "
            f"{role}.token_channel.lease_s ({worker.lease_s:g}): raise that, or lower this"
        )


_PATH = re.compile(r"[\w.-]+(?:\[\d+\][\w.-]*)*(?=: )")
_PART = re.compile(r"\[(\d+)\]|([\w-]+)")
_RAY_CLUSTER = {"cluster_name", "provider"}
"""Keys that a file for `ray up` must have."""


class ConfigFault(NamedTuple):
    """An error of a configuration file, with its line."""

    line: int  # the first is 1
    text: str  # begins with the setting's path


def config_faults(path: Path) -> list[ConfigFault]:
    """Return all errors of a file for `twostroke serve --config`, or for Ray Serve's tools, whose configurations stand
    under `args`. Settings are checked together only where each is right alone. Raises ConfigError for a file that
    cannot be read, is not YAML, or is Serve's and has no `args`."""
    raw, text_of_file = load_yaml_and_text(path)
    if "applications" not in raw:
        return faults_in(raw, text_of_file, path)
    root = yaml.compose(text_of_file, yaml.SafeLoader)
    applications = raw["applications"] if isinstance(raw["applications"], list) else []
    found = [(i, one["args"]) for i, one in enumerate(applications) if isinstance(one, dict) and one.get("args")]
    if not found:
        raise ConfigError(f"{path}: no application has `args`, under which the configuration stands")
    texts = [f"applications[{i}].args.{text}" for i, args in found for text in _faults(args)]
    return [ConfigFault(_line_number(root, text), text) for text in texts]


def faults_in(raw: dict[str, Any], text_of_file: str, path: Path) -> list[ConfigFault]:
    """Return all errors of settings as a file at `path` has them. Raises ConfigError for a file of another program."""
    if raw.keys() >= _RAY_CLUSTER:
        raise ConfigError(f"{path}: describes a cluster for `ray up`; settings are in the file for `serve deploy`")
    texts = list(_faults(raw))
    root = yaml.compose(text_of_file, yaml.SafeLoader) if texts else None  # read again for the lines of faults alone
    return sorted(ConfigFault(_line_number(root, text), text) for text in texts)


def _faults(raw: Any) -> Iterator[str]:
    """A section with an unknown name tells of nothing else: such names are told of, and taken out."""
    raw = copy.deepcopy(raw)
    while True:
        try:
            ClusterConfig.model_validate(raw)
            return
        except ValidationError as error:
            errors = error.errors(include_url=False)
        unknown = [one for one in errors if one["type"] == UNKNOWN_SETTING]
        yield from (setting_fault(one, ClusterConfig) for one in unknown or errors)
        if not unknown:
            return
        for one in unknown:
            section = raw
            for part in one["loc"]:
                section = section[part]
            for name in [name for name in section if str(name) == one["ctx"]["name"]]:
                del section[name]


def _line_number(node: yaml.Node | None, text: str) -> int:
    """The line of the setting that `text` begins with, or of the section where it is missing."""
    path = _PATH.match(text)
    line = 1
    for part in _PART.finditer(path[0] if path is not None else ""):
        index, name = part.groups()
        if isinstance(node, yaml.MappingNode) and name is not None:
            found: Sequence[tuple[yaml.Node, yaml.Node]] = [pair for pair in node.value if pair[0].value == name]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and index is not None and int(index) < len(node.value):
            node = node.value[int(index)]
            line = node.start_mark.line + 1
        else:
            break
    return line
