"""What is said over the link is read as it was meant, or not at all."""

from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.core.types import Outcome, Phase, RequestSpec, Standing, WorkerState
from balanceroute.core.view import ClusterView, DecoderView, PrefillerView
from balanceroute.proxy.admission.decider import RefusalKind
from balanceroute.proxy.link import messages as m
from balanceroute.proxy.perimeter.key_use import KeyUse

numbers = st.integers(0, 2**53)
seeds = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**31)
texts = st.text(max_size=30)
seconds = st.floats(0, 1e6)
hashes = st.lists(st.integers(0, 2**64 - 1), max_size=5)
specs = st.builds(
    RequestSpec, texts, counts, st.integers(-5, 5), texts, st.none() | counts, prefix=hashes, block_tokens=counts
)
standings = st.builds(
    Standing,
    specs,
    st.sampled_from(Phase),
    counts,
    seconds,
    seconds,
    texts,
    texts,
    counts,
    counts,
    counts,
    st.booleans(),
    st.booleans(),
)
states = st.sampled_from(WorkerState)
decoders = st.builds(DecoderView, texts, states, counts, counts, counts, counts, counts, counts, seconds, counts)
prefillers = st.builds(
    PrefillerView,
    texts,
    states,
    st.none() | st.floats(0, 1),
    counts,
    counts,
    counts,
    hit_tokens=st.none() | counts,
    cache_known=st.tuples(st.none() | counts, counts),
)
views = st.builds(
    ClusterView,
    st.lists(decoders, max_size=3).map(tuple),
    st.lists(prefillers, max_size=3).map(tuple),
    counts,
    counts,
    counts,
    counts,
    st.booleans(),
    st.none() | seconds,
)
names = st.lists(texts, max_size=3).map(tuple)
key_uses = st.lists(st.builds(KeyUse, texts, counts, counts, counts), max_size=3).map(tuple)
uses = st.builds(m.Use, texts, counts, counts, st.booleans(), st.none() | seconds, st.none() | seconds)
silent = st.builds(m.SilentGroup, texts, names, seconds | st.just(float("inf")))  # of workers that never answered
asked = st.one_of(st.builds(cls, numbers) for cls in (m.PrefillFailed, m.RequestPrefill, m.PushFailed, m.PutBack))
from_relay = st.one_of(
    st.builds(
        m.Hello,
        counts,
        texts,
        counts,
        counts,
        st.lists(st.builds(m.Held, numbers, counts, standings)).map(tuple),
        st.none() | counts,
    ),
    st.builds(m.Beat),
    st.builds(m.Farewell, counts, texts),
    st.builds(m.Submit, numbers, specs),
    st.builds(m.Prefilled, numbers, counts, st.none() | counts),
    st.builds(m.Pushed, numbers, counts, st.none() | counts),
    asked,
    st.builds(m.Progress, st.lists(numbers).map(tuple), st.lists(counts).map(tuple)),
    st.builds(m.Requeue, numbers, counts, hashes),
    st.builds(m.Began, numbers, seconds),
    st.builds(m.Finish, numbers, st.sampled_from(Outcome), texts, counts, seconds),
    st.builds(m.Judged, texts, st.sampled_from(m.Finding), seconds),
    st.builds(m.Activity, counts, counts, st.lists(uses, max_size=3).map(tuple), key_uses),
    st.builds(m.Counted, st.binary(max_size=30)),
    st.builds(m.Learned, texts, st.none() | texts),
    st.builds(m.Explained, st.lists(texts).map(tuple), st.lists(seconds).map(tuple)),
    st.builds(m.CacheDoubted, texts, texts),
    st.builds(m.ConnectorDoubted, texts, texts),
)
from_brain = st.one_of(
    st.builds(m.Welcome, counts, counts, counts, st.lists(numbers).map(tuple), seeds),
    st.builds(m.Farewell, counts, texts),
    st.builds(m.Beat),
    st.builds(m.Chosen, numbers, counts, texts),
    st.builds(m.Refused, numbers, st.sampled_from(RefusalKind), texts, seconds),
    st.builds(m.Seen, views, counts),
    st.builds(m.Workers, st.just(()), names),
    st.builds(m.Silent, st.lists(silent, max_size=3).map(tuple)),
    st.builds(m.KeysElsewhere, texts, key_uses),
    st.builds(m.PromptKeys, st.none() | st.binary(max_size=30), st.booleans()),
    st.builds(m.Explained, names, st.lists(seconds).map(tuple)),
)


@given(st.lists(from_relay, max_size=5))
def test_relay_messages_survive_a_round_trip(messages: list[m.FromRelay]) -> None:
    frame = m.frame(messages)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert m.read_from_relay(frame[4:]) == messages


@given(st.lists(from_brain, max_size=5))
def test_brain_messages_survive_a_round_trip(messages: list[m.FromBrain]) -> None:
    assert m.read_from_brain(m.frame(messages)[4:]) == messages


@given(st.binary(max_size=200))
def test_garbage_raises_only_a_link_error(body: bytes) -> None:
    for read in (m.read_from_relay, m.read_from_brain):
        with suppress(m.LinkError):
            read(body)


@pytest.mark.parametrize(
    "body",
    [[[99]], [[10, 1]], [[12, "one"]], [[12, 1, 2]], [[19, 1, "lost", "", 0]], [[16, [1], 2]], {"tag": 3}],
    ids=["unknown", "too short", "wrong type", "too long", "no outcome", "no list", "no array"],
)
def test_a_message_that_is_not_of_this_version_is_refused(body: object) -> None:
    with pytest.raises(m.LinkError):
        m.read_from_relay(msgspec.msgpack.encode(body))


NAN = float("nan")
SPEC = RequestSpec("a", 10)


def a_standing(**changes: object) -> Standing:
    return replace(Standing(SPEC, Phase.POOLED, 10), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        m.Progress((1,), (2**64 - 1,)),
        m.Progress((1,), (-1,)),
        m.Prefilled(1, -1, None),
        m.Pushed(1, 10, 2**60),
        m.Requeue(1, 2**60),
        m.Finish(1, Outcome.FINISHED, "", 2**60, 0.0),
        m.Finish(1, Outcome.FINISHED, "", 1, NAN),
        m.Began(1, -1.0),
        m.Judged("d0", m.Finding.BUSY, float("inf")),
        m.Activity(2**60, 0, ()),
        m.Activity(0, 0, (m.Use("d0", -1, 0, False, None, None),)),
        m.Activity(0, 0, (m.Use("d0", 0, 0, False, NAN, None),)),
        m.Activity(0, 0, (), (KeyUse("key", -1, 0, 0),)),
        m.Explained(("d0",), (NAN,)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_number_that_no_relay_has_is_refused(message: m.FromRelay) -> None:
    with pytest.raises(m.LinkError, match="can't be read"):
        m.read_from_relay(m.frame([message])[4:])


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": 2**60},
        {"tokens": -1},
        {"earlier_tokens": 2**60},
        {"requeues": -1},
        {"waited_s": NAN},
        {"ready_s": -1.0},
        {"spec": replace(SPEC, prompt_tokens=-1)},
        {"spec": replace(SPEC, block_tokens=2**60)},
        {"spec": replace(SPEC, max_new_tokens=-1)},
    ],
    ids=str,
)
def test_the_state_of_a_request_that_none_can_have_is_refused(changes: dict[str, object]) -> None:
    hello = [0, m.VERSION, "relay", 1, 0, [[1, 1, a_standing(**changes)]]]
    with pytest.raises(m.LinkError, match="a request has an impossible"):
        m.read_from_relay(msgspec.msgpack.encode([hello]))


def test_a_new_request_of_a_size_that_none_can_have_is_refused() -> None:
    with pytest.raises(m.LinkError, match="a request has an impossible count"):
        m.read_from_relay(msgspec.msgpack.encode([[10, 1, replace(SPEC, prompt_tokens=2**60)]]))


def test_invalid_utf_8_raises_only_a_link_error() -> None:
    body = m.frame([m.Farewell(0, "ab")])[4:].replace(b"ab", b"a\xff")
    for read in (m.read_from_relay, m.read_from_brain):
        with pytest.raises(m.LinkError, match="can't be read"):
            read(body)


def test_each_side_refuses_messages_of_its_own_direction() -> None:
    with pytest.raises(m.LinkError):
        m.read_from_relay(m.frame([m.Chosen(1, 1, "p0")])[4:])
    with pytest.raises(m.LinkError):
        m.read_from_brain(m.frame([m.PutBack(1)])[4:])


def test_messages_are_defined_in_the_order_of_their_tags() -> None:
    tags = [each.__struct_config__.tag for each in vars(m).values() if isinstance(each, type(m.Message))]
    numbers = [tag for tag in tags if tag is not None]
    assert numbers == sorted(numbers)


def test_message_tags_are_unique() -> None:
    tags = [cls.__struct_config__.tag for union in (m.FromRelay, m.FromBrain) for cls in union.__args__]
    shared = {cls.__struct_config__.tag for cls in (m.Beat, m.Farewell, m.Explained)}
    assert len(tags) - len(shared) == len(set(tags))
