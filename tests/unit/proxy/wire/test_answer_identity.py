"""`AnswerIdentity`: the id of an answer, and which events are of it."""

from typing import Any

from balanceroute.proxy.wire.answer_identity import AnswerIdentity, ModelName, Part

WHOLE_ANSWER = Part(public_id="cmpl-whole", created=7)


def test_every_event_has_the_id_the_time_and_the_model_of_the_first_one() -> None:
    identity = AnswerIdentity()
    first = {"id": "cmpl-a", "created": 1, "model": "full/name"}
    again = {"id": "cmpl-a", "created": 1, "model": "full/name"}
    later = {"id": "cmpl-b", "created": 2, "model": "alias"}

    assert not identity.put_into(first) and not identity.put_into(again)
    assert identity.put_into(later)
    assert later == first


def test_another_model_s_name_alone_changes_an_event() -> None:
    identity = AnswerIdentity()
    identity.put_into({"model": "full/name"})

    assert identity.put_into({"model": None}) and identity.model == "full/name"


def test_the_public_id_and_time_replace_those_of_workers() -> None:
    event = {"id": "cmpl-a", "created": 1}

    AnswerIdentity(WHOLE_ANSWER).put_into(event)

    assert event == {"id": "cmpl-whole", "created": 7}


def test_an_event_without_id_or_time_gets_none() -> None:
    event: dict[str, Any] = {"choices": []}

    assert not AnswerIdentity(WHOLE_ANSWER).put_into(event)
    assert event == {"choices": []}


def test_the_client_sees_one_id_over_all_tries() -> None:
    identity, event = AnswerIdentity(), {"id": "cmpl-r-7-t2"}
    identity.expect("r-7-t2", checked=False, request_id="r-7")

    identity.put_into(event)

    assert event == {"id": "cmpl-r-7"}


def test_a_worker_that_echoes_the_id_in_one_event_must_echo_it_in_all() -> None:
    identity = AnswerIdentity()
    identity.expect("r-7", checked=False)
    assert identity.is_ours("cmpl-other") and not identity.echoed

    assert identity.is_ours("cmpl-r-7") and identity.echoed

    assert not identity.is_ours("cmpl-other")


def test_a_worker_known_to_echo_ids_must_echo_from_its_first_event() -> None:
    identity = AnswerIdentity()
    identity.expect("r-7", checked=True)

    assert not identity.is_ours("cmpl-other")


def test_another_worker_is_checked_from_the_start() -> None:
    identity = AnswerIdentity()
    identity.expect("r-7", checked=False)
    identity.is_ours("cmpl-r-7")

    identity.expect("r-7-t2", checked=False)

    assert not identity.echoed and identity.is_ours("anything")


def test_choices_of_one_answer_name_one_model_whatever_their_workers_call_it() -> None:
    common = Part(model=ModelName())
    first, second = AnswerIdentity(common), AnswerIdentity(common)
    events = [{"model": "full/name"}, {"model": "alias"}]

    assert not first.put_into(events[0]) and second.put_into(events[1])
    assert events[0] == events[1] and first.model == second.model == "full/name"
