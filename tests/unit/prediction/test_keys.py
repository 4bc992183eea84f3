from balanceroute.prediction import PromptKeyer

keyer = PromptKeyer(b"salt")


def test_equal_prompts_get_equal_keys_and_others_do_not() -> None:
    assert keyer.of_prompt("hello") == keyer.of_prompt("hello") != keyer.of_prompt("hello ")
    assert keyer.of_prompt([1, 2]) == keyer.of_prompt([1, 2]) != keyer.of_prompt([2, 1])


def test_messages_are_told_apart_by_order_but_not_by_the_order_of_their_fields() -> None:
    one, other = {"role": "user", "content": "a"}, {"content": "b", "role": "user"}

    assert keyer.of_messages([one]) == keyer.of_messages([{"content": "a", "role": "user"}])
    assert keyer.of_messages([one, other]) != keyer.of_messages([other, one])


def test_another_salt_gives_other_keys() -> None:
    assert PromptKeyer(b"other").of_prompt("hello") != keyer.of_prompt("hello")


def test_a_key_is_short_and_says_nothing_of_the_prompt() -> None:
    assert len(keyer.of_prompt("secret " * 1000)) == 16
    assert "secret" not in keyer.of_prompt("secret")


def test_a_header_is_a_key_of_its_own_kind_and_an_empty_one_is_unknown() -> None:
    assert keyer.of_header("hello") not in {keyer.of_prompt("hello"), ""}
    assert keyer.of_header("") == ""
