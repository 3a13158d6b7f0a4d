"""The server's queues and KV use, about once a second, from its Prometheus text: ours, or vLLM's."""

import re
import threading
import time
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from types import TracebackType

import msgspec

from twostroke.loadtests.errors import unwritable
from twostroke.loadtests.generator.run_facts import get
from twostroke.loadtests.run_folder import Sample

INTERVAL_S = 1.0
TIMEOUT_S = 2.0

# Our names are vLLM's with another prefix; the last was its name for KV use before.
_FIELDS = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "waiting_tokens": ("num_waiting_tokens",),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
_LINE = re.compile(r"^(?:twostroke|vllm):(\w+)\{([^}]*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples_of(metrics: str, at_s: float) -> list[Sample]:
    """One of each worker that the text tells of. vLLM has no roles and no worker ids: its engines are `decode`."""
    workers: dict[tuple[str, str], dict[str, float]] = {}
    fields = {name: field for field, names in _FIELDS.items() for name in names}
    for line in metrics.splitlines():
        match = _LINE.match(line)
        if match is None or match[1] not in fields:
            continue
        labels: dict[str, str] = dict(_LABEL.findall(match[2]))
        worker = (labels.get("role", "decode"), labels.get("worker") or labels.get("engine", "0"))
        workers.setdefault(worker, {})[fields[match[1]]] = float(match[3])
    return [
        Sample(at_s, role, worker, **{field: values.get(field, 0.0) for field in _FIELDS})
        for (role, worker), values in sorted(workers.items())
    ]


class Sampler:
    """A thread that samples from `begin` on, for as long as the context lasts. A server that tells nothing has none."""

    def __init__(self, url: str, path: Path):
        self._url = url
        self._path = path
        self._began = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: str | None = None  # why nothing more is sampled

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, began: float) -> None:
        """`began` is the run's beginning by the monotonic clock."""
        self._began = began
        self._thread = threading.Thread(target=self._sample_on, name="sampling", daemon=True)
        self._thread.start()

    def _sample_on(self) -> None:
        while not self._ended.is_set():
            samples = self._look()
            try:
                self._write(samples)
            except OSError as error:
                self.error = str(unwritable(self._path, error))
                return
            self._ended.wait(INTERVAL_S)

    def _look(self) -> list[Sample]:
        at_s = time.monotonic() - self._began
        try:
            return samples_of(get(self._url, "/metrics", TIMEOUT_S).decode(errors="replace"), at_s)
        except (OSError, HTTPException, ValueError):
            return []  # a gap in the curve says it

    def _write(self, samples: Iterable[Sample]) -> None:
        lines = [msgspec.json.encode(sample) + b"\n" for sample in samples]
        if lines:
            with self._path.open("ab") as file:
                file.write(b"".join(lines))
