"""The `twostroke` command. Each subcommand's module is imported only when it is the one wanted."""

import argparse
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from typing import NoReturn

from twostroke.protocol.errors import ConfigError, how_to_install

CONFIG_ERROR_EXIT = 2
PIPE_EXIT = 141
"""Exit code where the reader of the output has left: that of a program which SIGPIPE ends."""

_COMMANDS = {
    "serve": ("cluster.commands.serve", "start a server on this machine and keep it until Ctrl-C"),
    "check": ("cluster.commands.check", "tell whether a model can be served, and in how much memory; loads no weights"),
    "status": ("cluster.commands.status", "show the replicas, blocks, queues and rates of a running server"),
    "config check": ("cluster.commands.configuration:check", "tell all that is wrong in a configuration file"),
    "config schema": (
        "cluster.commands.configuration:schema",
        "print the JSON schema of the file, for editors to check and complete by",
    ),
    "config reference": ("cluster.commands.configuration:reference", "print the tables of docs/configuration.md"),
    "key new": (
        "cluster.commands.keys:new",
        "draw an API key, and print it with its line of YAML or add that to a file",
    ),
    "key list": ("cluster.commands.keys:list", "show whose keys a file has, and until when"),
    "key revoke": ("cluster.commands.keys:revoke", "take a key out of a file, while the server runs"),
    "cache ls": ("cluster.commands.cache:ls", "list the models and tenants whose KV a directory or bucket keeps"),
    "cache stat": (
        "cluster.commands.cache:stat",
        "count a tier's objects, and with --verify read and check all of them",
    ),
    "cache prune": ("cluster.commands.cache:prune", "delete a tier's oldest objects, down to a size or an age"),
    "cache drop": ("cluster.commands.cache:drop", "delete all objects of a tenant or a model from a tier"),
    "await": ("cluster.commands.application:await", "wait until the application that `serve deploy` deployed runs"),
    "drain": (
        "cluster.commands.application:drain",
        "let running answers end before `serve shutdown`, or move away from one worker",
    ),
    "role": ("cluster.commands.application:role", "have a worker prefer prompts, streams or neither, while it serves"),
    "doctor": (
        "cluster.commands.doctor",
        "test every KV path of a running server, and say what is missing",
    ),
    "bench engine": (
        "benchmarks.engine",
        "prefill and decode speed of the engine, against this machine's limits",
    ),
    "bench gpu": (
        "benchmarks.gpu.command",
        "the engine on one CUDA device, against its limits and torch's own kernels",
    ),
    "bench transfer": (
        "benchmarks.transfers.transfer",
        "KV transfer against the machine's limits, and what a request feels of it",
    ),
    "bench routing": ("benchmarks.routing", "how long the choice of a path takes, by workers and indexed blocks"),
    "bench machine": (
        "benchmarks.machine",
        "what this machine's CPU can do, and how long steps take, into files that `plan` and `simulate` read",
    ),
    "bench run": ("benchmarks.run", "servers in turns under the same loads, as a plan says"),
    "should-i-disaggregate": (
        "planning.commands.should_i_disaggregate",
        "find the mode that serves most within an SLO, measured here or simulated",
    ),
    "plan": ("planning.commands.plan", "find the fleet that serves a workload in time, and its cost"),
    "capacity": (
        "planning.commands.capacity",
        "compute a model's memory, batches, floors and costs on given GPUs",
    ),
    "simulate": (
        "planning.commands.simulate",
        "serve a workload on virtual time with a fleet that need not exist",
    ),
    "loadtest run": ("loadtests.commands.measure:run", "one run at one load, and its report"),
    "loadtest plan": ("loadtests.commands.measure:write", "write the plan that `run --plan` and Locust carry out"),
    "loadtest sweep": ("loadtests.commands.measure:sweep", "find the highest rate at which the SLO still holds"),
    "loadtest compare": ("loadtests.commands.compare", "put reports side by side"),
    "loadtest report": ("loadtests.commands.measure:report", "make the reports of runs and sweeps again"),
}
"""Commands by name: the module, or `module:command` where a module has several, and the line of help."""

_GROUPS = {
    "config": "check the configuration file, or describe it for editors",
    "cache": "look into KV tiers, and delete from them",
    "key": "make, list and revoke API keys",
    "bench": "measure; the last line is one JSON object",
    "loadtest": "send load to a server, and report how well it did",
}
_LOADTESTS_NEED = ("locust", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 for a failure, 2 for a wrong setting, file or folder."""
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            if sys.stdout is not None:  # as where `>&-` has closed it
                sys.stdout.flush()  # what `head` does not want must not wait until the interpreter ends
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter writes out what is left
        return PIPE_EXIT


def _reader_has_left() -> bool:
    """Return whether nobody reads standard output any more. A pipe between processes may have broken instead."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors name the help in place of printing all options before what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(CONFIG_ERROR_EXIT, f"{self.prog}: error: {message}\n({self.prog} --help tells all options)\n")


def parse(arguments: Sequence[str]) -> tuple[Callable[[argparse.Namespace], int], argparse.Namespace]:
    """Return what runs the command, and its arguments. Exits with 2 and a message where they are wrong."""
    # As vLLM takes them, too: --max_model_len, --help=all.
    arguments = [re.sub(r"^--[a-z_]+", lambda flag: flag[0].replace("_", "-"), one) for one in arguments]
    arguments = ["--help" if one.startswith("--help=") else one for one in arguments]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    parser, command, run = _parser(arguments)
    _check_command(parser, arguments)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        command.error(_unrecognised(command, unknown))
    return run, known


def _run(arguments: list[str]) -> int:
    try:
        run, known = parse(arguments)
        return run(known)
    except ConfigError as error:
        print(f"twostroke: {error}", file=sys.stderr)
        return CONFIG_ERROR_EXIT
    except KeyboardInterrupt:
        return 130


def _unrecognised(command: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return argparse's message for unknown arguments, with what to write instead where that is known."""
    message = f"unrecognized arguments: {' '.join(unknown)}"
    flags = [re.split("[=.]", one)[0] for one in unknown if re.match("--?[a-zA-Z]", one)]
    if not flags and command.prog == "twostroke serve":
        return f"{message}\none model is served, and a flag has one value"
    return "\n".join([message, *filter(None, (_hint(command, flag) for flag in flags))])


def _hint(command: argparse.ArgumentParser, flag: str) -> str | None:
    """Return what to write instead of a flag that the command lacks, or None."""
    from twostroke.cluster.config.other_servers import BENCH_SERVE, flag_hint, known_flags

    own = set(command._option_string_actions)
    is_serve = command.prog == "twostroke serve"
    if is_serve and (ours := flag_hint(flag, own)) is not None:
        return ours
    name = flag.lstrip("-").replace("-", "_")
    if command.prog.startswith("twostroke loadtest ") and name in BENCH_SERVE:
        return f"vLLM's {flag}: {BENCH_SERVE[name]}"
    if is_serve and (theirs := get_close_matches(flag, known_flags() - own, n=1, cutoff=0.85)):
        return flag_hint(theirs[0], own)
    near = get_close_matches(flag, own, n=1, cutoff=0.75)  # --replicas is no misspelt --revision
    return f"did you mean {near[0]}?" if near else None


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends with what to write instead of a command that is none."""
    words = list(takewhile(lambda one: not one.startswith("-"), arguments))[:2]
    called = words if words[:1] and words[0] in _GROUPS else words[:1]
    names = {" ".join(one.split()[: len(called)]) for one in _COMMANDS}
    name = " ".join(called)
    if not called or name in names:
        return
    from twostroke.cluster.config.other_servers import COMMANDS

    near = get_close_matches(name, names, n=1)
    hint = f"vLLM's {name}: {COMMANDS[name]}" if name in COMMANDS else f"did you mean {near[0]}?" if near else ""
    parser.error(f"{name}: there is no such command\n{hint}".rstrip())


def _parser(
    arguments: Sequence[str],
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, Callable[[argparse.Namespace], int]]:
    """The parser, complete for the subcommand that `arguments` name; that subcommand's own, and what runs it."""
    parser = CommandParser(
        prog="twostroke",
        description="Distributed LLM inference: prefill workers compute prompts, decode workers compute answers.",
    )
    parser.add_argument("--version", action="version", version=f"twostroke {installed_version()}")
    groups = {"": parser.add_subparsers(dest="command", required=True, metavar="COMMAND")}
    wanted = " ".join([argument for argument in arguments if not argument.startswith("-")][:2])
    chosen = parser
    run: Callable[[argparse.Namespace], int] = _nothing
    for called, (module, help_text) in _COMMANDS.items():
        group, _, name = called.rpartition(" ")
        if group not in groups:
            group_parser = groups[""].add_parser(group, help=_GROUPS[group])
            groups[group] = group_parser.add_subparsers(dest=group, required=True, metavar="COMMAND")
        command = groups[group].add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
        if f"{wanted} ".startswith(f"{called} "):
            chosen = command
            run = (_prepare_loadtest if group == "loadtest" else _prepare)(module, command)
    return parser, chosen, run


def _prepare(place: str, parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the command's arguments; returns what runs it. `place`: `module`, or `module:command` of several."""
    module, _, command = place.partition(":")
    try:
        loaded = import_module(f"twostroke.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "twostroke":
            raise
        name = parser.prog.removeprefix("twostroke ")
        raise ConfigError(f"{name} needs {error.name}: {how_to_install('serve')}") from error
    getattr(loaded, f"add_{command}_arguments" if command else "add_arguments")(parser)
    run: Callable[[argparse.Namespace], int] = getattr(loaded, f"run_{command}" if command else "run")
    return run


def _prepare_loadtest(module: str, parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Prepare a load test command, with its errors reported like ours. Raises ConfigError where packages are missing
    that a server does not need."""
    missing = [package for package in _LOADTESTS_NEED if find_spec(package) is None]
    if missing:
        raise ConfigError(f"loadtest needs {' and '.join(missing)}: {how_to_install('loadtest')}")
    from twostroke.loadtests import LoadTestError

    run = _prepare(module, parser)

    def told_like_ours(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except LoadTestError as error:
            raise ConfigError(str(error)) from error

    return told_like_ours


def _nothing(_: argparse.Namespace) -> int:
    raise AssertionError("argparse lets no unknown subcommand through")


def installed_version() -> str:
    try:
        return version("twostroke")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
