"""The choice among kernels for prompts, with made-up kernels and a made-up clock; cuDNN's on torch's arithmetic."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from tests.kernels.paged_cases import ReferenceBackend, assert_close, make_layout, paged_case
from twostroke.model.backend import AttentionForm
from twostroke.model.batch import BatchLayout
from twostroke.model.config import PrefillKernel
from twostroke.model.cuda.kernels.launch import H100
from twostroke.model.cuda.prompt_attention import CudnnKernel, PlainKernel, PromptAttention, PromptKernel

FORM = AttentionForm(1.0)
CACHE = torch.zeros((1, 2, 1, 64, 8), dtype=torch.float16)
Q = torch.zeros((1, 1, 8), dtype=torch.float16)


class FakePlain(PlainKernel):
    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        self.calls.append(layout.max_query_len)
        out.fill_(1.0)

    def lengths(self, q: Tensor, kv_layer: Tensor) -> list[int]:
        return [1]


class FakeKernel(FakePlain):
    """Gives what it is told to, or raises it."""

    def __init__(self, name: PrefillKernel, result: float | Exception = 1.0, knows: bool = True) -> None:
        super().__init__()
        self.name, self._result, self._knows = name, result, knows

    def knows(self, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> bool:
        return self._knows

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        super().__call__(q, kv_layer, layout, form, out)
        if isinstance(self._result, Exception):
            raise self._result
        out.fill_(self._result)


class Attention:
    """Prompts' attention whose kernels take the seconds that `seconds(name, tokens)` gives."""

    def __init__(
        self,
        others: list[FakeKernel],
        seconds: Callable[[str, int], float],
        setting: PrefillKernel = "auto",
        step_s: float = 0.0,
    ) -> None:
        self.plain, self.others, self.timed, self._now, self._step_s = FakePlain(), others, 0, 0.0, step_s
        self._seconds = seconds
        self.attention = PromptAttention(H100, setting, others, self.plain, self._clock, lambda: self._now)

    def _clock(self, call: Callable[[], None]) -> float:
        before = {id(one): len(one.calls) for one in (self.plain, *self.others)}
        call()
        self.timed += 1
        self._now += self._step_s
        ran = next(one for one in (self.plain, *self.others) if len(one.calls) > before[id(one)])
        return self._seconds(ran.name, ran.calls[-1])

    def prepare(self, form: AttentionForm = FORM) -> None:
        empty, _ = make_layout([(1, 1)], block_size=64)
        self.attention.prepare(Q, CACHE, form, empty)

    def taken(self, tokens: int, prefix: int = 0) -> str:
        """The kernel that a chunk goes to."""
        layout, _ = make_layout([(tokens, prefix + tokens)], block_size=64)
        before = {id(one): len(one.calls) for one in (self.plain, *self.others)}
        q = Q.expand(tokens, 1, 8)
        self.attention(q, CACHE, layout, FORM, torch.zeros((tokens, 8), dtype=torch.float16))
        return next(one.name for one in (self.plain, *self.others) if len(one.calls) > before[id(one)])


def flat(**seconds: float) -> Callable[[str, int], float]:
    return lambda name, tokens: seconds[name]


def test_the_fastest_that_is_right_is_taken() -> None:
    fast = Attention([FakeKernel("tma"), FakeKernel("cudnn")], flat(plain=3.0, tma=2.0, cudnn=1.0))
    fast.prepare()
    assert fast.taken(1000) == "cudnn"


@pytest.mark.parametrize(
    "kernel",
    [
        FakeKernel("cudnn", 1.1),
        FakeKernel("cudnn", float("nan")),
        FakeKernel("cudnn", RuntimeError("no kernel")),
        FakeKernel("cudnn", knows=False),
    ],
    ids=["wrong", "nan", "raises", "does not know the form"],
)
def test_a_kernel_that_is_wrong_or_fails_or_does_not_know_the_form_is_not_taken(kernel: FakeKernel) -> None:
    one = Attention([kernel], flat(plain=3.0, cudnn=1.0))
    one.prepare()
    assert one.taken(1000) == one.taken(300) == "plain"


def test_a_kernel_that_is_slower_or_as_good_as_equal_is_not_taken() -> None:
    one = Attention([FakeKernel("tma"), FakeKernel("cudnn")], flat(plain=1.0, tma=1.5, cudnn=0.97))
    one.prepare()
    assert one.taken(1000) == "plain"


def test_the_choice_is_by_length() -> None:
    def seconds(name: str, tokens: int) -> float:
        return 0.5 if name == "tma" and tokens > 1000 else {"plain": 1.0, "tma": 2.0}[name]

    one = Attention([FakeKernel("tma")], seconds)
    one.prepare()
    assert [one.taken(tokens) for tokens in (500, 1000, 2000, 4000, 9000)] == ["plain", "plain", "tma", "tma", "tma"]
    assert one.taken(2000, prefix=100) == "tma"
    assert one.taken(100) == "tma"  # untimed: as where nothing is timed


def test_each_shape_and_form_is_timed_once_and_within_a_bound() -> None:
    one = Attention([FakeKernel("tma")], flat(plain=2.0, tma=1.0))
    one.prepare()
    first = one.timed
    one.prepare()
    assert one.timed == first == 16  # two kernels, four lengths, with a prefix and without
    one.prepare(AttentionForm(1.0, 7))
    assert one.timed == 2 * first
    slow = Attention([FakeKernel("tma")], flat(plain=1.0, tma=2.0), step_s=0.4)
    slow.prepare()
    assert slow.timed == 4
    assert (slow.taken(500), slow.taken(1000)) == ("plain", "tma")


def test_a_kernel_that_is_set_is_taken_and_not_timed_and_says_where_it_can_not_be() -> None:
    one = Attention([FakeKernel("tma"), FakeKernel("cudnn")], flat(plain=1.0, cudnn=2.0), "cudnn")
    one.prepare()
    assert one.taken(1000) == "cudnn"
    for other, told in ((FakeKernel("cudnn", knows=False), "know"), (FakeKernel("cudnn", 2.0), "fails")):
        with pytest.raises(ValueError, match=told):
            Attention([other], flat(plain=1.0, cudnn=2.0), "cudnn").prepare()


@pytest.mark.parametrize("tokens", [448, 511, 512])
def test_cudnns_chunks_are_padded_without_an_effect(tokens: int) -> None:
    lengths = [(1, 5), (tokens, tokens)]
    case = paged_case(lengths, heads=4, groups=2, dim=16, block_size=64, dtype=torch.bfloat16)
    kernel: PromptKernel = CudnnKernel(SDPBackend.MATH)
    assert kernel.takes(case.q, case.kv_layer, case.layout)
    out = torch.zeros((len(case.q), 64), dtype=torch.bfloat16)
    kernel(case.q, case.kv_layer, case.layout, case.form, out)
    expected = ReferenceBackend().attention(case.q, case.kv_layer, case.layout, case.form)
    assert_close(out[1:], expected[1:])
    assert not out[0].any()


@pytest.mark.parametrize("lengths", [[(447, 447)], [(512, 513)], [(256, 512), (256, 300)], [(1, 600), (512, 512)]])
def test_cudnn_takes_no_prefix_and_no_length_that_was_not_compiled(lengths: list[tuple[int, int]]) -> None:
    layout, _ = make_layout(lengths, block_size=64)
    q = torch.zeros((sum(query for query, _ in lengths), 1, 8), dtype=torch.float16)
    assert not CudnnKernel().takes(q, CACHE, layout)


@pytest.mark.parametrize(
    "form", [AttentionForm(1.0, 7), AttentionForm(1.0, 0, 2.0), AttentionForm(1.0, sinks=torch.zeros(1))], ids=str
)
def test_cudnn_knows_plain_attention_alone(form: AttentionForm) -> None:
    assert CudnnKernel().knows(Q, CACHE, FORM)
    assert not CudnnKernel().knows(Q, CACHE, form)
    assert not CudnnKernel().knows(Q, CACHE.to(torch.float8_e4m3fn), FORM)
