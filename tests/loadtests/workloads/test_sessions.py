"""Plans become sessions and words: lengths, shared prefixes, and the same on every machine."""

from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import (
    SLO,
    Chat,
    Closed,
    Constant,
    Fixed,
    LongPrompts,
    Piece,
    Plan,
    Poisson,
    Replay,
    Session,
    SharedPrompt,
    Synthetic,
    TraceFile,
    Uniform,
    Workload,
)
from twostroke.loadtests.workloads.prompts import WORDS, text, token_ids
from twostroke.loadtests.workloads.sessions import sessions

WORKLOADS: list[Workload] = [
    Fixed(100, 10),
    Synthetic("azure-conv"),
    Synthetic("mooncake-conversation"),
    Chat(),
    SharedPrompt(shared_tokens=300, shared_prompts=3, input_tokens=50, output_tokens=10),
    LongPrompts(50, 100, 2000, 10, long_share=0.1),
    Uniform((10, 900), (5, 90)),
]


def make_plan(workload: Workload, /, **changes: object) -> Plan:
    plan = Plan("http://127.0.0.1:1", "m", 4096, Poisson(10.0), workload, SLO(), seconds=30.0, seed=5)
    return msgspec.structs.replace(plan, **changes)


def input_tokens(session: Session) -> int:
    return sum(piece.tokens for turn in session.turns for piece in turn.prompt)


def hit_rate(prompts: Iterable[tuple[Piece, ...]]) -> float:
    """Tokens that a cache without limits would have, by all tokens."""
    seen: dict[tuple[int, Piece], int] = {}  # (what is before it, piece): a number of its own
    hit = total = 0
    for prompt in prompts:
        before = -1
        for piece in prompt:
            total += piece.tokens
            if (before, piece) in seen:
                hit += piece.tokens
            before = seen.setdefault((before, piece), len(seen))
    return hit / total


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: type(workload).__name__)
def test_a_plan_and_its_seed_say_all(workload: Workload) -> None:
    every = list(sessions(make_plan(workload)))
    assert every == list(sessions(make_plan(workload)))
    assert [session.index for session in every] == list(range(len(every)))
    assert all(before.at_s <= after.at_s < 30.0 for before, after in pairwise(every))
    other = list(sessions(make_plan(workload, seed=6)))
    ours = {piece for session in every for turn in session.turns for piece in turn.prompt}
    assert not ours & {piece for session in other for turn in session.turns for piece in turn.prompt}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: type(workload).__name__)
def test_every_session_fits_into_the_context(workload: Workload) -> None:
    for session in islice(sessions(make_plan(workload, arrivals=Closed(1))), 300):
        assert input_tokens(session) + sum(turn.output_tokens for turn in session.turns) <= 4096
        assert all(turn.prompt and turn.output_tokens >= 1 for turn in session.turns)


def test_what_is_planned_does_not_depend_on_the_arrivals() -> None:
    poisson = [session.turns for session in sessions(make_plan(Synthetic("azure-conv")))]
    constant = [session.turns for session in sessions(make_plan(Synthetic("azure-conv"), arrivals=Constant(10.0)))]
    assert poisson[:200] == constant[:200]


def test_fixed_requests_are_alike_and_share_nothing() -> None:
    every = list(sessions(make_plan(Fixed(100, 10))))
    assert {(input_tokens(session), session.turns[0].output_tokens) for session in every} == {(100, 10)}
    assert hit_rate(session.turns[0].prompt for session in every) == 0


def test_fixed_requests_may_be_of_several_classes_each_with_its_part() -> None:
    plan = make_plan(Fixed(8, 4, tiers={"chat": 0.3, "batch": 0.7}), arrivals=Closed(1, requests=1000))
    turns = [turn for session in sessions(plan) for turn in session.turns]
    assert sum(turn.kind == turn.service_tier == "chat" for turn in turns) == pytest.approx(300, rel=0.15)
    assert len(turns) == 1000


def test_uniform_lengths_are_within_their_bounds_and_reach_them() -> None:
    plan = make_plan(Uniform((3, 9), (1, 4)), arrivals=Closed(1, requests=300))
    turns = [session.turns[0] for session in sessions(plan)]
    assert {turn.output_tokens for turn in turns} == {1, 2, 3, 4}
    assert {turn.prompt[0].tokens for turn in turns} == set(range(3, 10))


def test_conversations_have_their_mean_of_turns_and_time_to_think() -> None:
    chat = Chat(turns=3.0, think_s=2.0, system_tokens=100, system_prompts=4, input_tokens=10, output_tokens=10)
    every = list(islice(sessions(make_plan(chat, max_context=100_000, arrivals=Closed(1))), 3000))
    assert mean(len(session.turns) for session in every) == pytest.approx(3.0, abs=0.15)
    assert all(session.turns[0].think_s == 0 for session in every)
    assert mean(turn.think_s for session in every for turn in session.turns[1:]) == pytest.approx(2.0, abs=0.1)
    systems = {session.turns[0].prompt[0] for session in every}
    assert len(systems) == 4
    assert {piece.tokens for piece in systems} == {100}
    assert all(len(turn.prompt) == 1 for session in every for turn in session.turns[1:])


def test_requests_take_one_of_the_shared_prompts_each() -> None:
    shared = SharedPrompt(shared_tokens=300, shared_prompts=3, input_tokens=100, output_tokens=10)
    prompts = [session.turns[0].prompt for session in islice(sessions(make_plan(shared)), 300)]
    assert len({prompt[0] for prompt in prompts}) == 3
    assert hit_rate(prompts) == pytest.approx((297 * 300) / (300 * 400))


def test_long_prompts_come_now_and_then_and_are_marked() -> None:
    mixture = LongPrompts(50, 100, 2000, 10, long_share=0.1)
    every = list(islice(sessions(make_plan(mixture, arrivals=Closed(1))), 3000))
    long = [session for session in every if session.turns[0].kind == "long"]
    assert len(long) / len(every) == pytest.approx(0.1, abs=0.02)
    assert {input_tokens(session) for session in long} == {2000}
    assert {input_tokens(session) for session in every if session.turns[0].kind == "short"} == {50}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": Fixed(4000, 97)}, "4000 tokens in and 97 out don't fit into max_context 4096"),
        ({"workload": Fixed(0, 1)}, "give at least 1 of each"),
        ({"workload": Synthetic("nonesuch")}, "no shape 'nonesuch'.*azure-conv, azure-code"),
        ({"workload": SharedPrompt(10, 0, 10, 10)}, "give at least 1 of shared_prompts"),
        ({"workload": LongPrompts(1, 1, 5000, 1, 0.1)}, "5000 tokens in and 1 out don't fit"),
        ({"workload": LongPrompts(1, 1, 2, 1, 1.1)}, "give a share from 0 to 1"),
        ({"workload": Chat(system_tokens=4000)}, "a first turn has 4000 \\+ 80 tokens in and 120 out"),
        ({"workload": Chat(turns=0.5)}, "at least 1"),
        ({"arrivals": Replay()}, "only traces and synthetic shapes have times to replay"),
        ({"arrivals": Replay(0.0), "workload": Synthetic("azure-conv")}, "replay has speed 0"),
        ({"seconds": 0.0}, "a run of 0 s sends nothing"),
        ({"workload": TraceFile("/nonesuch.csv")}, "/nonesuch.csv: can't be read"),
    ],
    ids=lambda case: str(case)[:60],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_at_once(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        sessions(make_plan(Fixed(10, 10), **changes))


def test_a_shape_is_replayed_at_its_own_rate_times_the_speed() -> None:
    replay = make_plan(Synthetic("mooncake-synthetic"), arrivals=Replay(2.0), seconds=300.0)
    assert len(list(sessions(replay))) == pytest.approx(2 * 3.907 * 300, rel=0.08)


def test_a_trace_is_replayed_at_its_own_times_and_again_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.0000000,374,44\r\n"
        "2023-11-16 18:15:47.5000000,396,109\r\n"
        "2023-11-16 18:15:50.0000000,879,55\r\n"
    )
    replay = list(sessions(make_plan(TraceFile(str(path)), arrivals=Replay(2.0), seconds=5.0)))
    # 4 s and a mean gap of 2 s make a repetition; all twice as fast.
    assert [session.at_s for session in replay] == [0.0, 0.75, 2.0, 3.0, 3.75]
    assert [input_tokens(session) for session in replay] == [374, 396, 879, 374, 396]
    assert replay[0].turns[0].prompt != replay[3].turns[0].prompt
    at_a_rate = list(sessions(make_plan(TraceFile(str(path)), arrivals=Constant(1.0), seconds=5.0)))
    assert [session.at_s for session in at_a_rate] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [session.turns for session in at_a_rate] == [session.turns for session in replay]


pieces = st.lists(st.builds(Piece, st.integers(0, 2**63 - 1), st.integers(1, 200)), min_size=1, max_size=4)


@settings(deadline=None)
@given(pieces, st.integers(16, 200_000))
def test_ids_are_as_many_as_planned_and_within_the_vocabulary(prompt: list[Piece], vocabulary: int) -> None:
    ids = token_ids(prompt, vocabulary)
    assert len(ids) == sum(piece.tokens for piece in prompt)
    assert all(min(1000, vocabulary // 4) <= each < vocabulary for each in ids)


@settings(deadline=None)
@given(pieces, pieces, pieces)
def test_prompts_that_begin_with_equal_pieces_share_their_beginning(
    common: list[Piece], one: list[Piece], other: list[Piece]
) -> None:
    length = sum(piece.tokens for piece in common)
    assert token_ids(common + one, 4096)[:length] == token_ids(common + other, 4096)[:length] == token_ids(common, 4096)
    assert text(common + one).split()[:length] == text(common + other).split()[:length] == text(common).split()


def test_other_seeds_give_other_tokens() -> None:
    assert token_ids([Piece(1, 50)], 4096) != token_ids([Piece(2, 50)], 4096)
    assert text([Piece(1, 50)]) != text([Piece(2, 50)])


def test_the_same_seed_gives_the_same_tokens_on_every_machine() -> None:
    assert token_ids([Piece(5, 8)], 4096) == [2615, 1986, 1399, 3750, 1133, 3466, 3945, 1954]
    assert text([Piece(5, 8)]) == "time win after they open if under as"


def test_there_is_a_word_for_each_token() -> None:
    assert len(text([Piece(1, 10), Piece(2, 20)]).split()) == 30
    assert len(set(WORDS)) == len(WORDS) > 100
