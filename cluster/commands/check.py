"""`twostroke check MODEL`: whether it can be served, in how much memory, for how many requests. Loads no weights."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from twostroke.cluster.config.config import ClusterConfig, lay_over, read_config
from twostroke.cluster.config.model_folder import CONFIG_PATTERNS, resolve_model_folder
from twostroke.cluster.config.reading import load_yaml
from twostroke.cluster.config.sections import held_as
from twostroke.model.config import KVCacheDtype, Quantization
from twostroke.model.published.hardware import HARDWARE
from twostroke.model.published.models import MODELS, known_as
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import FP8
from twostroke.protocol.stats import Role

if TYPE_CHECKING:
    from twostroke.model.costs.sizes import Fit
    from twostroke.model.served import ServedModel

CAN_T_BE_SERVED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder, a GGUF file, a hub id, `bundled`, or a name that `plan` knows, such as Qwen3-8B",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="configuration whose dtype, quantization and bounds apply"
    )
    parser.add_argument(
        "--gpu", choices=sorted(HARDWARE), help="check for this GPU (default: on this machine's memory)"
    )
    parser.add_argument("--tensor-parallel", type=int, choices=(1, 2, 4, 8), help="ranks that share a stage")
    parser.add_argument("--pipeline-parallel", type=_stages, help="stages that share the model's layers")
    parser.add_argument("--expert-parallel", action="store_true", help="each rank holds some experts whole")
    parser.add_argument("--context-parallel", action="store_true", help="ranks share the tokens of latents")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--quantization", choices=get_args(Quantization))
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype))
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _stages(text: str) -> int:
    """An argument's type."""
    if (stages := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return stages


def run(arguments: argparse.Namespace) -> int:
    """Print it; returns 0, or CAN_T_BE_SERVED with the reason. Raises ConfigError for a wrong configuration file."""
    config = _config(arguments)
    try:
        with _checkpoint_folder(arguments.model, config.model.revision) as folder:
            report = _served(folder, config, arguments)
    except ConfigError as error:
        report = {"family": None, "way": "refused", "reason": str(error)}
    if arguments.json:
        print(json.dumps(report))
    else:
        print("\n".join(_lines(report, arguments)))
        if report["way"] != "refused" and _published(arguments.model, config.model.revision) is not None:
            print("\nwith your copy of the model in place of its name: a folder, a GGUF file or a hub id")
    return CAN_T_BE_SERVED if report["way"] == "refused" else 0


@contextmanager
def _checkpoint_folder(name: str, revision: str | None) -> Iterator[Path]:
    """The model's folder, or one with the configuration that `plan` knows by this name. Raises ConfigError."""
    known = _published(name, revision)
    if known is None:
        yield resolve_model_folder(name, CONFIG_PATTERNS, revision)
        return
    with TemporaryDirectory(prefix="twostroke-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[known].config))
        yield Path(folder)


def _published(name: str, revision: str | None) -> str | None:
    """Return the table name of a model that `plan` knows; None: it is looked up. OWNER's may be another model."""
    return None if "/" in name or revision is not None else known_as(name)


def _config(arguments: argparse.Namespace) -> ClusterConfig:
    raw: dict[str, Any] = load_yaml(arguments.config) if arguments.config is not None else {}
    read_config(raw)  # so that what is wrong in the file is told as the file's
    lay_over(raw, dtype=arguments.dtype, quantization=arguments.quantization)
    given = {"kv_cache_dtype": arguments.kv_cache_dtype, "revision": arguments.revision}
    if named := {name: value for name, value in given.items() if value is not None}:
        raw["model"] = {**(raw.get("model") or {}), **named}
    return read_config(raw)


def _served(folder: Path, config: ClusterConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Describe a model that can be served: of a decode worker, and of a prefill worker if that holds the model
    differently. Raises ConfigError where it cannot be served or its tensors do not fit it."""
    from twostroke.model.served import open_model
    from twostroke.router.text.tokenizer import given_end_tokens

    model = open_model(folder, has_mtp=config.has_mtp)
    given_end_tokens(folder)  # routers would refuse to start
    report = _of_worker("decode", folder, model, config, arguments)
    model_held, by_prefill = config.model_section(config.decode), config.model_section(config.prefill)
    if config.has_prefill and (model_held.dtype, model_held.quantization) != (
        by_prefill.dtype,
        by_prefill.quantization,
    ):
        prefill = report["prefill"] = _of_worker("prefill", folder, model, config, arguments)
        if prefill["way"] == "refused" and report["way"] != "refused":
            report |= {"way": "refused", "reason": f"prefill workers: {prefill['reason']}"}
    return report


def _of_worker(
    role: Role, folder: Path, model: "ServedModel", config: ClusterConfig, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Describe one worker. On this machine, as many workers share the memory as `twostroke serve` would start."""
    import torch

    from twostroke.model.cache.memory import available_bytes
    from twostroke.model.checkpoint.weights import has_weights
    from twostroke.model.costs.sizes import StepBounds, fit
    from twostroke.model.engine_config import resolve_dtype, resolve_kv_dtype

    section = config.roles[role]
    section_model = config.model_section(section)
    set_up = section.parallel
    parallel = replace(
        set_up,
        tensor_ranks=arguments.tensor_parallel or set_up.tensor_ranks,
        stages=arguments.pipeline_parallel or set_up.stages,
        has_whole_experts=arguments.expert_parallel or set_up.has_whole_experts,
        shares_contexts=arguments.context_parallel or set_up.shares_contexts,
    )
    if arguments.gpu is None:
        workers = sum(config.counts[role].first for role in config.roles)
        device, memory = torch.device("cpu"), available_bytes(torch.device("cpu")) // (workers * parallel.num_ranks)
    else:
        device, memory = (
            torch.device("cuda"),
            int(HARDWARE[arguments.gpu].memory_bytes * section.gpu_memory_utilization),
        )
    # Of a hub id, nothing but its configuration is here. Nearly all are bf16.
    found_dtype = model.dtype if has_weights(folder) else torch.bfloat16
    dtype = resolve_dtype(section_model.dtype, found_dtype, device)
    kv_dtype = resolve_kv_dtype(section_model.kv_cache_dtype, model.shape, dtype)
    bounds = StepBounds(section.max_step_tokens, section.max_batch)
    model.check_ranks(parallel, config.block_size(section))
    found = fit(
        model.shape,
        model.weight_bytes(dtype, section_model.quantization, parallel),
        itemsize=dtype.itemsize,
        kv_itemsize=kv_dtype.itemsize,
        memory=memory,
        parallel=parallel,
        is_gpu=arguments.gpu is not None,
        bounds=bounds,
    )
    return {
        "family": model.family,
        "way": "refused" if found.max_requests == 0 else model.way,
        "reason": _too_small(found, memory) if found.max_requests == 0 else None,
        "parameters": model.num_parameters,
        "active_parameters": model.num_active_parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "quantization": section_model.quantization,
        "weights": model.weights_as(section_model.quantization),
        "ranks": parallel.num_ranks,
        "pipeline_parallel": parallel.stages,
        "expert_parallel": parallel.has_whole_experts,
        "context_parallel": parallel.context_ranks > 1,
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


def _lines(report: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Return the description as lines for people."""
    from twostroke.model.cache.memory import gibibytes

    if report["family"] is None:
        return [f"{arguments.model} can't be served: {report['reason']}"]
    where = f"a {arguments.gpu}" if arguments.gpu else "this machine"

    def of_rank(by: dict[str, Any]) -> str:
        return "" if by["ranks"] == 1 else f" on each of {by['ranks']} ranks"

    def taken(by: dict[str, Any]) -> str:
        return (
            f"weights {gibibytes(by['weight_bytes'])}{of_rank(by)}, the largest step {gibibytes(by['step_bytes'])}, "
            f"KV {by['kv_bytes_per_token'] / 1024:.1f} KiB a token"
            + (" in FP8" if by["kv_dtype"] == FP8 else "")
            + (f" and up to {gibibytes(by['kv_window_bytes'])} a request that decodes" if by["kv_window_bytes"] else "")
        )

    through = " through transformers" if report["way"] == "transformers" else ""
    form = held_as(report["dtype"], report["weights"])
    is_routed = report["active_parameters"] < report["parameters"]
    active = f", of which a token takes {report['active_parameters'] / 1e6:,.1f} M" if is_routed else ""
    lines = [
        f"{report['family']}{through}, {report['parameters'] / 1e6:,.1f} M parameters{active}, in {form}",
        taken(report),
    ]
    if (prefill := report.get("prefill")) is not None:
        lines.append(
            f"on a prefill worker in {held_as(prefill['dtype'], prefill['weights'])}: {taken(prefill)}, contexts "
            f"of up to {prefill['max_context']:,} tokens"
        )
    if report["way"] == "refused":
        return [*lines, f"can't be served on {where}: {report['reason']}"]
    lines.append(
        f"on {where}, of which a worker may have {gibibytes(report['memory_bytes'])}{of_rank(report)}: "
        f"contexts of up to {report['max_context']:,} tokens (the model's own: {report['model_context']:,}), "
        f"{report['max_requests']} of them at once if all that is left is KV cache"
    )
    if arguments.gpu is None:
        serve_flags = {
            "--config": arguments.config,
            "--dtype": arguments.dtype,
            "--quantization": arguments.quantization,
            "--kv-cache-dtype": arguments.kv_cache_dtype,
            "--tensor-parallel-size": arguments.tensor_parallel,
            "--pipeline-parallel-size": arguments.pipeline_parallel,
        }
        flags = "".join(f" {flag} {value}" for flag, value in serve_flags.items() if value is not None)
        flags += " --enable-expert-parallel" if arguments.expert_parallel else ""
        lines += ["", f"    twostroke serve --model {arguments.model}{flags}"]
        if arguments.context_parallel:
            lines.append("    with decode: {context_parallel: true} in the file of --config")
        return lines
    shared = "".join(f", {name}: true" for name in ("expert_parallel", "context_parallel") if report[name])
    stages = report["pipeline_parallel"]
    staged = f", pipeline_parallel: {stages}" if stages > 1 else ""
    worker = f"{{num_gpus: 1, tensor_parallel: {report['ranks'] // stages}{staged}{shared}}}"
    settings = {
        "model": f"{{path: {arguments.model}, quantization: {report['quantization']}"
        + (", kv_cache_dtype: fp8}" if report["kv_dtype"] == FP8 else "}"),
        "prefill": worker,
        "decode": worker,
    }
    if prefill is not None:
        settings["prefill"] = f"{worker[:-1]}, quantization: {prefill['quantization']}}}"
    return [
        *lines,
        "",
        "    twostroke serve --config FILE, of one worker of each role, with",
        *(f"    {name}: {text}" for name, text in settings.items()),
    ]
