"""The sampler against a naive oracle that does one row at a time in float64, and against its own promises."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.model.conftest import draw_batch
from twostroke.model.cpu.kernels.sampling import CpuSampling, _uniform
from twostroke.model.sampling.sampler import MIN_LOGPROB, Sampler, TorchSampling, _gumbel, adjust, row_keys
from twostroke.model.step import BrokenLogits, Draw, RowFault, is_penalised
from twostroke.protocol.requests import SampledToken, SamplingParams

VOCAB = 61
CPU = torch.device("cpu")
HISTORY = (3, 5, 5, 9, 5, 7, 7, 11)  # the first 4 are the prompt
WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


@pytest.fixture(scope="module", autouse=True)
def one_thread():  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["numba", "torch"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return make_sampler(request.param)


def make_sampler(kind: str = "numba", vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, TorchSampling() if kind == "torch" else CpuSampling(vocab_size))


def draw(forbidden: tuple[int, ...] = (), history: tuple[int, ...] = HISTORY, **sampling: object) -> Draw:
    return Draw(SamplingParams(**sampling), history, num_prompt_tokens=4, forbidden=forbidden)  # type: ignore[arg-type]


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32))


# --- the oracle ---


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def gumbel(seed: int, position: int, token: int) -> float:
    key = mix((mix((seed + GOLDEN) & WORD) + position * GOLDEN) & WORD)
    bits = mix((key + (token + 1) * GOLDEN) & WORD)
    return -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))


def oracle(logits: NDArray[np.float32], draw: Draw, position: int) -> tuple[int, list[int]]:
    """The token, and the tokens that it was drawn from, the likeliest first."""
    params = draw.sampling
    adjusted = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        adjusted[token] += bias
    for token in set(draw.history):
        adjusted[token] *= params.repetition_penalty if adjusted[token] < 0 else 1 / params.repetition_penalty
    for token, count in Counter(draw.history[draw.num_prompt_tokens :]).items():
        adjusted[token] -= params.frequency_penalty * count + params.presence_penalty
    adjusted[list(draw.forbidden)] = -math.inf

    order = [int(token) for token in np.lexsort((np.arange(len(adjusted)), -adjusted)) if adjusted[token] > -math.inf]
    if params.temperature == 0:
        return order[0], order[:1]
    scaled = (adjusted - adjusted[order[0]]) / params.temperature
    kept = [token for token in order if math.exp(scaled[token]) >= params.min_p]
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        masses = [math.exp(scaled[token]) for token in kept]
        needed = 1 + sum(mass < params.top_p * sum(masses) for mass in np.cumsum(masses))
        kept = kept[:needed]
    return max(kept, key=lambda token: scaled[token] + gumbel(params.seed, position, token)), kept


def check_against_oracle(sampler: Sampler, logits: torch.Tensor, draws: list[Draw], positions: list[int]) -> None:
    expected = [
        oracle(row, drawn, position)[0] for row, drawn, position in zip(logits.numpy(), draws, positions, strict=True)
    ]
    assert [result.token_id for result in sampler.sample(logits.clone(), draws, positions)] == expected


PARAMETERS: list[dict[str, object]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1e-9},
    {"temperature": 1e9},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB + 100},
    {"top_p": 1e-12},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 2.0, "min_p": 0.02, "top_k": 12, "top_p": 0.8},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "temperature": 0},
    {"logit_bias": ((4, 100.0),)},
    {"logit_bias": ((4, -100.0), (5, 3.0)), "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"forbidden": (0, 1, 2, 40)},
    {"forbidden": tuple(token for token in range(VOCAB) if token != 17)},
    {"forbidden": (5, 7), "temperature": 0, "logit_bias": ((5, 100.0), (8, 6.0))},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_every_parameter_draws_what_the_oracle_draws(sampler: Sampler, parameters: dict[str, object]) -> None:
    logits = random_logits(1, rows=24)
    check_against_oracle(sampler, logits, [draw(seed=seed, **parameters) for seed in range(24)], list(range(8, 32)))  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=2, max_size=40).filter(lambda values: max(values) > -12),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1e-6, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    penalties=st.tuples(*[st.sampled_from([0.0, 0.25, -1.5])] * 2, st.sampled_from([1.0, 0.5, 2.0])),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**40),
)
def test_logits_full_of_equals_draw_what_the_oracle_draws(
    logits: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, float, float],
    seed: int,
    position: int,
) -> None:
    """-12 stands for -inf. Quarters stay exact under these penalties, so equals stay equals."""
    row = torch.tensor([[value / 4 if value > -12 else -math.inf for value in logits]])
    presence, frequency, repetition = penalties
    drawn = draw(
        history=tuple(index % len(logits) for index in HISTORY),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        seed=seed,
    )
    for kind in ("numba", "torch"):
        check_against_oracle(make_sampler(kind, len(logits)), row, [drawn], [position])


# --- what a token depends on ---


def test_a_row_alone_is_the_row_in_any_batch_and_order(sampler: Sampler) -> None:
    draws = [draw(seed=i, logprobs=i % 4 or None, **parameters) for i, parameters in enumerate(PARAMETERS)]  # type: ignore[arg-type]
    logits = random_logits(3, len(draws))
    positions = list(range(50, 50 + len(draws)))
    together = sampler.sample(logits.clone(), draws, positions)
    alone = [sampler.sample(logits[i : i + 1].clone(), [draws[i]], [positions[i]])[0] for i in range(len(draws))]
    assert together == alone
    order = np.random.default_rng(0).permutation(len(draws)).tolist()
    shuffled = sampler.sample(logits[order].clone(), [draws[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_draws_are_pinned_so_that_other_releases_and_devices_draw_alike(sampler: Sampler) -> None:
    flat = torch.zeros(6, VOCAB)
    seeds = [0, 1, 1, -1, 2**64 - 1, 2**63]
    results = sampler.sample(flat, [draw(seed=seed) for seed in seeds], [0, 0, 1, 7, 7, 10**6])
    assert [result.token_id for result in results] == [46, 9, 1, 49, 49, 60]


def test_the_oracles_generator_is_splitmix64() -> None:
    """The first outputs for seed 1234567, as published with other implementations."""
    outputs = [mix((1234567 + step * GOLDEN) & WORD) for step in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_both_kernels_noise_is_the_oracles_to_the_last_bits() -> None:
    # A wrong shift can hide in bits that seldom change which token wins.
    seeds, positions = [0, 3, 2**64 - 1], [0, 1, 2**33]
    keys = row_keys(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    expected = [[gumbel(seed, at, token) for token in range(500)] for seed, at in zip(seeds, positions, strict=True)]
    assert _gumbel(keys, 500, CPU).numpy() == pytest.approx(np.array(expected), rel=1e-13, abs=1e-13)
    numba = [[-math.log(-math.log(_uniform(key, token))) for token in range(500)] for key in keys]
    assert numba == expected


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize(
    "parameters", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str
)
def test_draws_follow_the_distribution(along: str, parameters: dict[str, object]) -> None:
    """Chi-square at the 1e-4 level; seeded, so it passes always or never."""
    num_draws = 4000
    row = random_logits(7, vocab=16, scale=1.0)
    spread = range(num_draws)
    draws = [draw(seed=i if along == "seeds" else 77, **parameters) for i in spread]  # type: ignore[arg-type]
    positions = [5] * num_draws if along == "seeds" else list(spread)
    sampled = make_sampler(vocab_size=16).sample(row.expand(num_draws, -1).contiguous(), draws, positions)
    _, kept = oracle(row.numpy()[0], draws[0], 0)
    scaled = row.double()[0, kept] / draws[0].sampling.temperature
    expected = scaled.softmax(-1).numpy() * num_draws
    counts = Counter(token.token_id for token in sampled)
    assert set(counts) <= set(kept)
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in zip(kept, expected, strict=True))
    degrees = len(kept) - 1
    # Wilson and Hilferty's approximation of the quantile, 3.72 standard deviations out.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


# --- log-probabilities ---


def test_logprobs_are_of_the_raw_distribution_whatever_the_request_does_to_it(sampler: Sampler) -> None:
    logits = random_logits(11, rows=4)
    draws = [
        draw(temperature=0, logprobs=3),
        draw(temperature=3.0, top_k=9, logprobs=5, seed=1),
        draw(logit_bias=((2, 100.0),), repetition_penalty=1.5, logprobs=0),
        draw(temperature=0),
    ]
    raw = logits.double().log_softmax(-1).numpy()
    results = sampler.sample(logits.clone(), draws, [8, 9, 10, 11])
    for row, result, count in zip(raw[:3], results, (3, 5, 0), strict=False):
        likeliest = np.argsort(-row)[:count].tolist()
        assert result.logprob == pytest.approx(row[result.token_id], abs=1e-12)
        assert [token for token, _ in result.top] == likeliest
        assert [logprob for _, logprob in result.top] == pytest.approx(row[likeliest].tolist(), abs=1e-12)
    assert results[2].token_id == 2
    assert (results[3].logprob, results[3].top) == (None, ())


def test_all_probabilities_sum_to_one(sampler: Sampler) -> None:
    for scale in (0.0, 1.0, 50.0):
        (result,) = sampler.sample(random_logits(2, scale=scale), [draw(logprobs=VOCAB + 5)], [0])
        assert sorted(token for token, _ in result.top) == list(range(VOCAB))
        assert sum(math.exp(logprob) for _, logprob in result.top) == pytest.approx(1.0, abs=1e-12)
        logprobs = [logprob for _, logprob in result.top]
        assert logprobs == sorted(logprobs, reverse=True)


def test_equal_alternatives_come_in_the_order_of_their_ids(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 30] = 1.0
    (result,) = sampler.sample(logits, [draw(logprobs=4)], [0])
    assert [token for token, _ in result.top] == [30, 0, 1, 2]


def test_impossible_tokens_have_a_finite_logprob(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 6] = 2.0
    (result,) = sampler.sample(logits, [draw(logprobs=2)], [0])
    assert result == SampledToken(6, 0.0, ((6, 0.0), (0, MIN_LOGPROB)))


# --- extremes ---


@pytest.mark.parametrize("parameters", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0}], ids=str)
def test_the_narrowest_filters_are_greedy_even_among_equals(sampler: Sampler, parameters: dict[str, object]) -> None:
    logits = torch.zeros(20, VOCAB)
    logits[:, [8, 20, 33]] = 4.0
    results = sampler.sample(logits, [draw(seed=i, **parameters) for i in range(20)], [0] * 20)  # type: ignore[arg-type]
    assert {result.token_id for result in results} == {8}


@pytest.mark.parametrize("equals", [True, False])
@pytest.mark.parametrize("top_k", [2, 256, 257, 399, 400])
def test_top_k_keeps_exactly_k_tokens(sampler: Sampler, top_k: int, equals: bool) -> None:
    vocab, rows = 400, 6000
    row = torch.zeros(vocab) if equals else torch.arange(vocab, 0, -1) / 1e4
    wide = make_sampler("numba" if isinstance(sampler._kernels, CpuSampling) else "torch", vocab)
    results = wide.sample(row.repeat(rows, 1), [draw(seed=i, top_k=top_k) for i in range(rows)], [0] * rows)
    assert {result.token_id for result in results} == set(range(top_k))


def test_ids_outside_the_vocabulary_have_no_effect_on_any_row(sampler: Sampler) -> None:
    logits = random_logits(4, rows=3)
    strange = draw(temperature=0, logit_bias=((VOCAB, 100.0), (VOCAB + 9, 100.0)), forbidden=(VOCAB + 1, 10**9))
    plain = draw(temperature=0)
    results = sampler.sample(logits.clone(), [plain, strange, plain], [0, 0, 0])
    assert [result.token_id for result in results] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}], ids=str)
def test_a_row_that_forbids_everything_harms_nobody(sampler: Sampler, parameters: dict[str, object]) -> None:
    logits = random_logits(5, rows=3)
    everything = draw(forbidden=tuple(range(VOCAB)), logprobs=1, **parameters)  # type: ignore[arg-type]
    neighbours = [draw(seed=1), draw(seed=2)]
    results = sampler.sample(logits.clone(), [neighbours[0], everything, neighbours[1]], [4, 4, 4])
    alone = sampler.sample(logits[[0, 2]].clone(), neighbours, [4, 4])
    assert [results[0], results[2]] == alone
    assert results[1].token_id == 0
    assert sampler.num_broken_rows == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_counted_and_touch_no_neighbour(sampler: Sampler, bad: float, temperature: float) -> None:
    logits = random_logits(5, rows=3)
    broken = logits.clone()
    broken[1, [4, 50]] = torch.tensor([bad, -math.inf])
    draws = [draw(seed=i, temperature=temperature, logprobs=2) for i in range(3)]
    results = sampler.sample(broken, draws, [1, 2, 3])
    clean = sampler.sample(logits, draws, [1, 2, 3])
    assert [results[0], results[2]] == [clean[0], clean[2]]
    assert results[1].token_id == 4 if bad == math.inf else results[1].token_id not in (4, 50)
    assert all(math.isfinite(logprob) for _, logprob in results[1].top)
    assert sampler.num_broken_rows == 1


def test_an_empty_batch_draws_nothing(sampler: Sampler) -> None:
    assert sampler.sample(torch.empty(0, VOCAB), [], []) == []


@pytest.mark.parametrize(
    ("logits", "num_positions"),
    [
        (torch.zeros(2, VOCAB), 1),
        (torch.zeros(1, VOCAB), 2),
        (torch.zeros(2, VOCAB + 1), 2),
        (torch.zeros(2, VOCAB, dtype=torch.float64), 2),
    ],
)
def test_arguments_that_do_not_fit_are_refused(sampler: Sampler, logits: torch.Tensor, num_positions: int) -> None:
    with pytest.raises(ValueError, match="draws"):
        sampler.sample(logits, [draw(), draw()], [0] * num_positions)


# --- numba against torch, on vocabularies where their ways part ---


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("grain", [0.0, 0.125])  # coarse logits have many equals, as bf16 ones do
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (50, 1.0, 0.0), (900, 0.7, 0.0), (0, 0.9, 0.0), (4000, 0.99, 0.01)])
def test_numba_and_torch_draw_alike_from_a_large_vocabulary(
    filters: tuple[int, float, float], grain: float, scale: float
) -> None:
    vocab, rows = 5000, 6
    logits = random_logits(int(scale * 100), rows, vocab, scale)
    if grain:
        logits = (logits / grain).round() * grain
    batch = draw_batch(rows, filters, (0.1, 0.5, 1.0, 1.0, 2.0, 10.0))
    numba, reference = CpuSampling(vocab), TorchSampling()
    best, maxima = numba.argmax(logits)
    assert best.tolist() == reference.argmax(logits)[0].tolist()
    assert maxima.tolist() == reference.argmax(logits)[1].tolist()
    assert numba.draw(logits, best, batch).tolist() == reference.draw(logits, best, batch).tolist()
    assert numba.largest(logits, batch.rows, 20).tolist() == reference.largest(logits, batch.rows, 20).tolist()
    assert numba.log_sum_exp(logits, batch.rows) == pytest.approx(reference.log_sum_exp(logits, batch.rows), rel=1e-14)


def test_only_allowed_tokens_are_drawn() -> None:
    logits = torch.randn((3, 40), generator=torch.Generator().manual_seed(1))
    draws = [Draw(SamplingParams(temperature=2.0, allowed_token_ids=(7, 9)), [1], 1) for _ in range(2)]
    drawn = [
        token.token_id
        for position in range(50)
        for token in Sampler(40).sample(logits.clone(), [*draws, Draw(SamplingParams(), [1], 1)], [position] * 3)[:2]
    ]
    assert set(drawn) == {7, 9}


@pytest.mark.parametrize(
    ("forbidden", "bad_words", "drawn"),
    [
        ((7, 9), (), {7, 9}),
        ((), ((7,), (9,)), {7, 9}),
        ((7,), ((9,),), {7, 9}),
        ((7,), (), {9}),
        ((7, 3), ((3,),), {9}),
    ],
)
def test_no_token_outside_of_the_allowed_is_drawn_whatever_else_forbids_them(
    forbidden: tuple[int, ...], bad_words: tuple[tuple[int, ...], ...], drawn: set[int]
) -> None:
    sampling = SamplingParams(temperature=2.0, allowed_token_ids=(7, 9), bad_words=bad_words)
    held = Draw(sampling, [1], 1, forbidden)
    logits = torch.randn((1, 40), generator=torch.Generator().manual_seed(1))
    found = {Sampler(40).sample(logits.clone(), [held], [position])[0].token_id for position in range(50)}
    assert found == drawn


@pytest.mark.parametrize(
    ("outputs", "banned"), [([], [3]), ([5], [3]), ([5, 6], [3, 8]), ([6, 5], [3, 6]), ([2, 5, 6], [3, 8])]
)
def test_a_bad_word_never_gets_its_last_token(outputs: list[int], banned: list[int]) -> None:
    sampling = SamplingParams(temperature=0.0, bad_words=((3,), (5, 6, 8), (6, 5, 6)))
    logits = torch.zeros((1, 10))
    adjust(logits, [0], [Draw(sampling, [5, 6, *outputs], 2)])
    assert (logits[0] == -math.inf).nonzero().flatten().tolist() == banned
    assert is_penalised(sampling)


def test_a_row_that_can_not_be_adjusted_fails_alone(sampler: Sampler) -> None:
    logits = random_logits(3, rows=5)
    draws = [draw(temperature=1.0, seed=seed, logit_bias=((seed, 2.0),)) for seed in range(5)]
    expected = sampler.sample(logits.clone(), draws, [8] * 5)
    fault = RowFault()
    broken = Draw(SamplingParams(logit_bias=((2**70, 1.0),)), HISTORY, 4, fault=fault)
    found = sampler.sample(logits.clone(), [*draws[:2], broken, *draws[3:]], [8] * 5)
    assert isinstance(fault.error, OverflowError)
    assert found[:2] + found[3:] == expected[:2] + expected[3:]
    with pytest.raises(OverflowError):
        sampler.sample(logits[:1].clone(), [Draw(broken.sampling, HISTORY, 4)], [8])


def test_allowed_tokens_that_the_model_does_not_have_allow_nothing(sampler: Sampler) -> None:
    drawn = sampler.sample(random_logits(4), [draw(allowed_token_ids=(10**6, 7, -3))], [8])
    assert drawn == [SampledToken(7)]


def test_a_row_without_a_number_is_its_draws_fault(sampler: Sampler) -> None:
    logits = random_logits(5, rows=3)
    logits[1], logits[2, 4] = math.nan, math.nan
    faults = [RowFault() for _ in range(3)]
    draws = [Draw(SamplingParams(seed=row), HISTORY, 4, fault=fault) for row, fault in enumerate(faults)]
    sampler.sample(logits.clone(), draws, [8] * 3)
    assert [isinstance(fault.error, BrokenLogits) for fault in faults] == [False, True, False]
    assert sampler.num_broken_rows == 2
    of_ranks = [Draw(SamplingParams(), HISTORY, 4, fault=RowFault()) for _ in range(3)]
    sampler.take(torch.tensor([[0, 0, 7], [0, 1, 1]]), of_ranks)
    assert [one.fault is not None and one.fault.error is not None for one in of_ranks] == [False, True, False]


def test_broken_rows_of_scored_prompts_are_not_counted_with_those_that_are_drawn(sampler: Sampler) -> None:
    scored = torch.full((50, VOCAB), math.nan)
    sampler.score(scored, np.zeros(50, np.int64), 2)
    assert sampler.num_broken_rows == 0, "they would outnumber the sound draws beside them"
    sampler.sample(torch.full((1, VOCAB), math.nan), [draw()], [4])
    assert sampler.num_broken_rows == 1
