"""The tensors of a folder by the names that transformers' modules have for them, as its own conversion mapping says.

Most are a tensor of a file under another name, of which any slice is read alone. What the mapping joins, splits or
transposes is read whole.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from twostroke.model.checkpoint.tensor_file import WHOLE, equal_tensors
from twostroke.model.checkpoint.weights import DTYPES, open_tensors
from twostroke.protocol.errors import ConfigError

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
