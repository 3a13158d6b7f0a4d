"""Quantised weights of safetensors checkpoints, each of which is several tensors, read into `QuantizedWeight`.

Layouts, for a weight [out, in] in groups of g inputs:
- FP8: `weight` [out, in] and `weight_scale` (or `weight_scale_inv`, which multiplies likewise): one number, one a row,
  or one a block of rows and columns (DeepSeek-V3 technical report, section 3.3).
- compressed-tensors, int: `weight` [out, in], `weight_scale` and `weight_zero_point` [out, in / g] or one number;
  packed: `weight_packed` [out, in / n], n numbers in 32 bits, the first one lowest; zero points along the rows.
- AWQ (Lin et al. 2023): `qweight` [in, out / 8], `qzeros` [in / g, out / 8], `scales` [in / g, out]; eight neighbouring
  outputs lie in 32 bits in the order of `_AWQ_ORDER`.
- GPTQ (Frantar et al. 2022): `qweight` [in / n, out], packed along the inputs, `qzeros` [in / g, out / n], `scales`
  [in / g, out], and `g_idx` [in], the group of each input: with `desc_act` neighbours are of different groups.
- FP4: `weight_packed` or `weight` [out, in / 2], two e2m1 numbers a byte, the first one low. Of NVFP4 (NVIDIA 2025)
  `weight_scale` [out, in / 16] is e4m3, times `weight_scale_2` (ModelOpt) or by `weight_global_scale`
  (compressed-tensors), one fp32 number; of MXFP4 [out, in / 32], exponents of 2 with 127 added.
- MXFP4 (Rouhani et al. 2023) of gpt-oss's experts: `_blocks` [experts, out, in / 32, 16], two e2m1 numbers a byte, the
  first one low; `_scales` [experts, out, in / 32], exponents of 2 with 127 added.
Numbers are stored without a sign where they are packed.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from twostroke.model.checkpoint.quantization import QuantizedWeight, fp4_values
from twostroke.model.checkpoint.tensor_file import WHOLE, StoredWeight, TensorFile
from twostroke.model.config import StoredQuantization, WeightForm
from twostroke.protocol.errors import ConfigError

NOT_READ = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale"),
    *(".activation_scale", "_proj_activation_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".k_zero_point", ".v_zero_point", ".weight_shape"),
    "_proj_input_scale",
)
"""Endings of tensors that checkpoints may have and that we don't need: activations are not quantised, nor is KV with
zero points."""

MXFP4_GROUP = 32
_FLOATS = ("F32", "F16", "BF16")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_Shape = tuple[int, ...]


def stored_weight(
    stored: StoredQuantization, name: str, shape: tuple[int, int], files: Mapping[str, TensorFile], source: str
) -> StoredWeight:
    """The weight `name` [out, in] as `stored` says that it lies in `files`, by their tensors' names.

    Raises ConfigError, naming `source`, for tensors that are missing or misshapen.
    """
    parts = _Parts(stored, name.removesuffix(".weight"), shape, files, source)
    match stored.method:
        case "fp8" | "int8":
            return _plain(parts)
        case "packed":
            return _packed(parts)
        case "awq":
            return _awq(parts)
        case "gptq":
            return _gptq(parts)
        case "fp4":
            return _fp4(parts)
        case "mxfp4":
            raise ValueError("its weights are those of experts")


def stored_experts(name: str, shape: tuple[int, ...], files: Mapping[str, TensorFile], source: str) -> StoredWeight:
    """The weights `name` of all experts [number, in, out], in MXFP4. What is read of one expert is [out, in].

    Raises ConfigError, as `stored_weight`.
    """
    number, columns, rows = shape
    groups = -(-columns // MXFP4_GROUP)
    sizes = {f"{name}_blocks": (number, rows, groups, MXFP4_GROUP // 2), f"{name}_scales": (number, rows, groups)}
    for part, expected in sizes.items():
        if part not in files:
            raise ConfigError(f"{source}: tensor {part} is missing, which quantization_config asks for")
        if (found := files[part].shape(part)) != expected or files[part].dtype(part) != "U8":
            raise ConfigError(
                f"{source}: tensor {part} is {files[part].dtype(part)} of shape {list(found)}, config.json asks for U8 "
                f"of {list(expected)}"
            )
    blocks, scales = sizes

    def read(chosen: slice) -> QuantizedWeight:
        """Return the weight of one expert."""
        (codes,), (exponents,) = (files[part].tensor(part, chosen, WHOLE) for part in (blocks, scales))
        values = fp4_values(torch.stack((codes & 15, codes >> 4), dim=3).view(rows, -1)[:, :columns])
        return QuantizedWeight(values, _powers(exponents), MXFP4_GROUP, 4)

    return StoredWeight(WeightForm("fp4", MXFP4_GROUP), tuple(sizes), read)


class _Parts:
    """The tensors of one weight; those that have been asked for are `names`."""

    def __init__(
        self,
        stored: StoredQuantization,
        stem: str,
        shape: tuple[int, int],
        files: Mapping[str, TensorFile],
        source: str,
    ):
        self.stored = stored
        self.shape = shape
        self._stem = stem
        self._files = files
        self._source = source
        self.names: list[str] = []

    @property
    def bits(self) -> Literal[8, 4]:
        return self.stored.form.bits

    @property
    def in_word(self) -> int:
        """Numbers in 32 bits."""
        return 32 // self.bits

    @property
    def group_size(self) -> int:
        return self.stored.form.group_size or self.shape[1]

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)

    def has(self, kind: str) -> bool:
        return f"{self._stem}.{kind}" in self._files

    def part(self, kind: str, dtypes: tuple[str, ...], *shapes: _Shape) -> "_Part":
        """The tensor of that ending, of one of these types and shapes."""
        name = f"{self._stem}.{kind}"
        if name not in self._files:
            raise ConfigError(f"{self._source}: tensor {name} is missing, which quantization_config asks for")
        file = self._files[name]
        found, dtype = file.shape(name), file.dtype(name)
        if dtype not in dtypes:
            raise ConfigError(f"{self._source}: tensor {name} is {dtype}, only {', '.join(dtypes)} are supported")
        if found not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ConfigError(f"{self._source}: tensor {name} has shape {list(found)}, config.json asks for {expected}")
        self.names.append(name)
        return _Part(file, name)

    def order(self, kind: str) -> Tensor | None:
        """Return the order of inputs in which groups are neighbours; None where they already are."""
        if not self.has(kind):
            return None
        groups = self.part(kind, ("I32", "I64"), (self.shape[1],)).read().long()
        neighbours = torch.arange(self.shape[1]) // self.group_size
        if torch.equal(groups, neighbours) or not groups.any():  # some writers leave zeros where there is no order
            return None
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], neighbours):
            raise ConfigError(
                f"{self._source}: tensor {self._stem}.{kind}: groups are not of {self.group_size} inputs each: take a "
                "checkpoint without desc_act"
            )
        return order

    def check_no_zero_points(self, *zeros: int) -> None:
        """A symmetric weight may have zero points all the same: `zeros`, as they may be stored."""
        if not self.has("weight_zero_point"):
            return
        name = f"{self._stem}.weight_zero_point"
        found = self._files[name].tensor(name, WHOLE, WHOLE).float()
        if not any(bool((found == zero).all()) for zero in zeros):
            raise ConfigError(
                f"{self._source}: tensor {name}: quantization_config says symmetric, and it is not zero: take another "
                "checkpoint, or the unquantised one with model.quantization: int8 or int4"
            )
        self.names.append(name)


class _Part:
    def __init__(self, file: TensorFile, name: str):
        self._file = file
        self._name = name

    def read(self, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        """Contiguous, in memory of its own."""
        return self._file.tensor(self._name, rows, columns).clone(memory_format=torch.contiguous_format)


def _plain(parts: _Parts) -> StoredWeight:
    """A byte a weight."""
    stored, rows, groups = parts.stored, parts.shape[0], parts.num_groups
    block = stored.block
    weight = parts.part("weight", ("F8_E4M3",) if stored.method == "fp8" else ("I8",), parts.shape)
    of_scales: tuple[_Shape, ...] = ((rows, groups),)
    if block is not None:
        of_scales = ((-(-rows // block[0]), groups),)
    elif groups == 1:
        of_scales = ((), (1,), (1, 1), (rows,), (rows, 1))
    scale = parts.part("weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale", _FLOATS, *of_scales)
    zero = parts.part("weight_zero_point", ("I8",), *of_scales) if stored.form.has_offsets else None
    if zero is None:
        parts.check_no_zero_points(0)

    def of_rows(part: _Part, chosen: slice) -> Tensor:
        """fp32 [out, groups]."""
        found = part.read().float()
        if found.numel() == 1:
            found = found.reshape(1, 1).expand(rows, 1)
        found = found.reshape(-1, groups)
        if block is not None:
            found = found.repeat_interleave(block[0], dim=0)
        return found[:rows][chosen].contiguous()

    def read(chosen: slice) -> QuantizedWeight:
        scales = of_rows(scale, chosen)
        offsets = None if zero is None else -of_rows(zero, chosen) * scales
        return QuantizedWeight(weight.read(chosen), scales, parts.group_size, 8, offsets)

    return StoredWeight(stored.form, tuple(parts.names), read)


def _packed(parts: _Parts) -> StoredWeight:
    (rows, columns), groups, n = parts.shape, parts.num_groups, parts.in_word
    middle = 1 << (parts.bits - 1)
    weight = parts.part("weight_packed", ("I32",), (rows, -(-columns // n)))
    scale = parts.part("weight_scale", _FLOATS, (rows, groups))
    zero = None
    if parts.stored.form.has_offsets:
        zero = parts.part("weight_zero_point", ("I32",), (-(-rows // n), groups))
    else:
        middles = sum(middle << (parts.bits * place) for place in range(n))
        parts.check_no_zero_points(0, middles - (1 << 32))
    order = parts.order("weight_g_idx")

    def read(chosen: slice) -> QuantizedWeight:
        values, scales = _numbers(weight.read(chosen), parts.bits)[:, :columns], scale.read(chosen).float()
        offsets = None
        if zero is not None:
            zeros = _numbers(zero.read().T.contiguous(), parts.bits).T[:rows][chosen]
            offsets = (middle - zeros.float()) * scales
        return _made(parts, values, scales, offsets, order)

    return StoredWeight(parts.stored.form, tuple(parts.names), read)


def _fp4(parts: _Parts) -> StoredWeight:
    (rows, columns), groups = parts.shape, parts.num_groups
    weight = parts.part("weight_packed" if parts.has("weight_packed") else "weight", ("U8",), (rows, columns // 2))
    is_mx = parts.group_size == MXFP4_GROUP
    scale = parts.part("weight_scale", ("U8",) if is_mx else ("F8_E4M3",), (rows, groups))
    divides = parts.has("weight_global_scale")
    of_all = None
    if not is_mx:
        of_all = parts.part("weight_global_scale" if divides else "weight_scale_2", ("F32",), (), (1,))

    def read(chosen: slice) -> QuantizedWeight:
        values, scales, units = fp4_values(_halves(weight.read(chosen))), scale.read(chosen), None
        if of_all is None:
            scales = _powers(scales)
        else:
            number = of_all.read().reshape(())
            scales = scales.float() / number if divides else scales.float() * number
            units = (1 / number if divides else number).expand(len(scales)).contiguous()
        return QuantizedWeight(values, scales, parts.group_size, 4, units=units)

    return StoredWeight(parts.stored.form, tuple(parts.names), read)


def _powers(exponents: Tensor) -> Tensor:
    """uint8, with 127 added -> the powers of two, fp32."""
    return torch.exp2(exponents.float() - 127)


def _awq(parts: _Parts) -> StoredWeight:
    (rows, columns), groups = parts.shape, parts.num_groups
    weight = parts.part("qweight", ("I32",), (columns, rows // 8))
    scale = parts.part("scales", _FLOATS, (groups, rows))
    zero = parts.part("qzeros", ("I32",), (groups, rows // 8)) if parts.has("qzeros") else None
    places = torch.tensor(_AWQ_ORDER).argsort()

    def numbers(part: _Part, chosen: slice) -> Tensor:
        """[inputs or groups, out] -> [out, inputs or groups]."""
        first, end, _ = chosen.indices(rows)
        words = part.read(columns=slice(first // 8, -(-end // 8)))
        inner = _numbers(words, 4).view(len(words), -1, 8)[:, :, places].reshape(len(words), -1)
        return inner[:, first % 8 : first % 8 + end - first].T.contiguous()

    def read(chosen: slice) -> QuantizedWeight:
        scales = scale.read(columns=chosen).float().T.contiguous()
        offsets = None if zero is None else (8 - numbers(zero, chosen).float()) * scales
        return _made(parts, numbers(weight, chosen), scales, offsets, None)

    return StoredWeight(parts.stored.form, tuple(parts.names), read)


def _gptq(parts: _Parts) -> StoredWeight:
    (rows, columns), groups, n = parts.shape, parts.num_groups, parts.in_word
    middle = 1 << (parts.bits - 1)
    weight = parts.part("qweight", ("I32",), (columns // n, rows))
    scale = parts.part("scales", _FLOATS, (groups, rows))
    zero = parts.part("qzeros", ("I32",), (groups, rows // n))
    order = parts.order("g_idx")

    def read(chosen: slice) -> QuantizedWeight:
        values = _numbers(weight.read(columns=chosen).T.contiguous(), parts.bits)
        scales = scale.read(columns=chosen).float().T.contiguous()
        zeros = _numbers(zero.read(), parts.bits)[:, chosen].T.float() + parts.stored.zero_shift
        return _made(parts, values, scales, (middle - zeros) * scales, order)

    return StoredWeight(parts.stored.form, tuple(parts.names), read)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits], the lowest bits of a word first."""
    found = words.view(torch.uint8)
    return found if bits == 8 else _halves(found)


def _halves(codes: Tensor) -> Tensor:
    """uint8 [rows, n] -> [rows, 2 n], the lower four bits first."""
    return torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)


def _made(
    parts: _Parts, unsigned: Tensor, scales: Tensor, offsets: Tensor | None, order: Tensor | None
) -> QuantizedWeight:
    bits, middle = parts.bits, 1 << (parts.bits - 1)
    values = (unsigned ^ middle).view(torch.int8) if bits == 8 else unsigned.view(torch.int8) - middle
    if offsets is not None and not offsets.any():
        offsets = None
    if order is not None:
        values = values[:, order]
    return QuantizedWeight(values.contiguous(), scales, parts.group_size, bits, offsets, order)
