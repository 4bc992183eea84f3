"""Which prefiller has served a model, as evidence against one that refuses it."""

from balanceroute.proxy.life.served_models import MAX_MODELS, MAX_NAME, ServedModels


def test_the_last_other_prefiller_that_served_a_model_is_named_until_it_refuses_it_itself() -> None:
    served = ServedModels()
    assert served.refused("m", "p1") is None
    served.note("m", "p2")
    served.note("m", "p0")
    assert served.refused("m", "p1") == "p0" == served.refused("m", "p2")
    assert served.refused("another", "p1") is None
    assert served.refused("m", "p0") is None
    assert served.refused("m", "p1") is None, "nobody serves it any more"


def test_requests_without_a_model_are_told_apart_from_those_with_one() -> None:
    served = ServedModels()
    served.note(None, "p0")
    assert served.refused(None, "p1") == "p0" and served.refused("", "p1") is None


def test_names_of_a_server_that_takes_any_are_bounded_in_number_and_length() -> None:
    served = ServedModels()
    served.note("m" * (MAX_NAME + 1), "p0")
    assert served.refused("m" * (MAX_NAME + 1), "p1") is None
    for name in map(str, range(MAX_MODELS + 1)):
        served.note(name, "p0")
    assert served.refused("0", "p1") is None, "forgotten with the others"
    assert served.refused(str(MAX_MODELS), "p1") == "p0"
