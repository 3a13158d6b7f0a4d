"""OpenVINO GenAI behind an OpenAI endpoint, as thin as can be: the library has no HTTP server of its own.

    /tmp/peers/openvino/bin/python benchmarks/peers/openvino_server.py --model FOLDER --port 8102

Runs in the peer's own environment (openvino-genai, openvino, numpy, tokenizers). Between steps of the
library's ContinuousBatchingPipeline the event loop reads requests, turns tokens into text and streams them, one event a
token. What it takes: POST /v1/completions with a prompt of token ids, `max_tokens` and
`stream: true`, always greedy and always ignoring the end-of-text token; the rest of the request is ignored.
"""

import argparse
import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

LOOP_TURNS = 4  # between steps: accept, read, submit, write
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@dataclass(eq=False)
class OpenVinoRequest:
    """A completion on its way; its tokens come on `tokens`, a list for each step, None at the end."""

    prompt: list[int]
    max_tokens: int
    tokens: "asyncio.Queue[list[int] | None]" = field(default_factory=asyncio.Queue)
    cancelled: bool = False


class OpenVinoEngine:
    """Steps the pipeline on the event loop itself, with room for the loop between steps.

    The library keeps Python's lock while it steps: a thread of its own would starve the loop, and tokens of several
    steps would leave at once.
    """

    def __init__(self, pipeline: Any):
        self._pipeline = pipeline
        self._new: asyncio.Queue[OpenVinoRequest] = asyncio.Queue()
        self._running: dict[OpenVinoRequest, Any] = {}  # to the library's handles
        self._requests = 0

    def submit(self, request: OpenVinoRequest) -> None:
        """Take a request."""
        self._new.put_nowait(request)

    async def run(self) -> None:
        """Step for as long as there is work; never returns."""
        while True:
            if not self._running:
                self._add(await self._new.get())
            while not self._new.empty():
                self._add(self._new.get_nowait())
            self._pipeline.step()
            self._deliver()
            for _ in range(LOOP_TURNS):
                await asyncio.sleep(0)

    def _add(self, request: OpenVinoRequest) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        self._running[request] = self._pipeline.add_request(self._requests, prompt, config)
        self._requests += 1

    def _deliver(self) -> None:
        """Give each request the tokens that the step brought, and its end."""
        for request, handle in list(self._running.items()):
            tokens: list[int] = []
            while handle.can_read():
                tokens += handle.read()[0].generated_ids
            if tokens:
                request.tokens.put_nowait(tokens)
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                request.tokens.put_nowait(None)
                del self._running[request]
            elif request.cancelled:
                handle.cancel()


class OpenVinoServer:
    """Enough HTTP for one request a connection."""

    def __init__(self, engine: OpenVinoEngine, tokenizer: Tokenizer, name: str):
        self._engine = engine
        self._tokenizer = tokenizer
        self._name = name

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path, _ = head.split(" ", 2)
            if (method, path) != ("POST", "/v1/completions"):
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            body = json.loads(await reader.readexactly(_content_length(head)))
            await self._stream(OpenVinoRequest(body["prompt"], body["max_tokens"]), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        except (ValueError, KeyError) as error:
            text = json.dumps({"error": {"message": repr(error)}}).encode()
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + text)
        finally:
            writer.close()

    async def _stream(
        self, request: OpenVinoRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._engine.submit(request)
        gone = asyncio.create_task(reader.read())
        gone.add_done_callback(lambda _: setattr(request, "cancelled", True))
        writer.write(HEAD)
        decoder = DecodeStream(skip_special_tokens=True)
        sent = 0
        while (tokens := await request.tokens.get()) is not None:
            for token in tokens:
                sent += 1
                text = decoder.step(self._tokenizer, token) or ""
                writer.write(self._event(text, "length" if sent == request.max_tokens else None))
            await writer.drain()
        usage = {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": sent,
            "total_tokens": len(request.prompt) + sent,
        }
        writer.write(_data({"object": "text_completion", "model": self._name, "choices": [], "usage": usage}))
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        gone.cancel()

    def _event(self, text: str, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return _data({"object": "text_completion", "model": self._name, "choices": [choice]})


def _content_length(head: str) -> int:
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            return int(value)
    raise ValueError("a request needs Content-Length")


def _data(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


async def run(arguments: argparse.Namespace) -> None:
    """Load the model and serve until the process ends."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = arguments.kv_cache_gib
    scheduler.max_num_batched_tokens = 256  # of a step; the library's own default
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(arguments.model),
        scheduler,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": arguments.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",  # the library stores u8 where it may
        },
    )
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    engine = OpenVinoEngine(pipeline)
    server = await asyncio.start_server(
        OpenVinoServer(engine, tokenizer, arguments.name).serve, "127.0.0.1", arguments.port
    )
    print(f"serving {arguments.model} on http://127.0.0.1:{arguments.port}/v1", flush=True)
    await asyncio.gather(engine.run(), server.serve_forever())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder made by `optimum-cli export openvino`")
    parser.add_argument("--name", default="model", help="what the answers call the model")
    parser.add_argument("--port", type=int, default=8102)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
