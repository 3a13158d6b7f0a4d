"""`twostroke capacity`: figures of one model on given GPUs; the last line is one JSON object."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.commands.arguments import above_zero, add_workload, context_tokens, positive_count
from twostroke.model.config import KVCacheDtype, ModelConfig, Quantization
from twostroke.model.costs.operations import NumberFormats
from twostroke.model.published.hardware import EFFICIENCY, GIB, HARDWARE, Hardware, known_hardware, read_efficiency
from twostroke.model.published.models import MODELS, known_as, published_model
from twostroke.planning.commands.options import amount
from twostroke.planning.commands.plan import add_repeated, model_of, workload_for
from twostroke.planning.costs.capacity import CapacityCase, batching, border, capacity, lines, model_of_numbers, sizes
from twostroke.planning.costs.literature import check_lines
from twostroke.planning.costs.roofline import WorkerHardware, as_mha
from twostroke.planning.costs.tables import tables
from twostroke.planning.search import PlanConstraints
from twostroke.protocol.errors import ConfigError

CONTEXTS = (2048, 4096, 8192, 32_768, 131_072)
DTYPES = {"fp16": 2.0, "bf16": 2.0, "fp32": 4.0}
NUMBERS = ("layers", "kv_heads", "head_dim", "heads", "hidden", "ffn", "vocabulary")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `twostroke capacity`."""
    model = parser.add_argument_group("the model")
    known = f"a folder, a GGUF file, a hub id, or one of {', '.join(MODELS)}"
    model.add_argument("model", metavar="MODEL", nargs="?", help=f"{known}; or bare numbers:")
    for name in NUMBERS:
        model.add_argument(f"--{name.replace('_', '-')}", type=positive_count, metavar="N")
    model.add_argument("--parameters", type=amount, metavar="N", help="as in 7e9: what is not given follows from it")
    model.add_argument("--mha", action="store_true", help="with keys and values of every query head")
    model.add_argument("--dtype", choices=tuple(DTYPES), help="of weights, activations and KV (default: the GPU's)")
    model.add_argument("--quantization", choices=get_args(Quantization), default="auto", help="of weights")
    model.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype), default="auto")
    gpus = parser.add_argument_group("the GPUs (default: this machine's, or its CPU, which is measured)")
    gpus.add_argument("--gpu", metavar="NAME|FILE", help=f"{', '.join(HARDWARE)}, or a file of `bench machine`")
    gpus.add_argument("--memory", type=amount, metavar="BYTES", help="of a GPU that the table lacks: 80GB, 80GiB")
    gpus.add_argument("--bandwidth", type=amount, metavar="BYTES", help="a second, of its memory: 2TB")
    gpus.add_argument(
        "--flops",
        type=amount,
        metavar="FLOPS",
        help="a second, dense: 312T; without it some is left out",
    )
    gpus.add_argument("--gpus", type=int, choices=(1, 2, 4, 8), default=1, help="that share the model")
    parts = f"parts of the peaks that are expected (default: {EFFICIENCY.compute},{EFFICIENCY.read})"
    gpus.add_argument("--efficiency", metavar="COMPUTE,READ", help=parts)
    gpus.add_argument("--usd-per-hour", type=above_zero, metavar="USD", help="of one GPU, instead of what is assumed")
    questions = parser.add_argument_group("targets")
    questions.add_argument("--context", type=_contexts, metavar="N[,N]", help="tokens of requests, prompt and answer")
    questions.add_argument("--tpot", type=above_zero, default=0.05, metavar="S", help="promised (default: %(default)s)")
    questions.add_argument("--prompt", type=positive_count, default=512, metavar="N", help="default: %(default)s")
    questions.add_argument("--answer", type=positive_count, default=256, metavar="N", help="default: %(default)s")
    questions.add_argument(
        "--max-context", type=context_tokens, default=8192, metavar="N", help="of --workload's requests"
    )
    add_workload(questions)
    add_repeated(questions)
    output = parser.add_argument_group("output")
    output.add_argument("--formulas", action="store_true", help="simulate nothing")
    output.add_argument("--report", type=Path, metavar="FOLDER", help="write pictures there")
    output.add_argument("--json", action="store_true", help="nothing but the last line")
    output.add_argument("--check", action="store_true", help="hold the calculators against the literature, instead")
    output.add_argument(
        "--tables", action="store_true", help="print tables of hardware, models, room, floors, links and costs, instead"
    )


def _contexts(text: str) -> tuple[int, ...]:
    """An argument's type."""
    return tuple(context_tokens(part) for part in text.split(","))


def run(arguments: argparse.Namespace) -> int:
    """Returns 0; 1 where a number of the literature is not ours. Raises ConfigError for what can't be computed."""
    if arguments.tables:
        print(tables(), end="")
        return 0
    if arguments.check:
        found, rows, wrong = check_lines()
        _tell(arguments, found, {"rows": rows, "wrong": wrong})
        return 1 if wrong else 0
    shape, is_whole = _model(arguments)
    if not is_whole:
        answer = sizes(shape, _held(arguments, None).kv_itemsize, arguments.context or CONTEXTS)
        more = "for weights, batches and costs give --parameters, or --heads (or --hidden) and --ffn"
        _tell(arguments, [*lines(answer), more], answer)
        return 0
    case = _case(arguments, shape)
    if case.room.rows == 0:
        raise ConfigError(
            f"capacity: {case.weights / case.machine.ranks / GIB:.1f} GiB of weights on each GPU leave no room for KV: "
            "take more --gpus, GPUs with more memory, or --quantization"
        )
    answer = {"model": case.name, "hardware": case.hardware.title, **capacity(case)}
    if not arguments.formulas and case.knows_compute:
        try:
            answer |= {"transfer_border": border(case), **batching(case, workload_for(arguments, shape))}
        except LoadTestError as error:
            raise ConfigError(str(error)) from error
    if arguments.report is not None:
        if not case.knows_compute:
            raise ConfigError("--report: give --flops, too: pictures show what computing takes")
        from twostroke.planning.costs.pictures import case_pictures, write_pictures

        write_pictures(arguments.report, case_pictures(case))
    _tell(arguments, list(lines(answer)), answer)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(arguments: argparse.Namespace, text: Sequence[str], answer: dict[str, Any]) -> None:
    if not arguments.json:
        print("\n".join(text), end="\n\n")
    print(json.dumps(answer))


def _model(arguments: argparse.Namespace) -> tuple[ModelConfig, bool]:
    """The model, and whether more than its KV is known."""
    numbers = {name: value for name in (*NUMBERS, "parameters") if (value := getattr(arguments, name)) is not None}
    if arguments.model is not None:
        if numbers:
            raise ConfigError(f"--{next(iter(numbers)).replace('_', '-')}: beside MODEL: give one of them")
        known = known_as(arguments.model, is_served=False)
        shape, is_whole = model_of(arguments.model) if known is None else published_model(known), True
    elif not {"layers", "kv_heads", "head_dim"} <= numbers.keys():
        raise ConfigError("capacity: name a MODEL, or give --layers, --kv-heads and --head-dim; or --check or --tables")
    else:
        is_whole = "parameters" in numbers or ("ffn" in numbers and bool({"heads", "hidden"} & numbers.keys()))
        shape = model_of_numbers(**numbers)
    return as_mha(shape) if arguments.mha else shape, is_whole


def _held(arguments: argparse.Namespace, hardware: Hardware | None) -> NumberFormats:
    itemsize = 2.0 if hardware is None else hardware.itemsize
    if arguments.dtype is not None:
        itemsize = DTYPES[arguments.dtype]
    return NumberFormats(arguments.quantization, itemsize, itemsize if arguments.kv_cache_dtype == "auto" else 1.0)


def _case(arguments: argparse.Namespace, shape: ModelConfig) -> CapacityCase:
    hardware = _hardware(arguments)
    held = _held(arguments, hardware)
    terms = PlanConstraints(kv_itemsize=held.kv_itemsize, efficiency=read_efficiency(arguments.efficiency))
    contexts = arguments.context or [one for one in CONTEXTS if one <= shape.max_position] or [shape.max_position]
    return CapacityCase(
        name=f"{arguments.model or 'the numbers given'}{' as MHA' if arguments.mha else ''}",
        shape=shape,
        machine=WorkerHardware(hardware, arguments.gpus, held, terms.efficiency),
        terms=terms,
        contexts=contexts,
        tpot_s=arguments.tpot,
        prompt=arguments.prompt,
        answer=arguments.answer,
        repeated=arguments.repeated or 0.0,
    )


def _hardware(arguments: argparse.Namespace) -> Hardware:
    given = {"--memory": arguments.memory, "--bandwidth": arguments.bandwidth}
    if arguments.gpu is not None:
        if beside := [name for name, value in {**given, "--flops": arguments.flops}.items() if value is not None]:
            raise ConfigError(f"{beside[0]}: beside --gpu: give one of them")
        hardware = known_hardware(arguments.gpu)
    elif None not in given.values():
        hardware = Hardware(
            name="given",
            title=f"a GPU of {arguments.memory / 1e9:.4g} GB at {arguments.bandwidth / 1e12:.4g} TB/s",
            memory_bytes=int(arguments.memory),
            read_bytes_per_s=arguments.bandwidth,
            flops_per_s={"bf16": arguments.flops or float("inf")},
            link_bytes_per_s=25e9,
            usd_per_hour=1.0,
            source="as given",
        )
    elif any(given.values()) or arguments.flops is not None:
        raise ConfigError("--memory and --bandwidth: give both of them, or --gpu")
    else:
        from twostroke.loadtests.generator.run_facts import machine_facts
        from twostroke.model.machine_limits import ROUNDS, gpu_here, hardware_row, measure_rounds

        cpu = machine_facts()["cpu"]
        hardware = gpu_here() or hardware_row(*measure_rounds(ROUNDS, _say), "this-cpu", 1.0, cpu)
    if arguments.gpus > 1 and not hardware.is_gpu:
        raise ConfigError(f"--gpus {arguments.gpus}: {hardware.title} is one machine's all")
    return replace(hardware, usd_per_hour=arguments.usd_per_hour or hardware.usd_per_hour)
