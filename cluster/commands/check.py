"""`twostroke check MODEL`: whether it can be served, in how much memory, for how many requests. Loads no weights."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.cluster.config.model_folder import CONFIG_PATTERNS, resolve_model_folder
from twostroke.cluster.config.reading import load_yaml
from twostroke.protocol.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.model.fit import Fit

CAN_T_BE_SERVED = 2
GIB = 2**30
GPU_BYTES = {
    "a100-40gb": 40 * GIB,
    "a100-80gb": 80 * GIB,
    "b200": 180 * GIB,
    "h100-80gb": 80 * GIB,
    "h200": 141 * GIB,
    "l4": 24 * GIB,
    "l40s": 48 * GIB,
}
"""Memory by name, as makers call it: some GB more or less than a driver gives."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a GGUF file, a hub id, or `bundled`")
    parser.add_argument("--config", metavar="FILE", type=Path, help="whose dtype, quantization and bounds are taken")
    parser.add_argument("--gpu", choices=sorted(GPU_BYTES), help="on such a GPU (default: on this machine's memory)")
    parser.add_argument("--tensor-parallel", type=int, choices=(1, 2, 4, 8), help="ranks that share the model")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--quantization", choices=("none", "int8", "int4"))
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print it; returns 0, or CAN_T_BE_SERVED with the reason. Raises ConfigError for a wrong configuration file."""
    config = _config(arguments)
    try:
        folder = resolve_model_folder(arguments.model, CONFIG_PATTERNS)
        told = _served(folder, config, arguments)
    except ConfigError as error:
        told = {"family": None, "way": "refused", "reason": str(error)}
    if arguments.json:
        print(json.dumps(told))
    else:
        print("\n".join(_lines(told, arguments)))
    return CAN_T_BE_SERVED if told["way"] == "refused" else 0


def _config(arguments: argparse.Namespace) -> ClusterConfig:
    raw: dict[str, Any] = load_yaml(arguments.config) if arguments.config is not None else {}
    for name in ("dtype", "quantization"):
        if (value := getattr(arguments, name)) is not None:
            raw["model"] = {**(raw.get("model") or {}), name: value}
    return read_config(raw)


def _served(folder: Path, config: ClusterConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """What can be said of a model that can be served. Raises ConfigError where it can't, or its tensors don't fit it.

    On this machine's memory as many workers share it as `twostroke serve` would start.
    """
    import torch

    from twostroke.model.cache.memory import StepBounds, available_bytes
    from twostroke.model.checkpoint.weights import has_weights
    from twostroke.model.engine_config import resolve_dtype
    from twostroke.model.fit import fit
    from twostroke.model.served import open_model

    model = open_model(folder)
    decode = config.decode
    ranks = arguments.tensor_parallel or decode.tensor_parallel
    if arguments.gpu is None:
        workers = sum(config.counts[role].first for role in config.roles)
        device, memory = torch.device("cpu"), available_bytes(torch.device("cpu")) // (workers * ranks)
    else:
        device, memory = torch.device("cuda"), int(GPU_BYTES[arguments.gpu] * decode.gpu_memory_utilization)
    # Of a hub id, nothing but its configuration is here. Nearly all are bf16.
    found_dtype = model.dtype if has_weights(folder) else torch.bfloat16
    dtype = resolve_dtype(config.model.dtype, found_dtype, device)
    bounds = StepBounds(decode.max_step_tokens, decode.max_batch)
    found = fit(
        model,
        dtype,
        config.model.quantization,
        memory=memory,
        ranks=ranks,
        is_gpu=arguments.gpu is not None,
        bounds=bounds,
    )
    return {
        "family": model.family,
        "way": "refused" if found.max_requests == 0 else model.way,
        "reason": _too_small(found, memory) if found.max_requests == 0 else None,
        "parameters": found.parameters,
        "active_parameters": found.active_parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": config.model.quantization,
        "ranks": ranks,
        "memory_bytes": memory,
        "weight_bytes": found.weight_bytes,
        "step_bytes": found.step_bytes,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "kv_window_bytes": found.kv_window_bytes,
        "model_context": model.shape.max_position,
        "max_context": found.max_context,
        "max_requests": found.max_requests,
    }


def _too_small(found: "Fit", memory: int) -> str:
    from twostroke.model.cache.memory import gibibytes

    return (
        f"weights take {gibibytes(found.weight_bytes)} and the largest step {gibibytes(found.step_bytes)} of the "
        f"{gibibytes(memory)} that a rank may take, which leaves nothing for the KV cache: quantise, take more ranks, "
        "or a smaller model"
    )


def _lines(told: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """For people."""
    from twostroke.model.cache.memory import gibibytes

    if told["family"] is None:
        return [f"{arguments.model} can't be served: {told['reason']}"]
    held = told["dtype"] + ("" if told["quantization"] == "none" else f" with {told['quantization']} weights")
    where = f"a {arguments.gpu}" if arguments.gpu else "this machine"
    of_rank = "" if told["ranks"] == 1 else f" on each of {told['ranks']} ranks"
    through = " through transformers" if told["way"] == "transformers" else ""
    lines = [
        f"{told['family']}{through}, {told['parameters'] / 1e6:,.1f} M parameters, in {held}",
        f"weights {gibibytes(told['weight_bytes'])}{of_rank}, the largest step {gibibytes(told['step_bytes'])}, "
        f"KV {told['kv_bytes_per_token'] / 1024:.1f} KiB a token",
    ]
    if told["way"] == "refused":
        return [*lines, f"can't be served on {where}: {told['reason']}"]
    lines.append(
        f"on {where}, of which a worker may have {gibibytes(told['memory_bytes'])}{of_rank}: contexts of up to "
        f"{told['max_context']:,} tokens (the model's own: {told['model_context']:,}), "
        f"{told['max_requests']} of them at once if all that is left is KV cache"
    )
    if arguments.gpu is None:
        flags = "".join(
            f" --{name} {told[name]}" for name in ("dtype", "quantization") if getattr(arguments, name) is not None
        )
        return [*lines, "", f"    twostroke serve --model {arguments.model}{flags}"]
    worker = f"{{num_gpus: 1, tensor_parallel: {told['ranks']}}}"
    settings = {
        "model": f"{{path: {arguments.model}, quantization: {told['quantization']}}}",
        "prefill": worker,
        "decode": worker,
    }
    return [
        *lines,
        "",
        "    twostroke serve --config FILE, of one worker of each role, with",
        *(f"    {name}: {said}" for name, said in settings.items()),
    ]
