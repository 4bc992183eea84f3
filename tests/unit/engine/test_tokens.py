"""The tokenizer loses nothing; the model continues where it stopped."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.engine.tokens import (
    EOS_ID,
    FIRST_WORD_ID,
    VOCAB_SIZE,
    OutputLengths,
    TokenStream,
    continuation,
    decode,
    decode_bytes,
    encode,
)
from balanceroute.errors import ConfigError

plain_ids = st.lists(st.integers(3, FIRST_WORD_ID - 1), min_size=1, max_size=30)


@given(st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert decode(encode(text)) == text


@pytest.mark.parametrize("text", [" w25000", " w99999 x", " w250001", " w2500", "the quick w30000 fox", "é日本 🙂"])
def test_words_and_what_only_looks_like_words_survive_the_tokenizer(text: str) -> None:
    assert decode(encode(text)) == text


@given(plain_ids, st.integers(1, 60))
def test_text_of_the_model_encodes_to_its_original_ids(prompt: list[int], count: int) -> None:
    ids = continuation(prompt, count)
    try:
        text = decode_bytes(ids).decode()
    except UnicodeDecodeError:  # the limit cut a letter in half
        return
    assert encode(text) == ids


@given(plain_ids, st.integers(1, 50), st.integers(0, 50), st.sampled_from(["lognormal:20,0.7", "geometric:15"]))
def test_a_resumed_request_continues_and_ends_as_the_uninterrupted_one(
    prompt: list[int], limit: int, cut: int, text: str
) -> None:
    lengths = OutputLengths.parse(text, seed=3)
    whole = continuation(prompt, limit, lengths=lengths, ignore_eos=False)
    cut = min(cut, len(whole) - 1)
    rest = continuation(prompt + whole[:cut], limit - cut, lengths=lengths, ignore_eos=False)
    assert whole[:cut] + rest == whole


def test_an_answer_shorter_than_its_limit_ends_with_the_end_of_text() -> None:
    answer = continuation([300], 50, lengths=OutputLengths.parse("fixed:7"), ignore_eos=False)
    assert len(answer) == 7 and answer[-1] == EOS_ID and EOS_ID not in answer[:-1]


def test_min_tokens_postpones_the_end_of_text() -> None:
    answer = continuation([300], 50, lengths=OutputLengths.parse("fixed:7"), ignore_eos=False, min_tokens=9)
    assert len(answer) == 10 and answer[-1] == EOS_ID


def test_different_prompts_and_corrupted_kv_give_different_tokens() -> None:
    clean = TokenStream([300, 301])
    wrong = TokenStream([300, 301], corruption=b"x")
    other = TokenStream([300, 302])
    answers = [tuple(stream.next() for _ in range(8)) for stream in (clean, wrong, other)]
    assert len(set(answers)) == 3


def test_the_model_writes_letters_of_two_tokens_now_and_then() -> None:
    ids = continuation([300], 2000)
    halves = sum(token == 198 for token in ids)
    assert 60 < halves < 200
    assert all(163 <= second < 195 for first, second in pairwise(ids) if first == 198)
    assert all(3 <= token < VOCAB_SIZE for token in ids)


def test_lognormal_lengths_have_the_median_that_was_asked_for() -> None:
    lengths = OutputLengths.parse("lognormal:100,0.5")
    drawn = sorted(TokenStream([300 + i % 600, 400 + i // 600], lengths).remaining or 0 for i in range(2000))
    assert 93 < drawn[1000] < 107
    assert 0.4 < drawn[int(0.16 * 2000)] / 100 < 0.8


@pytest.mark.parametrize("text", ["", "lognormal", "lognormal:1", "fixed:x", "fixed:-1", "uniform:9,3", "gauss:1,2"])
def test_invalid_output_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="output lengths"):
        OutputLengths.parse(text)
