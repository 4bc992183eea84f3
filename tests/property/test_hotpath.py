"""The compiled hot path matches events and joins chunks as the Python one does, on any input."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from balanceroute.proxy.hotpath import reference

compiled: Any = pytest.importorskip(
    "balanceroute.proxy.hotpath.compiled", reason="no C compiler when this was installed"
)

HEAD, MID, TAIL = b'data: {"a":1,"text":"', b'","token_ids":[', b'],"z":null}\n\n'
TEMPLATES = [
    (HEAD, MID, TAIL, HEAD, b'","token_ids":null,"z":null}\n\n'),
    (HEAD, MID, TAIL, b'data: {"a":2,"text":"', b'","token_ids":null,"z":null}\n\n'),
    (b'x"', b'",', b"]", b"y", b"z"),
    (b"", b'"', b"]\n", b"", b""),
]
ids = st.lists(st.integers(0, 2**33) | st.just(0), max_size=4).map(lambda each: b",".join(b"%d" % one for one in each))
odd_ids = st.text("0123456789,,+ ]x", max_size=14).map(str.encode)
texts = st.binary(max_size=12) | st.text(' \\"\n\ré,}', max_size=8).map(str.encode)


@st.composite
def reads(draw: st.DrawFn) -> tuple[tuple[bytes, ...], bytes]:
    """A template, and bytes that fit it, nearly do or don't at all."""
    template = draw(st.sampled_from(TEMPLATES))
    head, mid, tail = template[:3]
    raw = b"".join(head + draw(texts) + mid + draw(ids | odd_ids) + tail for _ in range(draw(st.integers(1, 3))))
    cut = draw(st.integers(0, len(raw)))
    return template, draw(st.sampled_from([raw, raw[:cut], raw[cut:], raw + raw, raw[:cut] + b"!" + raw[cut:]]))


def outcome(matcher: Any, raw: bytes) -> tuple[object, ...]:
    return matcher.match(raw), matcher.tokens, matcher.ids.tolist(), matcher.printed


@given(st.lists(reads(), min_size=1, max_size=4), st.booleans())
@example([(TEMPLATES[0], HEAD + b"a" + MID + b"4294967295,0" + TAIL)], False)
@example([(TEMPLATES[0], HEAD + b"a" + MID + b"1,4294967296" + TAIL)], False)
@example([(TEMPLATES[0], HEAD + MID + b"1" * 5000 + TAIL)], True)
@example([(TEMPLATES[0], HEAD + MID + b"00000000001" + TAIL)], True)
@example([(TEMPLATES[0], HEAD + MID + b"1," + TAIL)], False)
@example([(TEMPLATES[0], HEAD + MID[:-1] + TAIL)], False)
def test_both_matchers_take_the_same_events_and_count_the_same(
    given_reads: list[tuple[tuple[bytes, ...], bytes]], want_ids: bool
) -> None:
    python, cython = reference.EventMatcher(want_ids), compiled.EventMatcher(want_ids)
    for template, raw in given_reads:
        assert outcome(cython, raw) == outcome(python, raw)
        python.learn(*template)
        cython.learn(*template)
        assert outcome(cython, raw) == outcome(python, raw)
    python.forget()
    cython.forget()
    assert outcome(cython, given_reads[-1][1]) == outcome(python, given_reads[-1][1])


@pytest.mark.parametrize("module", [reference, compiled])
def test_events_that_fit_are_counted_and_leave_without_their_ids(module: Any) -> None:
    matcher = module.EventMatcher(False)
    matcher.learn(*TEMPLATES[0])
    one, other = HEAD + b"hi" + MID + b"7,8" + TAIL, HEAD + MID + b"9" + TAIL
    one_out, other_out = HEAD + b"hi" + TEMPLATES[0][4], HEAD + TEMPLATES[0][4]
    assert outcome(matcher, one) == (one_out, 2, [7, 8], 2)
    assert outcome(matcher, other) == (other_out, 3, [7, 8, 9], 2)
    assert outcome(matcher, one + other + one[:-1]) == (None, 3, [7, 8, 9], 2)
    assert outcome(matcher, one + other) == (one_out + other_out, 6, [7, 8, 9, 7, 8, 9], 5)


@pytest.mark.parametrize("module", [reference, compiled])
def test_nothing_fits_while_an_event_is_incomplete_or_the_stream_has_ended(module: Any) -> None:
    matcher = module.EventMatcher(False)
    matcher.learn(*TEMPLATES[0])
    whole = HEAD + b"hi" + MID + b"7" + TAIL
    matcher.parts.append(b"data: ")
    assert matcher.match(whole) is None
    matcher.parts.clear()
    matcher.end = "ended"
    assert matcher.match(whole) is None
    matcher.end = None
    assert matcher.match(whole)


sizes = st.integers(0, 40).map(lambda size: b"%x" % size) | st.text("0aAfFgG+-x_ ;", max_size=10).map(str.encode)
chunks = st.tuples(sizes, st.sampled_from([b"\r\n", b"\n", b""]), st.binary(max_size=40)).map(b"".join)
framed = st.binary(min_size=1, max_size=40).map(lambda body: b"%x\r\n%b\r\n" % (len(body), body))


@given(st.binary(max_size=60) | st.lists(framed | chunks, max_size=4).map(b"".join))
@example(b"00000001\r\na\r\n")
@example(b"000000001\r\na\r\n")
@example(b"ffffffff\r\na\r\n")
@example(b"fffffffe\r\n3\r\nabc\r\n")
@example(b"fffffff\r\na\r\n")
@example(b"+1\r\na\r\n")
@example(b"1\r\na\r\n0\r\n\r\n")
def test_both_take_the_same_reads_for_whole_chunks(data: bytes) -> None:
    assert compiled.unchunked(data) == reference.unchunked(data)


@pytest.mark.parametrize("module", [reference, compiled])
def test_whole_chunks_are_joined_and_anything_else_is_left_to_the_parser(module: Any) -> None:
    assert module.unchunked(b"5\r\nhello\r\n") == b"hello"
    assert module.unchunked(b"5\r\nhello\r\nB\r\n to you all\r\n") == b"hello to you all"
    for other in (
        b"",
        b"5\r\nhell",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5;x=y\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
    ):
        assert module.unchunked(other) is None


@pytest.mark.parametrize("module", [reference, compiled])
def test_a_pump_that_cannot_write_keeps_no_other_waiting(module: Any) -> None:
    said: list[bytes | str] = []

    class Pump(module.EventPump):  # type: ignore[misc]
        def failed(self, error: Exception) -> None:
            said.append(str(error))

    def write(part: bytes) -> bool:
        if part == b"2":
            raise OSError("gone")
        said.append(part)
        return True

    turn: list[Any] = []
    flusher = module.Flusher(SimpleNamespace(call_soon=turn.append))
    for part in (b"1", b"2", b"3"):
        Pump(module.EventMatcher(False), lambda tokens: None, flusher, write).take(part)
    (flush,) = turn
    flush()
    assert said == [b"1", "gone", b"3"]
