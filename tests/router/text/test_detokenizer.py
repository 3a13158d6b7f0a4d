from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from twostroke.router.text.detokenizer import ByteDetokenizer, StopStrings, WindowDetokenizer, new_detokenizer
from twostroke.router.text.tokenizer import TextTokenizer


def sentencepiece_like() -> TextTokenizer:
    """Llama 2's kind: a leading space to strip, and bytes as tokens of their own."""
    words = ["▁", "a", "b", "é", "▁the", "語", "�", "▁▁", "\n"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TextTokenizer(tokenizer, vocab_size=len(names) + 3, eos_token_ids=(2,), chat_template=None)


FALLBACK = sentencepiece_like()
BYTE_TOKENS = st.sampled_from([3 + byte for byte in (0x41, 0x80, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xFF)])
FALLBACK_IDS = st.lists(BYTE_TOKENS | st.integers(0, FALLBACK.vocab_size - 1), max_size=40)


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, 4100) | st.integers(6, 262), max_size=60))
def test_byte_level_pieces_add_up_to_the_whole_text(tokenizer, token_ids):
    text = new_detokenizer(tokenizer)
    assert isinstance(text, ByteDetokenizer)
    pieces = [text.add(token_id) for token_id in token_ids]
    assert "".join(pieces) + text.flush() == tokenizer.decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(token_ids=FALLBACK_IDS)
def test_byte_fallback_pieces_add_up_to_the_whole_text(token_ids):
    text = new_detokenizer(FALLBACK)
    assert isinstance(text, WindowDetokenizer)
    pieces = [text.add(token_id) for token_id in token_ids]
    assert "".join(pieces) + text.flush() == FALLBACK.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(written=st.text(max_size=60).filter(lambda text: "<|" not in text))  # a special token's name is no text
def test_no_piece_of_real_text_has_half_a_character(tokenizer, written):
    token_ids = tokenizer._encode(written, False)
    text = new_detokenizer(tokenizer)
    pieces = [text.add(token_id) for token_id in token_ids]
    assert "".join(pieces) == written
    assert all("�" not in piece for piece in pieces) or "�" in written


def test_text_comes_as_soon_as_its_character_is_whole(tokenizer):
    text = new_detokenizer(tokenizer)
    pieces = [text.add(token_id) for token_id in tokenizer._encode("a😀b", False)]
    assert "".join(pieces) == "a😀b"
    assert pieces[0] == "a"
    assert pieces[-1] == "b"


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.text("ab\nc", max_size=5), max_size=12), stops=STOPS)
def test_a_stop_string_ends_the_text_however_it_is_cut(pieces, stops):
    stopper = StopStrings(stops)
    shown = [stopper.add(piece) for piece in pieces]
    whole = "".join(pieces)
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert stopper.stopped == bool(found)
    assert "".join(shown) + stopper.flush() == up_to_stop(whole, stops)


def up_to_stop(whole, stops):
    """The text before the stop string that is complete first; of several the longest."""
    for end in range(len(whole) + 1):
        complete = [stop for stop in stops if whole[:end].endswith(stop)]
        if complete:
            return whole[: end - max(map(len, complete))]
    return whole


EMOJI = ("👩‍👩‍👧‍👦", "🇳🇴", "👍🏽", "❤️", "é", "e\u0301", "語", "�", "\x00", "\U0010ffff")
SPOKEN = st.lists(st.sampled_from((*EMOJI, "a", "b", " ", "\n")) | st.characters(codec="utf-8"), max_size=12).map(
    "".join
)
SPOKEN = SPOKEN.filter(lambda text: "<|" not in text)
STOPS_IN_SPEECH = st.lists(st.sampled_from((*EMOJI, "🇳", "\u200d", "a ", "b\n", "aa")), max_size=3)


def as_bytes(text, draws):
    """The text in tokens of FALLBACK: characters that have one of their own by it, if drawn so; else by bytes."""
    for char in text:
        own = FALLBACK._tokenizer.token_to_id("▁" if char == " " else char)
        if own is not None and draws.draw(st.booleans()):
            yield own
        else:
            yield from (3 + byte for byte in char.encode())


@settings(max_examples=300, deadline=None)
@given(draws=st.data(), written=SPOKEN, stops=STOPS_IN_SPEECH)
def test_speech_in_bytes_is_told_by_whole_characters_up_to_its_stop_string(tokenizer, draws, written, stops):
    of_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(2, 300)}
    for speaker, token_ids, meant in (
        (tokenizer, [of_byte[bytes([byte])] for byte in written.encode()], written),
        (tokenizer, tokenizer._encode(written, False), written),
        (FALLBACK, [*as_bytes(written, draws)], written.removeprefix(" ")),
    ):
        text, stopper = new_detokenizer(speaker), StopStrings(stops)
        pieces = [text.add(token_id) for token_id in token_ids]
        pieces.append(text.flush())
        assert "".join(pieces) == meant
        assert all("�" not in piece for piece in pieces) or "�" in written
        assert "".join(map(stopper.add, pieces)) + stopper.flush() == up_to_stop(meant, stops)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text("ab\nc", max_size=5), max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_only_what_may_begin_a_stop_string_is_held_back(pieces, stop):
    stopper = StopStrings([stop])
    shown, seen = "", ""
    for piece in pieces:
        shown += stopper.add(piece)
        seen += piece
        if stopper.stopped:
            assert shown == seen[: seen.find(stop)]
            return
        held = seen[len(shown) :]
        assert shown + held == seen
        assert stop.startswith(held)
        assert held != stop
