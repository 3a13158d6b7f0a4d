"""The choice of the kernel for prompts: FlashAttention-3 by a stand-in, which computes with torch what it is asked."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import PagedCase, ReferenceBackend, assert_close, make_layout, paged_case
from tests.rigs import reference
from twostroke.model.backend import AttentionForm
from twostroke.model.config import PrefillKernel
from twostroke.model.cuda.backend import CudaBackend
from twostroke.model.cuda.kernels.launch import A100, B200, H100, GpuTarget
from twostroke.model.cuda.prompt_attention import PromptAttention, rows_like

pytestmark = pytest.mark.usefixtures("interpreter")
EMPTY, _ = make_layout([(1, 1)], block_size=64)


class Flash:
    """The package flash_attn_interface as its page documents it; `fault` is added to a value, or raised."""

    def __init__(self, fault: float | Exception = 0.0):
        self.fault, self.calls = fault, 0

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
        cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        softcap: float, num_splits: int,
    ) -> Tensor:  # fmt: skip
        """q [tokens, heads, dim]; caches [blocks, block size, groups, dim]."""
        self.calls += 1
        if isinstance(self.fault, Exception):
            raise self.fault
        assert causal
        assert num_splits == 1
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert window_size == (-1, -1) or window_size[1] == 0
        form = AttentionForm(softmax_scale, window_size[0] + 1, softcap)
        kv = torch.stack((k_cache, v_cache), 1).transpose(2, 3)
        starts = cu_seqlens_q - cu_seqlens_q[0]
        rows = q[cu_seqlens_q[0] :]
        out = reference.paged_attention(rows, kv, starts, cache_seqlens, page_table, form)
        out[-1, 0] += self.fault
        return torch.cat((torch.full_like(q[: cu_seqlens_q[0]], float("nan")), out.view(rows.shape)))


def small(**form: Any) -> PagedCase:
    lengths = [(1, 33), (70, 70), (3, 90)]
    return paged_case(lengths, heads=4, groups=2, dim=16, block_size=64, dtype=torch.bfloat16, **form)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Flash:
    """FlashAttention-3 as a package that can be imported."""
    flash = Flash()
    module = SimpleNamespace(flash_attn_with_kvcache=flash.flash_attn_with_kvcache, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)  # type: ignore[arg-type]
    return flash


def attended(case: PagedCase, setting: PrefillKernel = "fa3", target: GpuTarget = H100) -> Tensor:
    attention = PromptAttention(target, setting)
    out = torch.full_like(rows_like(case.q), float("nan"))
    attention.prepare(case.q, case.kv_layer, case.form, EMPTY)
    attention(case.q, case.kv_layer, case.layout, case.form, out)
    return out


@pytest.mark.parametrize("form", [{}, {"window": 20}, {"soft_cap": 2.0}], ids=str)
def test_flash_attention_is_taken_where_it_is_asked_for(form: dict[str, Any], installed: Flash) -> None:
    case = small(**form)
    out = attended(case)
    assert installed.calls == 2  # the check, and the batch
    assert out[:1].isnan().all()  # a decode's row
    assert_close(out[1:], ReferenceBackend().attention(case.q, case.kv_layer, case.layout, case.form)[1:])


def test_a_backend_checks_flash_attention_once(installed: Flash) -> None:
    case, backend = small(), CudaBackend(H100, "fa3")
    for _ in range(2):
        out = backend.attention(case.q, case.kv_layer, case.layout, case.form)
        assert_close(out, ReferenceBackend().attention(case.q, case.kv_layer, case.layout, case.form))
    assert installed.calls == 3  # the check, and a batch each


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (0.1, "is wrong"),
        (float("nan"), "is wrong"),
        (RuntimeError("no kernel image\nis there"), "fails on this GPU (no kernel image)"),
        (TypeError("unexpected keyword argument 'page_table'"), "fails on this GPU (unexpected keyword"),
    ],
    ids=str,
)
def test_flash_attention_that_fails_or_is_wrong_is_an_error_at_the_start(
    fault: float | Exception, told: str, installed: Flash
) -> None:
    installed.fault = fault
    with pytest.raises(ValueError, match=re.escape(f"prefill_kernel: fa3 {told}")):
        attended(small())


@pytest.mark.parametrize("target", [A100, B200], ids=["A100", "B200"])
def test_flash_attention_is_for_hopper_alone(target: GpuTarget, installed: Flash) -> None:
    with pytest.raises(ValueError, match="needs a Hopper GPU and the package flash_attn_interface"):
        attended(small(), target=target)


def test_without_the_package_asking_for_it_is_an_error_and_prompts_go_by_the_plain_kernel() -> None:
    assert not attended(small(), "plain")[1:].isnan().any()
    with pytest.raises(ValueError, match="set prefill_kernel: plain"):
        attended(small())


def test_nothing_takes_it_unasked_and_sinks_are_an_error(installed: Flash) -> None:
    attended(small(), "plain")
    assert installed.calls == 0
    with pytest.raises(ValueError, match="doesn't know sinks"):
        attended(small(has_sinks=True))
    with pytest.raises(ValueError, match="doesn't know sinks, chunks"):
        attended(small(window=-16))
