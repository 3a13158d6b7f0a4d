"""The stub server in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.selfcheck.stub_server import Served

MODEL = "stub"
VOCABULARY = 32_000
END_LIMIT_S = 30.0


@dataclass
class Stub:
    """A running stub; what it served is known once it has ended."""

    url: str
    served: list[Served] = field(default_factory=list)


@contextmanager
def stub_server(scenario: str, log: Path) -> Iterator[Stub]:
    """Until the block's end; then `served` is filled from `log`. Raises LoadTestError where it did not start or end."""
    command = [sys.executable, "-m", "twostroke.loadtests.selfcheck.stub_server", "--scenario", scenario]
    command += ["--model", MODEL, "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise LoadTestError(f"the stub server ended with {process.wait()} before it served")
            stub = Stub(f"http://127.0.0.1:{port}")
            yield stub
            process.terminate()
            if process.wait(END_LIMIT_S) != 0:
                raise LoadTestError(f"the stub server ended with {process.returncode}, and its log is not whole")
        finally:
            process.kill()
    decode = msgspec.json.Decoder(Served).decode
    stub.served += map(decode, log.read_bytes().splitlines())
