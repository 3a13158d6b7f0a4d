import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from twostroke.router.text.tokenizer import (
    ByteDetokenizer,
    StopStrings,
    TextTokenizer,
    WindowDetokenizer,
    new_detokenizer,
)

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "é", "▁the", "語", "�", "▁▁", "\n", "❤", "\ufe0f", "\u200d", "👩"]


def made(tokenizer: Tokenizer, decoder: decoders.Decoder, normalizer: normalizers.Normalizer | None) -> TextTokenizer:
    tokenizer.decoder = decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<tool>"])
    num_tokens = tokenizer.get_vocab_size()
    return TextTokenizer(tokenizer, vocab_size=num_tokens + 3, eos_token_ids=(2,), chat_template=None)


def numbered(names: list[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def sentencepiece_like() -> TextTokenizer:
    """Llama 2's kind: a leading space to strip, and bytes as tokens of their own."""
    tokenizer = Tokenizer(BPE(numbered([*SPECIAL, *BYTES, *WORDS]), [], unk_token="<unk>", byte_fallback=True))
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made(tokenizer, decoders.Sequence(decoder), spaces)


def metaspace() -> TextTokenizer:
    """T5's kind with byte fallback: a vocabulary without merges, a space before each word."""
    scored = [(name, -float(i)) for i, name in enumerate([*SPECIAL, *BYTES, *WORDS])]
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")])
    return made(Tokenizer(Unigram(scored, 0, True)), decoder, normalizers.Replace(" ", "▁"))


def bytes_in_steps() -> TextTokenizer:
    """Bytes as letters, by a decoder of more than one step: its kind is not known."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ðŁĺ", "Ģa", "Ã©", "©Ã"]
    tokenizer = Tokenizer(BPE(numbered(names), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made(tokenizer, decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), None)


def word_pieces() -> TextTokenizer:
    """BERT's kind: a space before each word, none before what goes on with one or before a full stop."""
    names = [*SPECIAL, "a", "##a", "b", "##b", "é", ".", "'s", "n't", "�", "##�"]
    return made(Tokenizer(WordPiece(numbered(names), unk_token="<unk>")), decoders.WordPiece("##", True), None)


FALLBACK = sentencepiece_like()
KINDS = {
    "sentencepiece": FALLBACK,
    "metaspace": metaspace(),
    "bytes in steps": bytes_in_steps(),
    "word pieces": word_pieces(),
}
BYTE_TOKENS = st.sampled_from([3 + byte for byte in (0x41, 0x80, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xFF)])
FALLBACK_IDS = st.lists(BYTE_TOKENS | st.integers(0, FALLBACK.vocab_size - 1), max_size=40)


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 4100) | st.integers(6, 262), max_size=60))
def test_byte_level_pieces_add_up_to_the_whole_text(tokenizer, token_ids):
    text = new_detokenizer(tokenizer)
    assert isinstance(text, ByteDetokenizer)
    pieces = [text.add(token_id) for token_id in token_ids]
    assert "".join(pieces) + text.flush() == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shows_special", [False, True])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_text_in_pieces_is_their_text_at_once(kind: str, shows_special: bool, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    text = new_detokenizer(tokenizer, shows_special=shows_special)
    pieces = [text.add(token_id) for token_id in token_ids]
    assert "".join(pieces) + text.flush() == tokenizer.decode(token_ids, skip_special_tokens=not shows_special)


@settings(max_examples=100, deadline=None)
@given(token_ids=FALLBACK_IDS)
def test_byte_fallback_pieces_add_up_to_the_whole_text(token_ids):
    text = new_detokenizer(FALLBACK)
    assert isinstance(text, WindowDetokenizer)
    pieces = [text.add(token_id) for token_id in token_ids]
    assert "".join(pieces) + text.flush() == FALLBACK.decode(token_ids)


@settings(max_examples=100, deadline=None)
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


@pytest.mark.parametrize(("kind", "token"), [("sentencepiece", "�"), ("bytes in steps", "ð")])
def test_what_never_becomes_a_character_is_held_back_for_a_few_tokens_only(
    kind: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, decoded = KINDS[kind], []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **how: decoded.append(len(ids)) or decode(ids, **how))
    (token_id,) = [one for one in range(tokenizer.vocab_size) if tokenizer.token(one) == token]
    text = new_detokenizer(tokenizer)
    pieces = [text.add(token_id) for _ in range(500)]
    assert len("".join(pieces)) > 480
    assert "".join(pieces) + text.flush() == "�" * 500
    assert max(decoded) < 30  # or each token would cost as much as all before it


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes in steps"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_let_go_of_at_last_is_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    names = {"sentencepiece": ["�", "<0xC3>", "<0xA9>", "é"], "bytes in steps": ["ð", "Ł", "Ã", "©Ã"]}[kind]
    token_ids = [one for one in range(tokenizer.vocab_size) if tokenizer.token(one) in names]
    drawn = data.draw(st.lists(st.sampled_from(token_ids), min_size=9, max_size=40))
    text = new_detokenizer(tokenizer)
    pieces = [text.add(token_id) for token_id in drawn]
    assert "".join(pieces) + text.flush() == tokenizer.decode(drawn)


CHARACTERS = ["a", "b", " ", "é", "e\u0301", "語", "€", "😀", "👍🏽", "👩\u200d💻", "❤\ufe0f", "🇳🇴", "\n", "�"]
TOKENIZERS = ["bundled", "sentencepiece", "metaspace", "bytes in steps"]


def stopped(text: str, stops: list[str], shows_stop: bool) -> str:
    """Character by character: up to the stop string that is whole first, the longest if several are."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if shows_stop else end - max(map(len, found))]
    return text


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_streams_cuts_can_not_be_told_from_its_text(tokenizer, kind: str, data: st.DataObject) -> None:
    """Stop strings are pieces of the text, so they begin and end within tokens, characters' bytes and sequences."""
    used = tokenizer if kind == "bundled" else KINDS[kind]
    written = "".join(data.draw(st.lists(st.sampled_from(CHARACTERS), max_size=16)))
    token_ids = used.encode_word(written)
    whole = used.decode(token_ids)
    assert whole.strip(" ") == written.strip(" ")
    begins = st.integers(0, max(0, len(whole) - 1))
    cuts = data.draw(st.lists(st.tuples(begins, st.integers(1, 5)), max_size=3)) if whole else []
    stops = [whole[begin : begin + length] for begin, length in cuts]
    shows_stop = data.draw(st.booleans())
    text, stopper = new_detokenizer(used), StopStrings(stops, shows_stop)
    shown = ""
    for token_id in token_ids:
        shown += stopper.add(text.add(token_id))
        assert whole.startswith(shown)
    shown += stopper.add(text.flush()) + stopper.flush()
    assert shown == stopped(whole, stops, shows_stop)


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.text("ab\nc", max_size=5), max_size=12), stops=STOPS)
def test_a_stop_string_ends_the_text_however_it_is_cut(pieces, stops):
    stopper = StopStrings(stops)
    shown = [stopper.add(piece) for piece in pieces]
    whole = "".join(pieces)
    assert stopper.stopped == any(stop in whole for stop in stops)
    assert "".join(shown) + stopper.flush() == stopped(whole, stops, False)


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


@settings(max_examples=100, deadline=None)
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
        assert "".join(map(stopper.add, pieces)) + stopper.flush() == stopped(meant, stops, False)


@settings(max_examples=100, deadline=None)
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
