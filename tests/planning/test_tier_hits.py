"""Shares that prefix caches and KV tiers hold of a trace, beside a replay of all history, and plans with them."""

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.cluster.command_line import one_line
from twostroke.cluster.cli import main
from twostroke.planning.commands.options import tier_hit_shares, tier_option
from twostroke.planning.costs.profiles import H100, ONE_B
from twostroke.planning.costs.tier_hits import CACHE, TierSize, found_shares, with_hits

TOKEN_BYTES = 10.0
Prompt = list[tuple[int, int]]


def trace(seed: int, count: int = 120) -> list[Prompt]:
    """Prompts that go on with earlier ones, or begin anew; names of equal prefixes are equal."""
    draw = random.Random(seed)
    prompts: list[Prompt] = [[(0, 16)]]
    for _ in range(count):
        before = draw.choice(prompts[-draw.choice((3, 10, 40)) :])
        kept = before[: draw.randint(0, len(before))]
        new = [(draw.getrandbits(40), draw.choice((16, 16, 5))) for _ in range(draw.randint(0, 4))]
        prompts.append([*kept, *new] or [(draw.getrandbits(40), 16)])
    return prompts


def held(history: Sequence[tuple[int, int]], num_bytes: float) -> set[int]:
    """Names that a place of so many bytes holds after these uses: the last ones, until the next has no room."""
    names: set[int] = set()
    for name, tokens in reversed(history):
        if name not in names:
            num_bytes -= tokens * TOKEN_BYTES
            if num_bytes < 0:
                break
            names.add(name)
    return names


def followed(prompts: Sequence[Prompt], sizes: Sequence[float], min_uses: int) -> list[float]:
    """Shares by place, each place looked up in the history of all its uses."""
    histories: list[list[tuple[int, int]]] = [[] for _ in sizes]
    found, total, all_uses = [0] * len(sizes), 0, list[int]()
    for prompt in prompts:
        total += sum(tokens for _, tokens in prompt)
        left = sum(tokens for _, tokens in prompt) - 1
        places = [held(history, size) for history, size in zip(histories, sizes, strict=True)]
        for name, tokens in prompt:
            holding = [number for number, place in enumerate(places) if name in place]
            if not holding:
                break
            found[holding[0]] += min(tokens, left)
            left -= tokens
        for name, tokens in reversed(prompt):
            all_uses.append(name)
            histories[0].append((name, tokens))
            if all_uses.count(name) >= min_uses:
                for history in histories[1:]:
                    history.append((name, tokens))
    return [one / total for one in found]


@pytest.mark.parametrize("min_uses", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_replay_finds_what_the_last_uses_of_each_place_hold(seed: int, min_uses: int) -> None:
    prompts, draw = trace(seed), random.Random(seed)
    sizes = [draw.choice((0.0, 500.0, 2000.0, 8000.0)) for _ in range(3)]
    tiers = [TierSize(f"tier-{number}", size) for number, size in enumerate(sizes[1:])]
    shares = found_shares(prompts, TOKEN_BYTES, sizes[0], tiers, min_uses)
    assert list(shares) == [CACHE, "tier-0", "tier-1"]
    assert list(shares.values()) == pytest.approx(followed(prompts, sizes, min_uses))


@pytest.mark.parametrize("seed", range(6))
def test_what_the_first_places_hold_together_never_shrinks_where_one_grows(seed: int) -> None:
    prompts, draw = trace(seed, 400), random.Random(seed)
    sizes = [draw.uniform(0, 4000) for _ in range(4)]

    def together() -> list[float]:
        shares = list(
            found_shares(prompts, TOKEN_BYTES, sizes[0], [TierSize(str(one), one) for one in sizes[1:]]).values()
        )
        return [sum(shares[: number + 1]) for number in range(len(shares))]

    before = together()
    for _ in range(12):
        number = draw.randrange(4)
        sizes[number] *= draw.uniform(1.0, 2.0)
        after = together()
        assert all(now >= then - 1e-12 for now, then in zip(after, before, strict=True)), sizes
        before = after
    sizes[:] = [math.inf] * 4
    assert together()[0] >= before[-1]


def test_a_tier_takes_a_block_at_its_second_use_and_the_last_token_of_a_prompt_is_computed() -> None:
    prompt, other = [(1, 100), (2, 100)], [(3, 200)]
    disk = [TierSize("disk", math.inf)]
    again = [prompt, other, prompt, other, prompt]
    assert found_shares(again[:3], 1.0, 200.0, disk) == {CACHE: 0.0, "disk": 0.0}, "written now"
    assert found_shares(again, 1.0, 200.0, disk)["disk"] == pytest.approx(199 / 1000)
    assert found_shares(again, 1.0, 400.0, disk)[CACHE] == pytest.approx((199 * 3) / 1000)
    assert found_shares(again, 1.0, 200.0, disk, min_uses=1)["disk"] == pytest.approx((199 * 3) / 1000)


def test_a_gap_ends_what_is_found_whatever_is_held_behind_it() -> None:
    prompts = [[(1, 10), (2, 10), (3, 10)], [(4, 10), (2, 10)], [(1, 10), (5, 10), (3, 10)]]
    assert found_shares(prompts, 1.0, math.inf, [])[CACHE] == pytest.approx(10 / 80)


# --- what a worker makes of it ---


@pytest.mark.parametrize("prompt", [100, 2000, 30_000])
def test_a_prompt_costs_the_rest_of_it_behind_what_is_found_and_its_reads(prompt: int) -> None:
    found = {CACHE: 0.2, "disk": 0.3}
    worker, hits = with_hits(ONE_B, found, {"disk": 1e9}, prompt)
    assert (hits.unread, hits.computed) == ((), pytest.approx(0.5))
    whole = round(prompt * 0.5)
    read_s = 0.3 * prompt * ONE_B.kv_bytes / 1e9
    assert worker.costs.prompt_s(prompt) == pytest.approx(ONE_B.costs.prompt_s(whole, prompt - whole) + read_s)
    assert (worker.costs.row_s, worker.costs.base_s) == (ONE_B.costs.row_s, ONE_B.costs.base_s)


def test_a_tier_that_is_slower_than_computing_is_not_read_but_at_long_prompts() -> None:
    # 131,072 bytes at 2 GB/s are 66 us, and computing a token takes 29 us and 0.94 ns for each token before it.
    found = {"host": 0.1, "disk": 0.3}
    speeds = {"disk": 2e9, "host": 20e9}
    short, hits = with_hits(H100, found, speeds, 2000)
    assert (hits.unread, hits.computed) == (("disk",), pytest.approx(0.9))
    assert short == with_hits(H100, {"host": 0.1}, speeds, 2000)[0]
    _, hits = with_hits(H100, found, speeds, 200_000)
    assert hits.unread == ()
    assert with_hits(H100, {}, speeds, 2000)[0] == H100


def test_workers_beside_others_of_their_machine_find_as_much() -> None:
    busy = replace(ONE_B, beside=replace(ONE_B.costs, token_s=0.004))
    beside = with_hits(busy, {CACHE: 0.5}, {}, 1000)[0].beside
    assert beside is not None
    assert beside.token_s == 0.002


# --- commands ---


@pytest.fixture
def hashed_trace(tmp_path: Path) -> Path:
    """Ten conversations that all come again and again, a prompt a second."""
    file = tmp_path / "trace.jsonl"
    lines = []
    for number in range(300):
        blocks = [number % 10 * 10 + place for place in range(2)]
        row = {"timestamp": 1000 * number, "input_length": 1024, "output_length": 10, "hash_ids": blocks}
        lines.append(json.dumps(row))
    file.write_text("\n".join(lines))
    return file


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_simulation_with_tiers_replays_the_trace_and_answers_sooner(
    hashed_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("simulate", "--costs", "1.2b-cpu", "--fleet", "decode=2", "--workload", str(hashed_trace), "--rate", "0.2")
    asked = (*asked, "--requests", "200", "--events", "coarse")
    plain, tiered = told(capsys, *asked), told(capsys, *asked, "--tier", "disk=1GB@500MB/s")
    # 20 blocks are 0.34 GB; of 30 visits of a conversation the first two find nothing.
    hits = tiered["prefix_hits"]
    assert isinstance(hits, dict)
    assert hits["found"] == {"disk": pytest.approx(28 / 30, abs=1e-3)}
    assert hits["unread"] == []
    assert "prefix_hits" not in plain
    before, after = plain["ttft_p50_s"], tiered["ttft_p50_s"]
    assert isinstance(before, float)
    assert isinstance(after, float)
    assert after < 0.15 * before
    assert told(capsys, *asked, "--tier", "disk=100MB@500MB/s")["prefix_hits"] == {
        "found": {"disk": 0.0},
        "unread": [],
        "computed": 1.0,
    }


def test_a_plan_serves_more_with_tiers_and_tells_shares_by_tier(
    hashed_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "bundled", "--costs", "1.2b-cpu", "--gpus", "4", "--slo", "ttft_p90_s=5,tpot_p90_s=0.2"]
    asked += ["--workload", str(hashed_trace), "--formulas"]
    plain = told(capsys, *asked)
    tiers = ("--tier", "gpu=200MB", "--tier", "shared=unbounded@500MB/s")
    tiered = told(capsys, *asked, *tiers)
    served = [one["best"]["goodput_rps"] for one in (plain, tiered)]  # type: ignore[index]
    assert served[1] > 3 * served[0]
    hits = tiered["prefix_hits"]
    assert isinstance(hits, dict)
    assert list(hits["found"]) == ["gpu", "shared"]
    capsys.readouterr()
    assert main([*asked, *tiers]) == 0
    assert "prompt tokens found: 0.0% in gpu, 93.2% in shared; 6.8% are computed" in capsys.readouterr().out


def test_shares_may_be_given_where_a_workload_tells_no_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("--workload", "fixed", "--input-tokens", "8000", "--output-tokens", "20")
    asked = ["plan", "Llama-3.1-8B", "--gpu", "h100-80gb", "--gpus", "8", "--formulas", *fixed]
    asked += ["--slo", "ttft_p90_s=0.026,tpot_p90_s=0.05"]
    assert main(asked) != 0
    assert "ttft of 0.026 s: below the floor" in capsys.readouterr().err
    given = told(capsys, *asked, "--tier-hits", "gpu=0.7,host=0.2", "--tier", "host=100GB@100GB/s")
    assert given["prefix_hits"] == {"found": {"gpu": 0.7, "host": 0.2}, "unread": [], "computed": 0.1}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--tier", "disk=1TB@1GB/s"), "name a trace with hash_ids (mooncake, bailian), or say what is found"),
        (("--tier-hits", "disk=0.4"), "--tier disk=1TB@2GB/s"),
        (("--tier", "disk=1GB@1GB/s", "--tier", "disk=2GB@1GB/s"), "two of one name"),
        (("--tier", "disk=1TB@1GB/s", "--tier-hits", "disk=0.4", "--events", "exact"), "leave one of both away"),
        (("--tier", "disk=1TB@1GB/s", "--tier-hits", "disk=0.4", "--arrivals", "closed", "--users", "2"), "closed"),
        (("--tier", "disk=1TB@1GB/s", "--tier-hits", "disk=0.4", "--baselines"), "know no tiers"),
        (("--tier-hits", "gpu=0.4", "--against", "http://127.0.0.1:9"), "has tiers of its own"),
    ],
)
def test_what_no_simulation_knows_is_refused_and_says_what_to_give(
    arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ("--workload", "fixed", "--input-tokens", "100", "--output-tokens", "10", "--requests", "5")
    rate = () if "closed" in arguments else ("--rate", "1")
    assert main(["simulate", "--fleet", "decode=1", *fixed, *rate, *arguments]) != 0
    assert error in one_line(capsys)


@pytest.mark.parametrize("text", ["disk=1TB", "gpu=1GB@2GB/s", "tape=1TB@1GB/s", "disk@1GB/s", "disk=x@1GB/s", "disk"])
def test_a_tier_is_a_name_with_a_size_and_a_speed(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write"):
        tier_option(text)


def test_sizes_and_shares_are_read_with_their_units() -> None:
    assert (tier_option("disk=1TB@2GB/s").num_bytes, tier_option("disk=1TB@2GB/s").bytes_per_s) == (1e12, 2e9)
    assert tier_option("shared=unbounded@500MB/s").num_bytes == tier_option("gpu=40GiB").bytes_per_s == math.inf
    assert tier_hit_shares("disk=0.4,host=0.1") == {"disk": 0.4, "host": 0.1}
    for wrong in ("disk", "tape=0.1", "disk=2", "disk=0.6,host=0.5", "disk=nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="shares"):
            tier_hit_shares(wrong)
