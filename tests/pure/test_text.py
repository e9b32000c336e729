"""Text made piece by piece equals decoding everything at once; stop strings never leak and cut nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from splash.engine.text import IncrementalDetokenizer, OutputText, StopChecker
from splash.engine.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café, Ünïcödé, Ω≈ç√∫, 你好世界, こんにちは, привет мир",
    "👩‍👩‍👧‍👦 family, 👍🏽 thumbs, 🇫🇷 flag, e\u0301 combining",
]
PIECES = [
    *("👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇫🇷", "e\u0301\u0302", "नमस्ते", "\u200d", "\ufffd"),
    *(" ", "▁", "<0x41>", "\n"),
]
TEXT = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=12).map("".join)


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = [AddedToken("<|end|>", special=True, normalized=False)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens(["<tool é>", "<tool▁call>"])
    return Tokenizer(backend, {"eos_token": "<|end|>"})


def byte_fallback() -> Tokenizer:
    """Like sentencepiece: word pieces with ▁ for a space, bytes for what has no piece, and a space stripped first."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁fox", "é", "a", "b", "▁▁"]
    pieces += ["th", "e", "\ufffd", "▁c", ".", "日"]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>", "<think>"])
    backend.add_tokens(["<tool▁call>", "<0x0A>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁hello", "▁world", "s", "▁", "ing"]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {})


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback(), "metaspace": metaspace()}
tokenizer_names = pytest.mark.parametrize("name", TOKENIZERS)


def chunked(tokens: Sequence[Any], cuts: Sequence[int]) -> list[Sequence[Any]]:
    """Cut a sequence into chunks whose lengths repeat `cuts`; the last may be short."""
    chunks, start, turn = [], 0, 0
    while start < len(tokens):
        length = cuts[turn % len(cuts)]
        chunks.append(tokens[start : start + length])
        start, turn = start + length, turn + 1
    return chunks


def expected(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], visible: frozenset[int] = frozenset()
) -> str:
    """What the whole says beyond what it has in common with the prompt alone."""

    def decode(tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if not tokenizer.is_special(token) or token in visible]
        return tokenizer.decode(shown, skip_special_tokens=False)

    before, whole = decode(prompt), decode([*prompt, *output])
    common = 0
    while common < min(len(before), len(whole)) and before[common] == whole[common]:
        common += 1
    return whole[common:]


CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def random_tokens(name: str) -> st.SearchStrategy[list[int]]:
    size = TOKENIZERS[name].vocab_size
    return st.lists(st.integers(0, size + 2), max_size=40)  # beyond the vocabulary too: models pad theirs


@tokenizer_names
@settings(max_examples=100, deadline=None)
@given(data=st.data(), cuts=CUTS, shows=st.booleans())
def test_pieces_of_any_tokens_add_up_to_the_whole(name: str, data: st.DataObject, cuts: list[int], shows: bool) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, output = data.draw(random_tokens(name)), data.draw(random_tokens(name))
    visible = frozenset(token for token in range(tokenizer.vocab_size) if shows and tokenizer.is_special(token))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, visible)
    pieces = [detokenizer.push(chunk) for chunk in chunked(output, cuts)]
    assert "".join(pieces) + detokenizer.finish() == expected(tokenizer, prompt, output, visible)
    if not shows:
        assert expected(tokenizer, [], output) == tokenizer.decode(output)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=100, deadline=None)
@given(text=TEXT, cuts=CUTS)
def test_text_survives_and_no_piece_shows_half_a_character(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(chunk) for chunk in chunked(tokens, cuts)] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(tokens)
    if name == "byte_level":
        assert "".join(pieces) == text
        assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    tokens = [tokenizer.backend.token_to_id(char) for char in "ðŁĺĢ"]  # the four bytes of 😀
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in tokens] == ["", "", "", "😀"]


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    tokens = [tokenizer.backend.token_to_id(char) for char in "ðŁĺĢ"]
    detokenizer = IncrementalDetokenizer(tokenizer, tokens[:2])
    assert detokenizer.push(tokens[2:]) + detokenizer.finish() == "😀"


def test_a_word_piece_after_a_prompt_keeps_its_space() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    the, fox = (tokenizer.backend.token_to_id(piece) for piece in ("▁the", "▁fox"))
    assert IncrementalDetokenizer(tokenizer).push([the, fox]) == "the fox"
    assert IncrementalDetokenizer(tokenizer, [the]).push([fox]) == " fox"


@pytest.mark.parametrize(
    ("name", "piece"),
    [("byte_level", "Ģ"), ("byte_level", "e"), ("byte_fallback", "<0x80>"), ("byte_fallback", "▁the")],
)
def test_work_is_linear_even_for_endless_invalid_bytes(name: str, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[name]
    token = tokenizer.backend.token_to_id(piece)
    looked_at = 0
    decode, token_bytes = tokenizer.decode, tokenizer.token_bytes

    def counting_decode(tokens: Sequence[int], **options: Any) -> str:
        nonlocal looked_at
        looked_at += len(tokens)
        return decode(tokens, **options)

    def counting_token_bytes(token: int) -> bytes:
        nonlocal looked_at
        looked_at += 1
        return token_bytes(token)

    monkeypatch.setattr(tokenizer, "decode", counting_decode)
    monkeypatch.setattr(tokenizer, "token_bytes", counting_token_bytes)
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push([token]) for _ in range(2000)) + detokenizer.finish()
    assert text == decode([token] * 2000)
    assert looked_at <= 4 * 2000


def first_match(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The definition: the match complete first, the longest of those, and the text before it."""
    matches = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not matches:
        return text, None
    end, _, found = min(matches)
    return text[: end - len(found)], found


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab.", max_size=40),
    stop=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4),
    cuts=CUTS,
)
def test_stop_strings_across_any_cuts(text: str, stop: list[str], cuts: list[int]) -> None:
    checker = StopChecker(stop)
    whole, expected_stop = first_match(text, stop)
    shown, found = "", None
    for piece in chunked(text, cuts):
        more, found = checker.push(piece)
        shown += more
        assert whole.startswith(shown), "text of a stop string leaked"
        if found is not None:
            break
    else:
        shown += checker.finish()
    assert (shown, found) == (whole, expected_stop)


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    checker = StopChecker(["END", "\n\n"])
    assert checker.push("one E") == ("one ", None)
    assert checker.push("N") == ("", None)
    assert checker.push("d") == ("ENd", None)
    assert checker.push("x\n") == ("x", None)
    assert checker.push("\ny") == ("", "\n\n")


def test_an_overlapping_start_is_not_missed() -> None:
    assert StopChecker(["aab"]).push("aaab") == ("a", "aab")


@settings(max_examples=100, deadline=None)
@given(text=TEXT, stop=st.lists(st.text(min_size=1, max_size=3), max_size=3), cuts=CUTS)
def test_output_text_is_the_whole_text_cut_at_the_first_stop(text: str, stop: list[str], cuts: list[int]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    output = OutputText(tokenizer, [], stop)
    shown, found = "", None
    for chunk in chunked(tokens, cuts):
        more, reason = output.push(chunk)
        shown, found = shown + more, found or reason
    shown += output.finish()
    assert (shown, found) == first_match(text, stop)


def test_nothing_follows_a_stop_string() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    output = OutputText(tokenizer, [], ["fox"])
    assert output.push(tokenizer.encode("the fox jumps")) == ("the ", "fox")
    assert output.push(tokenizer.encode(" over")) == ("", None)
    assert output.finish() == ""


def test_stop_strings_within_min_tokens_do_not_count() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    tokens = [token for char in "a.b.c" for token in tokenizer.encode(char)]
    output = OutputText(tokenizer, [], ["."], min_tokens=2)
    assert output.push(tokens) == ("a.b", ".")
