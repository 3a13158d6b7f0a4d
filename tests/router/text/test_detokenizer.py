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
    if stopper.stopped:
        # The stop that is complete first counts, and with it the text before the earliest one seen by then.
        end = min(whole.find(stop) + len(stop) for stop in stops if stop in whole)
        assert whole.startswith("".join(shown))
        assert len("".join(shown)) <= end
        assert not any(stop in "".join(shown) for stop in stops)
    else:
        assert "".join(shown) + stopper.flush() == whole


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
