"""The CUDA backend chooses the right kernels: against the references as a backend, in Triton's interpreter."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor

from tests.kernels.paged_cases import ReferenceBackend, assert_close, make_layout, paged_case
from tests.model.conftest import make_decoder
from twostroke.model.backend import AttentionForm, Backend
from twostroke.model.batch import Drawing, StepInput
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.cuda import backend as cuda_backend
from twostroke.model.cuda import prompt_attention
from twostroke.model.cuda.backend import CudaBackend
from twostroke.model.cuda.kernels.launch import A100, H100
from twostroke.model.cuda.kernels.paged_attention import DecodeTiling
from twostroke.model.cuda.kernels.segments import SplitConfig

pytestmark = pytest.mark.usefixtures("interpreter")

LENGTHS = {
    "decodes and chunks": [(1, 1), (1, 33), (2, 2), (17, 40), (5, 16)],
    "decodes alone": [(1, 16), (1, 17), (1, 2)],
    "chunks alone": [(3, 3), (20, 20)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LENGTHS)
def test_backend_attention_gives_each_kind_of_sequence_to_its_kernel(kind: str, dtype: torch.dtype) -> None:
    case = paged_case(LENGTHS[kind], heads=6, groups=2, dim=64, dtype=dtype)
    actual = CudaBackend(H100).attention(case.q, case.kv_layer, case.layout, case.form)
    assert_close(actual, ReferenceBackend().attention(case.q, case.kv_layer, case.layout, case.form))


def test_long_chunks_over_large_blocks_beside_decodes_are_right() -> None:
    case = paged_case([(1, 33), (1, 130), (70, 70), (3, 90)], heads=4, groups=2, block_size=64, dtype=torch.float16)
    actual = CudaBackend(H100).attention(case.q, case.kv_layer, case.layout, case.form)
    assert_close(actual, ReferenceBackend().attention(case.q, case.kv_layer, case.layout, case.form))


def test_projections_of_many_tokens_are_added_up_in_fp32() -> None:
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    CudaBackend(H100)
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1), (8, 1)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_no_step_launches_a_variant_of_attention_that_was_not_compiled_at_first(
    heads: int, groups: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[object] = set()
    launch = prompt_attention.__name__ + ".prefill_attention"
    monkeypatch.setattr(launch, lambda *arguments: launched.add((arguments[3], arguments[-1])))
    case = paged_case([(1, 5)], heads=heads, groups=groups, block_size=block_size, dtype=torch.float16)
    backend = CudaBackend(H100)
    forms = [AttentionForm(1.0), AttentionForm(1.0, 7), AttentionForm(1.0, 0, 2.0), AttentionForm(1.0, sinks=case.q)]
    for form in forms:
        backend.attention(case.q, case.kv_layer, case.layout, form)
    at_first = set(launched)
    for form, length in (*((forms[0], n) for n in range(2, 300)), *itertools.product(forms, (2, 1000, 100_000))):
        starts = torch.tensor([0, 1], dtype=torch.int32)
        layout = replace(case.layout, query_starts=starts, num_decodes=0, max_query_len=length)
        backend.attention(case.q, case.kv_layer, layout, form)
    assert launched == at_first


@pytest.mark.parametrize(("window", "steps"), [(0, 257), (1024, 17), (1 << 20, 257), (100, 3)])
def test_decodes_are_split_by_the_keys_that_a_window_leaves(
    window: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[DecodeTiling] = []
    monkeypatch.setattr(cuda_backend, "decode_attention", lambda *arguments: configs.append(arguments[-1]))
    case = paged_case([(1, 5)], heads=8, groups=8, dim=128, dtype=torch.float16)
    layout = replace(case.layout, max_context_len=16384)
    CudaBackend(H100).attention(case.q, case.kv_layer, layout, AttentionForm(1.0, window))
    assert configs[-1].split == SplitConfig(264 // 8, steps)


GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 8,
    "sliding_window": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 8.0,
    "query_pre_attn_scalar": 20,
}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("decodes and chunks", {"tie_word_embeddings": True}),
        ("decodes and chunks", GEMMA2),
        ("decodes alone", {}),
        ("chunks alone", OLMO2),
    ],
)
def test_a_decoder_on_the_cuda_backend_computes_what_it_does_on_the_references(
    kind: str, fields: dict[str, Any], write_checkpoint: Callable[..., Path]
) -> None:
    folder, lengths = write_checkpoint(**fields), LENGTHS[kind]
    layout, num_blocks = make_layout(lengths, block_size=16)
    groups = load_model_config(folder).kv_groups
    layouts = [  # each group's in blocks of its own
        replace(layout, slots=layout.slots + 16 * first, block_tables=layout.block_tables + first)
        for first in range(0, groups.count * num_blocks, num_blocks)
    ]
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 96, layout.slots.shape, generator=generator)
    drawing = Drawing(layout.query_starts[1:].long() - 1, torch.arange(len(lengths)))
    # What earlier steps left in the cache: everything but this step's slots, which start as NaN.
    before = torch.randn((groups.num_tensors, groups.count * num_blocks, 2, 2, 16, 8), generator=generator)
    for one in layouts:
        before[:, one.slots // 16, :, :, one.slots % 16] = float("nan")

    def run(backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
        decoder, _ = make_decoder(folder, backend, num_blocks=1, block_size=16, max_context=128)
        caches = before.clone()
        logits = decoder.forward(StepInput(token_ids, layouts, list(caches), drawing))
        assert logits is not None
        return logits, caches

    expected_logits, expected_caches = run(ReferenceBackend())
    logits, caches = run(CudaBackend(A100))
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches, expected_caches, rtol=1e-4, atol=1e-4)


def test_a_layer_of_a_decode_step_is_nine_launches(
    write_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, num_blocks = make_layout([(1, 40), (1, 7)], block_size=16)
    cache = torch.zeros((2, num_blocks, 2, 2, 16, 8))
    rows = torch.arange(2)
    step = StepInput(torch.tensor([3, 4]), [replace(layout, max_context_len=128)], list(cache), Drawing(rows, rows))
    decoder, _ = make_decoder(
        write_checkpoint(num_hidden_layers=2), CudaBackend(A100), num_blocks=1, block_size=16, max_context=128
    )
    decoder.forward(step)  # compiles
    launched: list[str] = []
    run = GridExecutor.__call__

    def count(self: GridExecutor, *arguments: Any, **options: Any) -> None:
        launched.append(self.fn.__name__.removesuffix("_kernel"))
        run(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    decoder.forward(step)
    attention = ["gemm", "rope_kv", "decode_attention", "merge_segments", "gemm", "rms_norm"]
    layer = [*attention, "gemm", "gemm", "rms_norm"]
    assert launched == ["vocab_embedding", "rms_norm", *layer, *layer, "gemm"]


def test_the_bf16_of_these_tests_refuses_arithmetic_that_the_interpreter_gets_wrong() -> None:
    @triton.jit
    def add_narrow(x, out):  # type: ignore[no-untyped-def]
        tl.store(out, tl.load(x) + tl.load(x))

    x = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(triton.runtime.interpreter.InterpreterError, match="arithmetic in fp32"):
        add_narrow[(1,)](x, x.clone())
