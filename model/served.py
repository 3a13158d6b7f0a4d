"""A model's folder as an engine sees it, whichever way it is served: by a decoder of ours, or through transformers."""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import torch

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.backend import Backend, LoadOptions
from twostroke.model.batch import StepDecoder
from twostroke.model.checkpoint.config_file import is_native, load_model_config, read_config_file
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.weights import Checkpoint, has_weights
from twostroke.model.config import ModelShape, Quantization, WeightForm
from twostroke.model.costs.sizes import (
    check_contexts,
    check_size,
    check_stages,
    num_active_parameters,
    num_parameters,
    stored_forms,
    weight_bytes,
    weights_as,
)
from twostroke.model.parallel.form import ONE_RANK, ParallelForm
from twostroke.model.parallel.tensor_parallel import ContextParts, TensorParallel
from twostroke.protocol.errors import ConfigError

Way = Literal["native", "transformers"]

_log = logging.getLogger(__name__)


class ServedModel(Protocol):
    """A model folder that can be served. Tensors are loaded only when needed; all methods raise ConfigError."""

    @property
    def way(self) -> Way: ...

    @property
    def family(self) -> str:
        """Name of the family, for people."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def num_parameters(self) -> int:
        """Tied ones once."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the checkpoint, whose tensors are checked."""

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token is computed with."""

    def weight_bytes(
        self,
        dtype: torch.dtype,
        quantization: Quantization,
        parallel: ParallelForm = ONE_RANK,
    ) -> int:
        """Return the bytes of the rank with the most weights, once the model is loaded in `dtype`."""

    def weights_as(self, quantization: Quantization) -> str | None:
        """Describe the form of quantised weights in words; None: they are as all others."""

    def check_ranks(self, parallel: ParallelForm, block_size: int) -> None:
        """Raises ConfigError where the ranks can't divide the model, or blocks of so many tokens, in this form."""

    def digest(self) -> str:
        """16 hex digits of what KV depends on: config and weights, all of which it reads."""

    def decoder(self, options: LoadOptions, backend: Backend, parallel: TensorParallel) -> StepDecoder:
        """Return one rank's decoder over loaded weights."""


def open_model(folder: Path, way: Way | None = None, *, has_mtp: bool = False) -> ServedModel:
    """Open a folder: with the native decoder if there is one and `way` allows it. Raises ConfigError.

    `has_mtp`: the checkpoint's MTP head is loaded, too.
    """
    if way == "native" or (way is None and is_native(read_config_file(folder))):
        return NativeModel(folder, has_mtp=has_mtp)
    if has_mtp:
        raise ConfigError("speculation.method: mtp is for natively served models, and this one is not: set it to auto")
    from twostroke.model.checkpoint.transformers_model import TransformersModel  # importing transformers takes seconds

    return TransformersModel(folder)


class NativeModel:
    """Implements ServedModel by model/architectures/decoder.py."""

    way: Literal["native"] = "native"

    def __init__(self, folder: Path, *, has_mtp: bool = False):
        """Read the folder's config. Raises ConfigError, also where `has_mtp` and the model has no MTP head."""
        self._folder = folder
        self.shape = load_model_config(folder)
        if has_mtp:
            self.shape = self.shape.with_mtp()
        self.family = self.shape.spec.family
        experts = self.shape.spec.layer.experts
        depends_on_files = self.shape.tie_word_embeddings or (experts is not None and experts.are_stacked)
        if depends_on_files and has_weights(folder):
            self.shape = self._checkpoint.config

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.shape)

    @property
    def num_active_parameters(self) -> int:
        return num_active_parameters(self.shape)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self._folder, self.shape)

    @property
    def _forms(self) -> Mapping[str, WeightForm]:
        """Forms of the quantised weights. Of a hub's model only its configuration may be here."""
        return self._checkpoint.forms if has_weights(self._folder) else stored_forms(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._checkpoint.dtype

    def weight_bytes(
        self,
        dtype: torch.dtype,
        quantization: Quantization,
        parallel: ParallelForm = ONE_RANK,
    ) -> int:
        return weight_bytes(self.shape, dtype.itemsize, quantization, self._forms, parallel)

    def weights_as(self, quantization: Quantization) -> str | None:
        return weights_as(quantization, self._forms)

    def check_ranks(self, parallel: ParallelForm, block_size: int) -> None:
        check_size(self.shape, parallel.tensor_ranks, parallel.has_whole_experts)
        check_stages(self.shape, parallel.stages)
        check_contexts(self.shape, parallel, block_size)

    def digest(self) -> str:
        return self._checkpoint.digest()

    def decoder(self, options: LoadOptions, backend: Backend, parallel: TensorParallel) -> Decoder:
        parts = ContextParts(parallel) if options.shares_contexts else None
        place = parallel.shard, parallel.stage, parts
        if (towers := self._checkpoint.num_tower_tensors) and parallel.shard.rank == 0 and parallel.stage.is_first:
            _log.info("serving %s: the %d tensors for images are not loaded", self.family, towers)
        weights = load_decoder_weights(self._checkpoint, self.shape, options, backend, *place)
        return Decoder(self.shape, weights, backend, parallel)
