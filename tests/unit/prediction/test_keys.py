import pytest

from balanceroute.prediction import PromptKeyer

keyer = PromptKeyer(b"salt")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'"hello"', b'"hello "'),
        (b"[1,2]", b"[2,1]"),
        (b'[{"role":"user","content":"a"}]', b'[{"role":"user","content":"b"}]'),
    ],
    ids=["text", "token ids", "messages"],
)
def test_equal_prompts_get_equal_keys_and_others_do_not(one: bytes, other: bytes) -> None:
    assert keyer.of_json(one) == PromptKeyer(b"salt").of_json(one) != keyer.of_json(other)


def test_another_salt_gives_other_keys() -> None:
    assert PromptKeyer(b"other").of_json(b'"hello"') != keyer.of_json(b'"hello"')


def test_a_key_is_short_and_reveals_nothing_of_the_prompt() -> None:
    assert len(keyer.of_json(b'"' + b"secret " * 1000 + b'"')) == 16
    assert "secret" not in keyer.of_json(b'"secret"')


def test_a_header_key_differs_from_a_prompt_key_and_an_empty_one_is_unknown() -> None:
    assert keyer.of_header("hello") not in {keyer.of_json(b"hello"), ""}
    assert keyer.of_header("") == ""
