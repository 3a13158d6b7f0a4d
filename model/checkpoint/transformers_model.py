"""A folder without a native decoder: checks if transformers' modules can serve it, and loads their weights.

The model is built on the meta device, where nothing has memory, and one forward pass is traced there: what its modules
hand to the attention, layer by layer, says what its KV is made of. What our attention would compute otherwise is
refused by name, and a dry run over the loaded weights, against transformers' own attention, has the last word.

Tensors go by the names that transformers' modules have for them, as its own conversion mapping says. Most are a tensor
of a file under another name, of which any slice is read alone. What the mapping joins, splits or transposes is read
whole.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import xxhash
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D

from twostroke.model.architectures.families.family import MAX_EXPERTS, MAX_LAYERS, shown
from twostroke.model.architectures.transformers_decoder import (
    ATTENTION,
    AttentionCall,
    EmbeddingModule,
    HeadModule,
    ProjectionModule,
    TransformersDecoder,
    replace_norms,
    trace,
)
from twostroke.model.backend import Backend, LoadOptions
from twostroke.model.batch import Drawing, StepInput, make_layouts
from twostroke.model.cache.kv_cache import make_kv_cache
from twostroke.model.checkpoint.config_file import CONFIG_FILE, read_config_file
from twostroke.model.checkpoint.tensor_file import WHOLE, equal_tensors
from twostroke.model.checkpoint.weights import DTYPES, has_weights, open_tensors
from twostroke.model.config import ModelShape, Quantization
from twostroke.model.costs.sizes import (
    check_contexts,
    check_size,
    head_quantization,
    held_form,
    tensor_bytes,
    weights_as,
)
from twostroke.model.parallel.form import ONE_RANK, ParallelForm, Shard
from twostroke.model.parallel.tensor_parallel import TensorParallel
from twostroke.model.step import SequenceStep
from twostroke.protocol.errors import ConfigError


def read_transformers_config(raw: dict[str, Any], source: str) -> Any:
    """The configuration as transformers understands it. Raises ConfigError for what is refused by what it says."""

    def refused(field: str, why: str) -> ConfigError:
        return ConfigError(f"{source}: {field}: {why}")

    for field, most in _MAX_OF.items():
        if isinstance(count := raw.get(field), int) and count > most:
            raise refused(field, f"{shown(count)} is more than any model has: at most {most} are taken")
    kind, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise refused("auto_map", "its own code would have to be run (`trust_remote_code`), which we never do")
        named = f"{architectures} of model_type {kind!r}"
        raise refused("architectures", f"{named} is neither a family of ours nor known to transformers {_VERSION}")
    if raw.get("quantization_config"):
        raise refused(
            "quantization_config",
            "quantised checkpoints are for families of ours alone: take it unquantised, and set model.quantization",
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(raw)
    except Exception as error:  # its validation has classes of its own
        raise refused("model_type", f"transformers can't read this {kind}: {first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise refused("architectures", f"{architectures} has an encoder; only decoders are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused("architectures", f"{architectures} is no decoder that writes text, as transformers knows it")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if architectures and model_class.__name__ not in architectures:
        raise refused("architectures", f"{architectures} is not the decoder of {kind!r}, {model_class.__name__}")
    if getattr(model_class, "_is_stateful", False):
        raise refused("model_type", f"{kind!r} keeps a state beside KV (state-space or linear attention layers)")
    if getattr(config, "num_kv_shared_layers", 0):
        raise refused("num_kv_shared_layers", "layers that use another one's KV are not supported")
    if getattr(config, "attention_chunk_size", None):
        raise refused("attention_chunk_size", "attention within chunks is not supported")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        if (scaling := rope.get("rope_type")) in ("longrope", "dynamic"):
            raise refused("rope_parameters", f"{scaling} changes over within a request, and with the batch")
    return config


_MAX_OF = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), MAX_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), MAX_EXPERTS),
}
_VERSION = transformers.__version__
# Tensors that attention may be handed and needs not: ours takes positions and masks from the layout.
_IGNORED_TENSORS = {"position_ids", "cache_position"}


def check_calls(calls: Sequence[AttentionCall], config: Any, error: Any) -> None:
    """Check that our attention computes what these calls ask for. Raises the result of `error` where it can't."""
    layers = config.num_hidden_layers
    if len(calls) != layers or len({call.module for call in calls}) != layers:
        what = f"{layers} layers called the attention {len(calls)} times: some keep no KV, or something else"
        raise error(what, asks_for_ours=bool(calls))
    first = calls[0]
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = (
        getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"] * layers
    )
    for index, call in enumerate(calls):
        if kinds[index] == "sliding_attention" and not call.window:
            raise error(f"layer {index} has a window that its attention does not get")
        if call.key.shape != first.key.shape or call.query.shape != first.query.shape:
            raise error(f"the KV of layer {index} has another shape than the first one's")
        if call.value.shape[:3] != call.key.shape[:3] or call.value.shape[-1] > call.key.shape[-1]:
            raise error(f"layer {index} has values of shape {list(call.value.shape[1:])}")
        if call.query.shape[-1] != call.key.shape[-1] or call.query.shape[1] % call.key.shape[1]:
            raise error(f"layer {index} has {list(call.query.shape[1:])} queries over {list(call.key.shape[1:])} keys")
        if call.query.shape[-1] % 2:
            raise error(f"heads of {call.query.shape[-1]} dimensions, an odd number, are not supported")
        if call.others.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
            raise error(f"layer {index} attends to tokens that come later")
        for name, value in call.others.items():
            if isinstance(value, Tensor) and name not in _IGNORED_TENSORS:
                raise error(f"the attention of layer {index} takes {name!r}, which ours does not know")


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(attn|attention)\.(masked_)?bias$")
"""Tensors of older files that are computed today: transformers ignores them, too. The last are masks."""


@dataclass(frozen=True)
class _Conversion:
    """A conversion that makes some of a model's tensors from tensors of the files."""

    converter: Any
    target: str  # the first of what it makes
    sources: list[tuple[str, str]]  # (name in the files, pattern of the converter)

    def run(self, tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Return the model's tensors, by its names, made of the files' `tensors`."""
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, lambda tensor=tensors[name]: tensor)
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class NamedTensors:
    """The tensors of a model of transformers in a folder's files.

    Raises ConfigError naming file and tensor as Checkpoint does: pickles only, a missing shard, a missing, unknown or
    misshapen tensor, one of another type than bf16, fp16 or fp32.
    """

    def __init__(self, folder: Path, model: Any):
        """`model` is on the meta device, uncut; tensors that it ties to others need not be there."""
        paths, self._files = open_tensors(folder)
        self._model = model
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._renamed: dict[str, str] = {}
        self._converted: dict[str, _Conversion] = {}
        self._assign(folder, paths)
        for tied, source in model.all_tied_weights_keys.items():
            if source not in self._renamed and source not in self._converted and tied in self._renamed:
                self._renamed[source] = self._renamed[tied]
        self._check(folder, paths)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in the files of a model's tensor: of the first one, where it is made of several."""
        source = self._renamed[name] if name in self._renamed else self._converted[name].sources[0][0]
        return DTYPES[self._files[source].dtype(source)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a model's tensor."""
        return self._shapes[name]

    def tensor(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        """A tensor of the model in the files' dtype: a view where it is one of the files'. `columns` are of weights."""
        if name in self._renamed:
            source = self._renamed[name]
            return self._files[source].tensor(source, rows, columns)
        conversion = self._converted[name]
        sources = {source: self._files[source].tensor(source, WHOLE, WHOLE) for source, _ in conversion.sources}
        whole = conversion.run(sources, self._model)[name]
        return whole[rows, columns] if whole.dim() == 2 else whole[rows]

    def differ(self, name: str, other: str) -> bool:
        """Return whether both are in the files, and hold different numbers."""
        if not {name, other} <= self._renamed.keys():
            return False
        first, second = self._renamed[name], self._renamed[other]
        return first != second and not equal_tensors(self._files[first], first, self._files[second], second)

    def contents(self) -> Iterator[tuple[str, memoryview]]:
        """Yield name, type and shape of each tensor in use, with its bytes, in a fixed order."""
        converted = {source for conversion in self._converted.values() for source, _ in conversion.sources}
        for name in sorted({*self._renamed.values(), *converted}):
            file = self._files[name]
            yield f"{name} {file.dtype(name)} {file.shape(name)}", file.content(name)

    def _assign(self, folder: Path, paths: Mapping[str, Path]) -> None:
        """Assign tensors as transformers.core_model_loading.convert_and_load_state_dict_in_model does, without loading
        any."""
        model, wanted = self._model, self._model.state_dict()
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        ignored = re.compile("|".join((*_IGNORED, *sorted(model._keys_to_ignore_on_load_unexpected or ()))))
        conversions: dict[str, _Conversion] = {}
        for name in sorted(self._files, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
            if target not in wanted and name in wanted:
                target, pattern = rename_source_key(name, [], [], model.base_model_prefix, wanted)
            if target in wanted and pattern is not None:
                new = _Conversion(of_pattern[pattern], target, [])
                conversions.setdefault(target, new).sources.append((name, pattern))
            elif target in wanted:
                self._renamed[target] = name
            elif not ignored.search(name):
                raise ConfigError(f"{paths[name]}: tensor {name} is none of {type(model).__name__}'s in transformers")
        for conversion in conversions.values():
            empty = {source: self._empty(source) for source, _ in conversion.sources}
            try:
                made = conversion.run(empty, model)
            except Exception as error:  # whatever transformers' operations raise
                raise ConfigError(f"{folder}: {conversion.target} can't be made of its tensors: {error}") from error
            for target, tensor in made.items():
                self._converted[target] = conversion
                if target in wanted and tensor.shape != wanted[target].shape:
                    raise _misshapen(folder, target, tuple(tensor.shape), self._shapes[target])

    def _empty(self, source: str) -> Tensor:
        return torch.empty(self._files[source].shape(source), device="meta")

    def _check(self, folder: Path, paths: Mapping[str, Path]) -> None:
        for target, shape in self._shapes.items():
            if target in self._renamed:
                source = self._renamed[target]
                path, file = paths[source], self._files[source]
                if file.shape(source) != shape:
                    raise _misshapen(path, source, file.shape(source), shape)
            elif target not in self._converted and target not in self._model.all_tied_weights_keys:
                raise ConfigError(f"{folder}: tensor {target} is missing")
        converted = {source for conversion in self._converted.values() for source, _ in conversion.sources}
        for name in sorted({*self._renamed.values(), *converted}):
            if (dtype := self._files[name].dtype(name)) not in DTYPES:
                raise ConfigError(f"{paths[name]}: tensor {name} is {dtype}, only {', '.join(DTYPES)} are supported")


def _misshapen(where: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> ConfigError:
    return ConfigError(f"{where}: tensor {name} has shape {list(found)}, config.json asks for {list(expected)}")


TRACED_TOKENS = 5
DRY_RUN_TOKENS = (20, 16, 1)
"""Lengths of the dry run's steps of one sequence: a chunk, a chunk over a context, a decode."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest difference of logits from those of transformers' own attention, relative to their spread: another scale, mask
or bias exceeds half of it."""

Style = Literal["by rows", "by columns", "gathered", "split", "halves by rows", "summed"]
_STYLES: dict[str, Style | None] = {
    "colwise": "by rows",
    "rowwise": "by columns",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "rowwise_split_input": "split",
    "rowwise_rep": "split",
    "replicated_with_grad_allreduce": None,
    "replicate": None,
}
"""Our division of a projection, by its name in transformers' plan of tensor parallelism: by rows or columns of its
weight, with the output gathered or the input split where all ranks hold it whole."""
_EXPERTS = "moe_tp_experts"
_OF_EXPERTS: dict[str, Style] = {"packed_colwise": "halves by rows", "rowwise": "by columns"}
"""Division of the tensors of a layer's experts [experts, out, in], gate and up in one: each rank has a part of each
expert, and their outputs are summed."""


class TransformersModel:
    """Implements ServedModel. Raises ConfigError for what can't be served, naming file and field where there is one."""

    way: Literal["transformers"] = "transformers"

    def __init__(self, folder: Path):
        self._folder = folder
        self._raw = read_config_file(folder)
        self._source = str(folder / CONFIG_FILE)
        self._config = read_transformers_config(self._raw, self._source)
        self._model = self._build(torch.float32)
        self._calls = self._trace(self._model)
        self._head, self._embedding = self._check_ends()
        if self.is_tied and has_weights(folder) and self.tensors.differ(*self._weights_of_ends):
            # A head of its own was trained, and is kept, as transformers does.
            self._config.get_text_config(decoder=True).tie_word_embeddings = False
            self._config.tie_word_embeddings = False
            del self.tensors
            self._model = self._build(torch.float32)
            self._calls = self._trace(self._model)
            if self.is_tied:
                raise self._error(f"{self._head}.weight differs from the embedding that transformers ties it to")
        self.family: str = type(self._model).__name__
        self.shape = self._shape()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token is computed with. Tensors of experts, whose first dimension counts experts, count
        by the number chosen."""
        chosen = getattr(self._config, "num_experts_per_tok", None)
        total = 0
        for name, parameter in self._model.named_parameters():
            of_experts = chosen is not None and ".experts." in name and parameter.dim() == 3
            total += parameter.numel() * chosen // parameter.shape[0] if of_experts else parameter.numel()
        return total

    @cached_property
    def tensors(self) -> NamedTensors:
        """Tensors of the folder. Raises ConfigError."""
        return NamedTensors(self._folder, self._model)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the checkpoint's embedding. Raises ConfigError."""
        return self.tensors.dtype(f"{self._embedding}.weight")

    def weight_bytes(
        self,
        dtype: torch.dtype,
        quantization: Quantization,
        parallel: ParallelForm = ONE_RANK,
    ) -> int:
        """Implement ServedModel.weight_bytes. Each rank holds whole what transformers' plan does not divide."""
        ranks = parallel.tensor_ranks
        model, styles = self._of_ranks(ranks)
        ends = self._head, self._embedding
        has_plain_table = type(model.get_submodule(self._embedding)) is nn.Embedding  # or it is not cut
        total = 0
        for name, tensor in model.named_parameters():
            owner, _, kind = name.rpartition(".")
            module, shape = model.get_submodule(owner), list(tensor.shape)
            held: Quantization = "none"
            if owner in ends:
                is_head = owner == self._head or self.is_tied
                if has_plain_table or not (owner == self._embedding or self.is_tied):
                    shape[0] = -(-shape[0] // ranks)
                    held = head_quantization(quantization) if is_head and kind == "weight" else "none"
            elif _is_projection(module):
                held = quantization if kind == "weight" else "none"
                if styles.get(owner) == "gathered":
                    shape[0] //= ranks
                elif styles.get(owner) == "split" and kind == "weight":
                    shape[1] //= ranks
            total += tensor_bytes(tuple(shape), dtype.itemsize, held_form(held, None))
        return total

    def weights_as(self, quantization: Quantization) -> str | None:
        """Implement ServedModel.weights_as."""
        return weights_as(quantization, {})

    def check_ranks(self, parallel: ParallelForm, block_size: int) -> None:
        """Implement ServedModel.check_ranks; stages and whole experts are refused."""
        if parallel.has_stages:
            raise ConfigError(
                f"pipeline_parallel: {self.family} is computed by transformers, whose layers stages can't share: use "
                "1, and tensor_parallel where transformers has a plan for it"
            )
        if parallel.has_whole_experts:
            raise ConfigError("expert_parallel: transformers' plan says how ranks share this model: leave it out")
        check_size(self.shape, parallel.tensor_ranks)
        self._of_ranks(parallel.tensor_ranks)
        check_contexts(self.shape, parallel, block_size)

    def digest(self) -> str:
        """16 hex digits, as Checkpoint.digest: of the package that computes, config.json, and every tensor used."""
        package = f"{transformers.__name__} {transformers.__version__}"
        sha = hashlib.sha256(f"{package} {json.dumps(self._raw, sort_keys=True)}".encode())
        for name, content in self.tensors.contents():
            sha.update(name.encode() + xxhash.xxh3_128_digest(content))
        return sha.hexdigest()[:16]

    def decoder(self, options: LoadOptions, backend: Backend, parallel: TensorParallel) -> TransformersDecoder:
        """Implement ServedModel.decoder."""
        model = self._build(options.dtype)
        styles = self._cut(model, parallel.shard)
        calls = self._trace(model)
        _Loading(self, model, styles, options, backend, parallel).run(self._head, self._embedding)
        replace_norms(model, backend)
        attending = {name for name, module in model.named_modules() if module is calls[0].module}
        takes_parts = any(style == "split" and name.rpartition(".")[0] in attending for name, style in styles.items())
        decoder = TransformersDecoder(model, calls, self.shape, options, backend, parallel, sums_heads=not takes_parts)
        self._dry_run(decoder, options, parallel.shard)
        return decoder

    @property
    def _weights_of_ends(self) -> tuple[str, str]:
        return f"{self._head}.weight", f"{self._embedding}.weight"

    @property
    def is_tied(self) -> bool:
        """True if the LM head is the embedding."""
        return bool(self._model.all_tied_weights_keys)

    def _build(self, dtype: torch.dtype) -> Any:
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self._config, attn_implementation=ATTENTION, dtype=dtype)
        except Exception as error:  # whatever a family's own code raises
            is_known = not (isinstance(error, KeyError) and ATTENTION in error.args)
            raise self._error(f"transformers can't build it: {first_line(error)}", asks_for_ours=is_known) from error
        model.config.pad_token_id = None  # or some look for it in every step's tokens, and warn
        return model.eval().requires_grad_(False)

    def _trace(self, model: Any) -> list[AttentionCall]:
        calls: list[AttentionCall] = []
        try:
            trace(model, TRACED_TOKENS, calls.append)
        except Exception as error:
            what = f"its modules don't run over a flat batch without a cache: {first_line(error)}"
            raise self._error(what, asks_for_ours=bool(calls)) from error
        check_calls(calls, self._config, self._error)
        return calls

    def _error(self, what: str, *, asks_for_ours: bool = True) -> ConfigError:
        """`asks_for_ours`: its attention did ask which one it is to be."""
        family = type(self._config).__name__.removesuffix("Config")
        is_made_for_it = asks_for_ours or MODEL_FOR_CAUSAL_LM_MAPPING[type(self._config)].is_backend_compatible()
        why = "" if is_made_for_it else "; its attention is not made to be replaced, as where it has biases (ALiBi)"
        return ConfigError(f"{self._source}: {family} can't be served: {what}{why}")

    def _check_ends(self) -> tuple[str, str]:
        """The names of LM head and token embedding."""
        model = self._model
        names = {module: name for name, module in model.named_modules()}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
            raise self._error(f"its LM head is {type(head).__name__}, its embedding {type(embedding).__name__}")
        tied = dict(model.all_tied_weights_keys)
        if tied and tied != {f"{names[head]}.weight": f"{names[embedding]}.weight"}:
            raise self._error(f"it ties {', '.join(sorted(tied))}, not its LM head to its embedding alone")
        return names[head], names[embedding]

    def _shape(self) -> ModelShape:
        config, model, calls = self._config, self._model, self._calls
        max_position = getattr(config, "max_position_embeddings", None)
        if not isinstance(max_position, int) or max_position < 1:
            raise self._error("max_position_embeddings is missing: how long may a context be?")
        head = model.get_submodule(self._head)
        projections = [
            module for name, module in model.named_modules() if _is_projection(module) and name != self._head
        ]
        width = getattr(config, "intermediate_size", None)
        windows = tuple(call.window if call.window < max_position else 0 for call in calls)
        return ModelShape(
            vocab_size=head.out_features,
            hidden_size=head.in_features,
            intermediate_size=max(
                [width if isinstance(width, int) else 1, *(max(_size(each)) for each in projections)]
            ),
            num_layers=len(calls),
            num_heads=calls[0].query.shape[1],
            num_kv_heads=calls[0].key.shape[1],
            head_dim=calls[0].query.shape[-1],
            max_position=max_position,
            windows=windows if any(windows) else (),
        )

    def _of_ranks(self, size: int) -> tuple[Any, dict[str, Style]]:
        """Return the model of the first of `size` ranks, as `_cut` leaves it, without weights."""
        if size == 1:
            return self._model, {}
        model = self._build(torch.float32)
        return model, self._cut(model, Shard(0, size))

    def _cut(self, model: Any, shard: Shard) -> dict[str, Style]:
        """Leave this rank's part of each projection, but for those whose inputs or results are whole, and say which
        part that is. Raises ConfigError."""
        if shard.size == 1:
            return {}
        plan = dict(model.tp_plan or {})
        styles: dict[str, Style] = {}
        for name, module in model.named_modules():
            rule = plan.get(_with_any_layer(name))
            if rule is None or name in (self._head, self._embedding):
                continue
            if rule == _EXPERTS:
                styles[name] = "summed"
            elif rule not in _STYLES or not (isinstance(module, nn.Linear) or _STYLES[rule] is None):
                raise self._not_cut(name, rule)
            elif (style := _STYLES[rule]) is not None:
                styles[name] = style
                self._cut_projection(name, module, style, shard)
        for name, parameter in list(model.named_parameters()):
            owner, _, kind = name.rpartition(".")
            rule = plan.get(_with_any_layer(name))
            if rule is None or _STYLES.get(rule, "by rows") is None:
                continue
            if styles.get(owner) != "summed" or rule not in _OF_EXPERTS or parameter.dim() != 3:
                raise self._not_cut(name, rule)
            styles[name] = _OF_EXPERTS[rule]
            _check_even(name, parameter.shape[1] // 2 if rule == "packed_colwise" else parameter.shape[2], shard)
            cut = nn.Parameter(_part_of_experts(parameter, styles[name], shard), requires_grad=False)
            setattr(model.get_submodule(owner), kind, cut)
        if not styles:
            raise ConfigError(f"tensor_parallel: transformers has no plan for {self.family}: use 1")
        self._trace(model)
        return styles

    def _cut_projection(self, name: str, module: nn.Linear, style: Style, shard: Shard) -> None:
        outputs, inputs = _size(module)
        is_by_rows = style in ("by rows", "gathered")
        _check_even(name, outputs if is_by_rows else inputs, shard)
        if style == "by rows":
            module.weight = nn.Parameter(module.weight[shard.part(outputs)], requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias[shard.part(outputs)], requires_grad=False)
        elif style == "by columns":
            module.weight = nn.Parameter(module.weight[:, shard.part(inputs)], requires_grad=False)

    def _not_cut(self, name: str, rule: str) -> ConfigError:
        return ConfigError(
            f"tensor_parallel: transformers' plan cuts {self.family}'s {_with_any_layer(name)} by {rule!r}, which is "
            "not supported: use 1"
        )

    def _dry_run(self, decoder: TransformersDecoder, options: LoadOptions, shard: Shard) -> None:
        """Raises ConfigError where our way gives other logits than transformers' own attention."""
        dtype, device = options.dtype, options.device
        count = min(sum(DRY_RUN_TOKENS), self.shape.max_position)
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(self.shape.vocab_size, (count,), generator=generator)
        block_size = 16
        groups = self.shape.kv_groups
        blocks = list(range(-(-count // block_size) * groups.count))[::-1]
        cache = make_kv_cache(
            self.shape,
            num_blocks=len(blocks),
            block_size=block_size,
            dtype=dtype,
            device=device,
            model_digest="",
            parallel=ParallelForm(shard.size),
            rank=shard.rank,
        )
        ours: list[Tensor] = []
        try:
            with torch.inference_mode():
                theirs = decoder.whole_logits(token_ids.to(device))
                start = 0
                for length in DRY_RUN_TOKENS:
                    tokens = token_ids[start : min(start + length, count)]
                    if not len(tokens):
                        break
                    step = SequenceStep(tokens.tolist(), start, blocks, None)
                    layouts = make_layouts([step], block_size, device, groups)
                    rows = torch.arange(len(tokens), device=device)
                    drawing = Drawing(rows, rows * 0)
                    logits = decoder.forward(StepInput(tokens.to(device), layouts, cache.tensors, drawing))
                    assert logits is not None  # all rows draw
                    ours.append(logits)
                    start += len(tokens)
                difference = (torch.cat(ours) - theirs).norm() / (theirs - theirs.mean()).norm()
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._error(f"a dry run failed: {first_line(error)}") from error
        finally:
            cache.close()
        if not difference <= TOLERANCE[dtype]:
            raise self._error(
                f"in a dry run its logits were {difference:.2g} of their spread away from those of transformers' own "
                "attention: it mixes tokens in a way that ours does not"
            )


class _Loading:
    """Puts loaded weights, and our modules, into a model on the meta device that is cut for one rank."""

    def __init__(
        self,
        found: TransformersModel,
        model: Any,
        styles: dict[str, Style],
        options: LoadOptions,
        backend: Backend,
        parallel: TensorParallel,
    ):
        self._tensors, self._is_tied = found.tensors, found.is_tied
        self._model = model
        self._styles = styles
        self._dtype, self._device, self._quantization = options.dtype, options.device, options.quantization
        self._backend = backend
        self._parallel = parallel
        self._in_fp32 = [re.escape(name).replace(r"\*", r"\d+") for name in model._get_dtype_plan(options.dtype)]

    def run(self, head: str, embedding: str) -> None:
        self._load_ends(head, embedding)
        for name, module in list(self._model.named_modules()):
            if name in (head, embedding):
                continue
            if _is_projection(module):
                self._model.set_submodule(name, self._projection(name, module))
                continue
            for kind, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and kind not in module._non_persistent_buffers_set:
                    self._keep(module, f"{name}.{kind}" if name else kind, kind)
        for name, style in self._styles.items():
            if style == "summed":
                self._model.get_submodule(name).register_forward_hook(
                    lambda module, given, made: self._parallel.all_reduce(made)
                )
        self._fill_buffers()

    def _load_ends(self, head: str, embedding: str) -> None:
        model, shard = self._model, self._parallel.shard
        before = model.get_submodule(head)
        rows = shard.vocabulary(before.out_features)
        table: nn.Module = model.get_submodule(embedding)
        name = f"{embedding if self._is_tied else head}.weight"
        bias = None if before.bias is None else self._read(f"{head}.bias", rows)
        if self._is_tied and type(table) is not nn.Embedding:  # which does more than look up: they share its weight
            self._keep(table, f"{embedding}.weight", "weight")
            before.weight = table.weight
            if bias is not None:
                self._keep(before, f"{head}.bias", "bias")
            return
        linear = self._backend.make_linear(
            self._read(name, rows), bias, head_quantization(self._quantization), self._dtype
        )
        model.set_submodule(head, HeadModule(linear))
        if type(table) is not nn.Embedding:
            self._keep(table, f"{embedding}.weight", "weight")
            return
        shown = linear if self._is_tied else self._read(f"{embedding}.weight", rows)
        module = EmbeddingModule(shown, rows.start, self._dtype, self._backend, self._parallel)
        model.set_submodule(embedding, module)

    def _projection(self, name: str, module: nn.Module) -> ProjectionModule:
        style, shard = self._styles.get(name), self._parallel.shard
        rows = columns = WHOLE
        if style == "gathered" or style == "by rows":
            rows = shard.part(self._tensor_size(name)[0])
        elif style is not None:
            columns = shard.part(self._tensor_size(name)[1])
        weight = self._read(f"{name}.weight", rows, columns)
        if isinstance(module, Conv1D):
            weight = weight.T.contiguous()
        sums = style in ("by columns", "split")
        has_bias = module.bias is not None and not (sums and shard.rank)  # it counts once among the summands
        bias = self._read(f"{name}.bias", rows) if has_bias else None
        linear = self._backend.make_linear(weight, bias, self._quantization, self._dtype)
        return ProjectionModule(linear, self._parallel, sums=sums, splits=style == "split", gathers=style == "gathered")

    def _tensor_size(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors.shape(f"{name}.weight"))

    def _read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        """A copy: a view would keep the whole file mapped."""
        return self._tensors.tensor(name, rows, columns).to(self._device, self._dtype, copy=True).contiguous()

    def _keep(self, module: nn.Module, name: str, kind: str) -> None:
        """A parameter or buffer of transformers' own code."""
        dtype = torch.float32 if any(re.search(each, name) for each in self._in_fp32) else self._dtype
        before = module._parameters.get(kind)
        tensor = self._tensors.tensor(name)
        if name in self._styles:
            tensor = _part_of_experts(tensor, self._styles[name], self._parallel.shard)
        if before is None:
            kept = tensor.to(self._device, copy=True)
            module._buffers[kind] = kept
        else:
            kept = nn.Parameter(tensor.to(self._device, dtype, copy=True).contiguous(), requires_grad=False)
            module._parameters[kind] = kept
        kept._is_hf_initialized = True  # type: ignore[attr-defined]

    def _fill_buffers(self) -> None:
        """Initialise the buffers that no file has, above all rotary frequencies, with transformers' own code."""
        model = self._model
        owners = set()
        for name, buffer in list(model.named_non_persistent_buffers()):
            owner, _, kind = name.rpartition(".")
            module = model.get_submodule(owner)
            fill = float("nan") if buffer.is_floating_point() else 0
            module._buffers[kind] = torch.full(buffer.shape, fill, dtype=buffer.dtype, device=self._device)
            owners.add(module)
        for module in model.modules():
            if module not in owners:
                module._is_hf_initialized = True
        model.initialize_weights()
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and buffer.isnan().any():
                raise ConfigError(f"transformers leaves {name} of {type(model).__name__} without values")


def _with_any_layer(name: str) -> str:
    """A module's or tensor's name as transformers' plans have it: `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _check_even(name: str, features: int, shard: Shard) -> None:
    if features % shard.size:
        raise ConfigError(
            f"tensor_parallel: {shard.size} ranks can't share the {features} features of {name} evenly: use fewer"
        )


def _part_of_experts(tensor: Tensor, style: Style, shard: Shard) -> Tensor:
    """[experts, out, in], one behind the other gate and up: this rank's."""
    if style == "by columns":
        return tensor[..., shard.part(tensor.shape[2])]
    return torch.cat([half[:, shard.part(half.shape[1])] for half in tensor.chunk(2, dim=1)], dim=1)


def _is_projection(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D)


def _size(module: Any) -> tuple[int, int]:
    """(out, in)."""
    return (module.nf, module.nx) if isinstance(module, Conv1D) else (module.out_features, module.in_features)
