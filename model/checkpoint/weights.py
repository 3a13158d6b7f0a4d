"""The tensors of a Hugging Face folder: found, checked against the config, and memory-mapped, not read.

Nothing here copies a tensor: `Checkpoint.tensor` is a view of the mapped file, whose pages the kernel may drop again.
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twostroke.model.checkpoint.config_file import read_json_object
from twostroke.model.checkpoint.gguf.format import FILE as GGUF_FILE
from twostroke.model.checkpoint.gguf.format import SUFFIX
from twostroke.model.checkpoint.packed_weights import NOT_READ, stored_experts, stored_weight
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.checkpoint.tensor_file import (
    WHOLE,
    ExpertNumber,
    ExpertTensor,
    RenamedTensor,
    StoredWeight,
    TensorFile,
    equal_tensors,
    text_names,
)
from twostroke.model.config import ModelConfig, Projection, WeightForm
from twostroke.model.costs.sizes import num_parameters
from twostroke.model.parameters import expected_shapes, expert_name
from twostroke.protocol.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STACK_ENDINGS = (
    *(("", ".weight"), ("_scale_inv", ".weight_scale_inv")),
    *(("_weight_scale", ".weight_scale"), ("_weight_scale_2", ".weight_scale_2")),
)
"""Endings of tensors of all experts, and of one expert's: weights, and the scales of those in FP8 and FP4."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class _SafetensorsFile:
    """Implements TensorFile. Raises ConfigError for a file that can't be read."""

    def __init__(self, path: Path):
        self._path = path
        try:
            self._file = cast(Any, safe_open(path, framework="pt", device="cpu"))  # comes without types
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} can't be read as safetensors: {error}") from error
        self._names = frozenset(self._file.keys())

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._file.get_slice(name).get_dtype())

    def tensor(self, name: str, rows: slice, columns: slice) -> Tensor:
        try:
            whole: Tensor = self._file.get_tensor(name)
            if whole.dim() == 2:
                return whole[rows, columns]
            return whole[rows] if whole.dim() else whole
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self._path}: tensor {name} can't be read: {error}") from error

    def stored_weight(self, name: str) -> StoredWeight | None:
        return None

    def content(self, name: str) -> memoryview:
        return self.tensor(name, WHOLE, WHOLE).contiguous().view(-1).view(torch.uint8).numpy().data


class Checkpoint:
    """The checked tensors of one folder.

    Raises ConfigError naming file and tensor for: pickle files only, a missing shard, a missing, unknown or misshapen
    tensor, a tensor of another type than bf16, fp16 or fp32 that is no part of a quantised weight, a damaged file.
    """

    def __init__(self, folder: Path, config: ModelConfig):
        self._folder = folder
        self._paths, self._files = open_tensors(folder)
        self._towers = self._take_text(config.spec.is_wrapped)
        experts = config.spec.layer.experts
        config = self._with_experts_apart(config)
        self._unstack_experts(config, experts is not None and experts.are_stacked and not experts.stacks_rows)
        self._dtypes: dict[str, torch.dtype] = {}
        self._stored: dict[str, StoredWeight] = {}
        self.config = self._config = config = self._with_ends(config)
        """Return the config, with a head of its own where the files have one."""
        self.shapes = expected_shapes(config)
        self._kv_scales = self._find_kv_scales()
        self._check()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the checkpoint's embedding. fp16 beside quantised weights counts as bf16: it loses nothing of them
        and has fast kernels everywhere."""
        found = self._dtypes[f"{self._config.spec.embedding}.weight"]
        return torch.bfloat16 if self._stored and found == torch.float16 else found

    @property
    def num_tower_tensors(self) -> int:
        """Number of tensors of the parts that see images, which nothing reads."""
        return len(self._towers)

    @property
    def forms(self) -> Mapping[str, WeightForm]:
        """Forms of the quantised weights, by name."""
        return {name: stored.form for name, stored in self._stored.items()}

    @property
    def num_parameters(self) -> int:
        return num_parameters(self._config)

    def tensor(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        """A view of the mapped file, in the checkpoint's dtype: what is sliced away is never read.

        `columns` are of weights; biases and norms have rows alone. Not for quantised weights.
        """
        return self._files[name].tensor(name, rows, columns)

    def weight(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor | QuantizedWeight:
        """Return a weight as `tensor` does, quantised or not; a quantised one is a copy.

        Raises ConfigError for columns of a weight whose inputs have an order of their own (GPTQ's `desc_act`).
        """
        if name not in self._stored:
            return self.tensor(name, rows, columns)
        found = self._stored[name].read(rows)
        if columns == WHOLE or columns == slice(0, found.values.shape[1]):
            return found
        if found.order is not None:
            raise ConfigError(
                f"{self._folder}: tensor {name} is quantised with desc_act, whose groups ranks can't share: set "
                "tensor_parallel: 1, or take a checkpoint without desc_act"
            )
        return found.columns(columns)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Return the divisors of a layer's keys and values for an FP8 cache: 1 where the checkpoint names none.

        Raises ConfigError for what is no positive number.
        """
        key, value = (
            self._scale(self._kv_scales[layer, kind]) if (layer, kind) in self._kv_scales else 1.0 for kind in "kv"
        )
        return key, value

    def digest(self) -> str:
        """16 hex digits of the config and of every tensor's name, type, shape and bytes, and of the scales of KV.

        Reads all of the weights, which loading does next anyway: a fine-tune that changed a few rows of one tensor is
        another model, whose KV must not be mixed with this one's.
        """
        sha = hashlib.sha256(repr(self._config).encode())
        for name, shape in sorted(self.shapes.items()):
            stored = self._stored.get(name)
            sha.update(f"{name} {self._dtypes[name] if stored is None else stored.form} {shape}".encode())
            for part in (name,) if stored is None else stored.tensors:
                sha.update(xxhash.xxh3_128_digest(self._files[part].content(part)))
        for name in self._kv_scales.values():
            scale = self._scale_or_none(name)
            if scale is None:
                sha.update(f"{name} {xxhash.xxh3_128_hexdigest(self._files[name].content(name))}".encode())
            elif scale != 1:
                sha.update(f"{name} {scale}".encode())
        return sha.hexdigest()[:16]

    def _scale(self, name: str) -> float:
        scale = self._scale_or_none(name)
        if scale is None:
            raise ConfigError(f"{self._paths[name]}: tensor {name} is to be one positive number")
        return scale

    def _scale_or_none(self, name: str) -> float | None:
        """None where the tensor is no positive number, which matters to KV in FP8 alone."""
        found = self._files[name].tensor(name, WHOLE, WHOLE)
        if self._files[name].dtype(name) not in DTYPES or found.numel() != 1 or not 0 < found.item() < math.inf:
            return None
        return float(found.item())

    def _find_kv_scales(self) -> dict[tuple[int, str], str]:
        """Return the tensors of KV scales by layer and kind, `k` or `v`, under the names of compressed-tensors and
        others."""
        spec = self._config.spec
        attention = spec.layer.k.name.rpartition(".")[0]
        return {
            (layer, kind): name
            for layer in range(self._config.num_layers)
            for kind in "kv"
            for name in (
                f"{self._config.prefixes(layer)[0]}{attention}.{part}_scale"
                for part in ("kv", kind, f"{kind}_proj.{kind}", f"attn.{kind}")
            )
            if name in self._files
        }

    def _take_text(self, is_wrapped: bool) -> frozenset[str]:
        """Give the text's tensors the names of text alone. Returns the others, where images' tensors may be there."""
        names = text_names(self._paths)
        towers = self._paths.keys() - names.values()
        self._files = {tower: self._files[tower] for tower in towers} | {
            name: self._files[there] if name == there else RenamedTensor(self._files[there], name, there)
            for name, there in names.items()
        }
        self._paths = {tower: self._paths[tower] for tower in towers} | {
            name: self._paths[there] for name, there in names.items()
        }
        return frozenset(towers) if is_wrapped or names.keys() != {*names.values()} else frozenset()

    def _with_experts_apart(self, config: ModelConfig) -> ModelConfig:
        """Name each expert's projections where the files have these in place of one tensor of all experts, which
        llm-compressor takes apart, or where that tensor is quantised, as by ModelOpt."""
        spec, experts = config.spec, config.spec.layer.experts
        if experts is None or experts.gate is None or not experts.are_stacked or experts.gate.has_bias:
            return config
        base = experts.gate.name.rpartition(".")[0]
        signs = f".{base}.0.gate_proj.", f".{base}.gate_up_proj_weight_scale"
        if not any(sign in name for name in self._files for sign in signs):
            return config
        gate, up, down = (Projection(f"{base}.*.{part}_proj") for part in ("gate", "up", "down"))
        apart = replace(experts, gate=gate, up=up, down=down, are_stacked=False)
        return replace(config, spec=replace(spec, layer=replace(spec.layer, experts=apart)))

    def _unstack_experts(self, config: ModelConfig, has_columns_first: bool) -> None:
        """Name each expert's projections where the files have one tensor of all experts, as transformers 5 keeps them:
        `gate_up_proj` [experts, 2 I, hidden] and `down_proj` [experts, hidden, I].

        `has_columns_first`: they are [experts, hidden, 2 I] and [experts, I, hidden], and so are their scales.
        """
        spec, experts = config.spec, config.spec.layer.experts
        if experts is None or experts.gate is None or experts.are_stacked:
            return
        base = experts.gate.name.partition("*")[0]
        stacks = (("gate_up_proj", (experts.gate, experts.up)), ("down_proj", (experts.down,)))
        for layer, (stack, parts), (ending_there, ending) in product(range(config.num_layers), stacks, _STACK_ENDINGS):
            prefix = f"{spec.layers}.{layer}."
            there = f"{prefix}{base}{stack}{ending_there}"
            if there not in self._files:
                continue
            count, shape = experts.routing.num_experts, self._files[there].shape(there)
            is_number = "_scale" in ending and shape in ((), (1,), (count,))
            if not is_number and len(shape) != 3:
                continue
            file, path = self._files.pop(there), self._paths.pop(there)
            for expert, (place, part) in product(range(count if is_number else shape[0]), enumerate(parts)):
                name = f"{prefix}{expert_name(part.name, expert)}{ending}"
                self._files[name] = (
                    ExpertNumber(file, there, expert, count)
                    if is_number
                    else ExpertTensor(file, there, expert, place, len(parts), has_columns_first)
                )
                self._paths[name] = path

    def _with_ends(self, config: ModelConfig) -> ModelConfig:
        """Tie embedding and LM head where the config does: they are one tensor by either name, or by both. A head that
        differs was trained, and is kept, as transformers does."""
        embedding, head = f"{config.spec.embedding}.weight", f"{config.spec.lm_head}.weight"
        if not config.tie_word_embeddings or head not in self._files:
            return config
        if embedding not in self._files:
            self._files[embedding] = RenamedTensor(self._files.pop(head), embedding, head)
            self._paths[embedding] = self._paths.pop(head)
            return config
        are_equal = equal_tensors(self._files[embedding], embedding, self._files[head], head)
        return config if are_equal else replace(config, tie_word_embeddings=False)

    def _check(self) -> None:
        config, known = self._config, set(self.shapes)
        head, _ = config.prefixes(config.num_layers - 1)
        if config.has_mtp and not any(name.startswith(head) for name in self._files):
            raise ConfigError(
                f"speculation.method: mtp: {self._folder} has no MTP head, whose tensors would begin with {head}: "
                "set it to auto, or take a checkpoint with the head"
            )
        for name, shape in self.shapes.items():
            stored = self._find_stored(name, shape)
            if stored is not None:
                self._stored[name] = stored
                known.update(stored.tensors)
            else:
                self._check_tensor(name, shape)
        known.update(self._kv_scales.values())
        if config.tie_word_embeddings:
            known.add(f"{config.spec.lm_head}.weight")
        for name, path in self._paths.items():
            if name in known or name.endswith(".rotary_emb.inv_freq") or name.startswith(config.spec.ignored):
                continue
            if name in self._towers:
                continue
            if name.endswith(NOT_READ) or (self._stored and self._is_empty_bias(name)):
                continue
            raise ConfigError(
                f"{path}: tensor {name} is none of a {config.spec.family} decoder as config.json describes it"
            )

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._files:
            raise ConfigError(f"{self._folder}: tensor {name} is missing")
        path, found, dtype = self._paths[name], self._files[name].shape(name), self._files[name].dtype(name)
        if found != shape:
            raise ConfigError(f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
        if dtype not in DTYPES:
            raise ConfigError(f"{path}: tensor {name} is {dtype}, only {', '.join(DTYPES)} are supported")
        self._dtypes[name] = DTYPES[dtype]

    def _find_stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight | None:
        """None for what is not quantised, whatever quantization_config says: its tensors say it themselves."""
        file = self._files.get(name)
        if file is not None and (found := file.stored_weight(name)) is not None:
            self._check_tensor(name, shape)
            return found
        config = self._config
        is_table = name == f"{config.spec.embedding}.weight"
        if config.stored is None or is_table or (file is not None and file.dtype(name) in DTYPES):
            return None
        if config.stored.method == "mxfp4":
            return stored_experts(name, shape, self._files, str(self._folder)) if len(shape) == 3 else None
        if len(shape) != 2:
            return None
        form = config.stored.of_module(config.spec.names_in_files(name.removesuffix(".weight"))) or config.stored
        return stored_weight(form, name, (shape[0], shape[1]), self._files, str(self._folder))

    def _is_empty_bias(self, name: str) -> bool:
        """Some writers of GPTQ give every projection a bias, of zeros."""
        return name.endswith(".bias") and not self._files[name].tensor(name, WHOLE, WHOLE).any()


def has_weights(folder: Path) -> bool:
    """Return True if the folder has weights, loadable or not: of a hub's model only its configuration may be here."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", f"*{SUFFIX}", *_PICKLES))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index, whole = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.exists():
        files = _indexed_files(index)
        if not whole.exists():  # an index beside the whole model's file is of an older copy, whose shards may be gone
            return _all_there(files, index)
    for single in (whole, folder / GGUF_FILE):
        if single.exists():
            return dict.fromkeys(open_file(single).names(), single)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{folder / pickles[0]} is a pickle file, which can run code when it is read: convert it to safetensors"
        )
    ggufs = sorted(folder.glob(f"*{SUFFIX}"))
    instead = f": serve {ggufs[0]} itself" if ggufs else ""
    raise ConfigError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{instead}")


def _indexed_files(index: Path) -> dict[str, Path]:
    weight_map = read_json_object(index).get("weight_map")
    if weight_map is None:
        raise ConfigError(f"{index}: weight_map is missing")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map: expected a JSON object of tensor and file names")
    files: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{index}: weight_map: {name}: {file!r} is no safetensors file of this folder")
        files[name] = index.parent / file
    return files


def _all_there(files: dict[str, Path], index: Path) -> dict[str, Path]:
    for path in sorted(set(files.values())):
        if not path.exists():
            raise ConfigError(f"{path} is missing: a shard that {index} names")
    return files


def open_tensors(folder: Path) -> tuple[dict[str, Path], dict[str, TensorFile]]:
    """Return the path and the opened file of each tensor. Raises ConfigError for one that an index promises in vain."""
    paths = tensor_files(folder)
    opened = {path: open_file(path) for path in sorted(set(paths.values()))}
    for name, path in paths.items():
        if name not in opened[path].names():
            raise ConfigError(f"{path}: tensor {name} is missing, though {folder / INDEX_FILE} names it")
    return paths, {name: opened[path] for name, path in paths.items()}


def open_file(path: Path) -> TensorFile:
    if not path.is_file():  # a FIFO would be waited for
        raise ConfigError(f"{path} is no regular file")
    if path.name != GGUF_FILE:
        return _SafetensorsFile(path)
    from twostroke.model.checkpoint.gguf.file import GgufFile  # imports `gguf`, which takes a while

    return GgufFile(path)
