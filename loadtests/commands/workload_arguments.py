"""--workload and what belongs to it."""

import argparse
from pathlib import Path
from typing import Any

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import Chat, Fixed, LongPrompts, SharedPrompt, Synthetic, TraceFile, Workload
from twostroke.loadtests.workloads.synthetic import SHAPES

_OPTIONS: dict[str, tuple[type, str]] = {
    "input_tokens": (int, "of a request; of chat of a turn, of shared-prompt the request's own"),
    "output_tokens": (int, "of an answer"),
    "turns": (float, "chat: mean number of turns"),
    "think_s": (float, "chat: mean seconds from an answer to the next turn"),
    "system_tokens": (int, "chat: of a system prompt"),
    "system_prompts": (int, "chat: how many there are"),
    "shared_tokens": (int, "shared-prompt: of a shared prompt"),
    "shared_prompts": (int, "shared-prompt: how many there are"),
    "long_input_tokens": (int, "long-prompts: of a long prompt"),
    "long_output_tokens": (int, "long-prompts: of its answer"),
    "long_share": (float, "long-prompts: of all requests, 0 to 1"),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "fixed": {"input_tokens": 512, "output_tokens": 128},
    "chat": {name: getattr(Chat(), name) for name in Chat.__struct_fields__},
    "shared-prompt": {"shared_tokens": 1024, "shared_prompts": 4, "input_tokens": 128, "output_tokens": 128},
    "long-prompts": {
        "input_tokens": 64,
        "output_tokens": 256,
        "long_input_tokens": 4096,
        "long_output_tokens": 16,
        "long_share": 0.1,
    },
}


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent")
    names = ", ".join((*SHAPES, *_DEFAULTS))
    group.add_argument("--workload", default="azure-conv", help=f"{names}, or a trace's file (default: %(default)s)")
    group.add_argument(
        "--format",
        choices=("auto", "azure", "mooncake", "burstgpt", "bailian"),
        help="of a trace's file (default: by its columns)",
    )
    for name, (kind, help_text) in _OPTIONS.items():
        uses = [f"{defaults[name]:g} for {workload}" for workload, defaults in _DEFAULTS.items() if name in defaults]
        unit = "S" if name.endswith("_s") else "N"
        option = "--" + name.removesuffix("_s").replace("_", "-") + ("-time" if name == "think_s" else "")
        group.add_argument(option, dest=name, type=kind, metavar=unit, help=f"{help_text} (default: {', '.join(uses)})")


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Raises LoadTestError for an unknown workload, or an option that is not its own."""
    name = arguments.workload
    given = {option: value for option in _OPTIONS if (value := getattr(arguments, option)) is not None}
    defaults = _DEFAULTS.get(name, {})
    if others := given.keys() - defaults.keys():
        raise LoadTestError(
            f"--workload {name} has no {', '.join(sorted(others))}; it has {', '.join(defaults) or 'none'}"
        )
    values = defaults | given
    if arguments.format is not None and name in (*SHAPES, *_DEFAULTS):
        raise LoadTestError(f"--format {arguments.format}: --workload {name} is no trace's file; leave it away")
    match name:
        case "fixed":
            return Fixed(**values)
        case "chat":
            return Chat(**values)
        case "shared-prompt":
            return SharedPrompt(prompts=values.pop("shared_prompts"), **values)
        case "long-prompts":
            return LongPrompts(**values)
        case _ if name in SHAPES:
            return Synthetic(name)
        case _ if Path(name).is_file():
            return TraceFile(str(Path(name).resolve()), arguments.format or "auto")
        case _:
            names = ", ".join((*SHAPES, *_DEFAULTS))
            raise LoadTestError(f"--workload {name}: no such file, and none of {names}")
