"""The hot path matches events and joins chunks as its rules say, on any input, compiled and as it is."""

import contextlib
import hashlib
import importlib
import os
import re
import subprocess
import sys
from array import array
from operator import mul
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from balanceroute.proxy.hotpath import events

FORMS: dict[str, Any] = {"python": events}
with contextlib.suppress(ImportError):  # without a C compiler there is the one form only
    FORMS["compiled"] = importlib.import_module("balanceroute.proxy.hotpath.compiled")
both = pytest.mark.parametrize("module", FORMS.values(), ids=FORMS)

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


class Oracle:
    """What a matcher is to do, by regular expressions."""

    def __init__(self, want_ids: bool) -> None:
        self.tokens, self.ids, self.printed = 0, [], 0  # type: ignore[var-annotated]
        self.want_ids, self.template = want_ids, None

    def learn(self, *template: Any) -> None:
        self.template = template  # type: ignore[assignment]

    def match(self, raw: bytes) -> bytes | None:
        if self.template is None or not raw:
            return None
        head, mid, tail, head_out, end_out = self.template
        ids_of = rb"((?:[0-9]{1,10}(?:,[0-9]{1,10})*)?)"
        event = re.compile(re.escape(head) + rb'([^"\n]*)(' + re.escape(mid) + ids_of + re.escape(tail) + rb")")
        found: list[tuple[bytes, bytes, list[int]]] = []
        at = 0
        while at < len(raw):
            one = event.match(raw, at)
            if one is None:
                return None
            listed = [int(each) for each in one[3].split(b",") if each]
            if any(each >= 2**32 for each in listed):
                return None
            found.append((one[1], one[2], listed))
            at = one.end()
        for text, _, listed in found:
            self.ids += listed
            self.tokens += len(listed)
            self.printed = self.tokens if text else self.printed
        return b"".join(head_out + text + (rest if self.want_ids else end_out) for text, rest, _ in found)


def expected(oracle: Oracle, raw: bytes) -> tuple[object, ...]:
    return oracle.match(raw), oracle.tokens, oracle.ids, oracle.printed


@both
@given(st.lists(reads(), min_size=1, max_size=4), st.booleans())
@example([(TEMPLATES[0], HEAD + b"a" + MID + b"4294967295,0" + TAIL)], False)
@example([(TEMPLATES[0], HEAD + b"a" + MID + b"1,4294967296" + TAIL)], False)
@example([(TEMPLATES[0], HEAD + MID + b"1" * 5000 + TAIL)], True)
@example([(TEMPLATES[0], HEAD + MID + b"00000000001" + TAIL)], True)
@example([(TEMPLATES[0], HEAD + MID + b"1," + TAIL)], False)
@example([(TEMPLATES[0], HEAD + MID[:-1] + TAIL)], False)
@example([(TEMPLATES[0], HEAD + b"a" * 64 + MID + b"1" + TAIL)], False)
@example([(TEMPLATES[0], HEAD + b"a" * 200 + MID + b"1" + TAIL + HEAD + b"a" * 90)], False)
@example([(TEMPLATES[0], HEAD + b"a" * 100 + b"\n" + MID + b"1" + TAIL)], False)
def test_a_matcher_accepts_exactly_the_matching_events(
    module: Any, given_reads: list[tuple[tuple[bytes, ...], bytes]], want_ids: bool
) -> None:
    matcher, oracle = module.EventMatcher(want_ids), Oracle(want_ids)
    for template, raw in given_reads:
        assert outcome(matcher, raw) == expected(oracle, raw)
        matcher.learn(*template)
        oracle.learn(*template)
        assert outcome(matcher, raw) == expected(oracle, raw)
    matcher.forget()
    oracle.template = None
    assert outcome(matcher, given_reads[-1][1]) == expected(oracle, given_reads[-1][1])


@both
def test_matching_events_are_counted_and_lose_their_ids(module: Any) -> None:
    matcher = module.EventMatcher(False)
    matcher.learn(*TEMPLATES[0])
    one, other = HEAD + b"hi" + MID + b"7,8" + TAIL, HEAD + MID + b"9" + TAIL
    one_out, other_out = HEAD + b"hi" + TEMPLATES[0][4], HEAD + TEMPLATES[0][4]
    assert outcome(matcher, one) == (one_out, 2, [7, 8], 2)
    assert outcome(matcher, other) == (other_out, 3, [7, 8, 9], 2)
    assert outcome(matcher, one + other + one[:-1]) == (None, 3, [7, 8, 9], 2)
    assert outcome(matcher, one + other) == (one_out + other_out, 6, [7, 8, 9, 7, 8, 9], 5)


@both
def test_a_matcher_accepts_nothing_within_an_event(module: Any) -> None:
    matcher = module.EventMatcher(False)
    matcher.learn(*TEMPLATES[0])
    whole = HEAD + b"hi" + MID + b"7" + TAIL
    matcher.between_events = False
    assert matcher.match(whole) is None
    matcher.between_events = True
    assert matcher.match(whole)


sizes = st.integers(0, 40).map(lambda size: b"%x" % size) | st.text("0aAfFgG+-x_ ;", max_size=10).map(str.encode)
chunks = st.tuples(sizes, st.sampled_from([b"\r\n", b"\n", b""]), st.binary(max_size=40)).map(b"".join)
framed = st.binary(min_size=1, max_size=40).map(lambda body: b"%x\r\n%b\r\n" % (len(body), body))


@both
@given(st.binary(max_size=60) | st.lists(framed | chunks, max_size=4).map(b"".join))
@example(b"00000001\r\na\r\n")
@example(b"000000001\r\na\r\n")
@example(b"ffffffff\r\na\r\n")
@example(b"fffffffe\r\n3\r\nabc\r\n")
@example(b"fffffff\r\na\r\n")
@example(b"+1\r\na\r\n")
@example(b"1\r\na\r\n0\r\n\r\n")
def test_exactly_whole_chunks_are_joined(module: Any, data: bytes) -> None:
    body, rest = b"", data
    while rest:
        size = re.match(rb"([0-9a-fA-F]{1,7})\r\n", rest)
        length = int(size[1], 16) if size else 0
        if size is None or not length or rest[size.end() + length :][:2] != b"\r\n":
            break
        body += rest[size.end() : size.end() + length]
        rest = rest[size.end() + length + 2 :]
    assert module.unchunked(data) == (body if body and not rest else None)


@both
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


class Scanner:
    """Events that all fit."""

    end: object = None

    def __init__(self, module: Any) -> None:
        self.matcher = module.EventMatcher(False)
        self.matcher.learn(*TEMPLATES[0])


@both
def test_a_pump_that_cannot_write_does_not_delay_others(module: Any) -> None:
    written: list[bytes] = []

    def write(part: bytes) -> bool:
        if b"2" in part:
            raise OSError("gone")
        written.append(part)
        return True

    turn: list[Any] = []
    flusher = module.Flusher(turn.append)
    pumps = []
    for text in (b"1", b"2", b"3"):
        client = SimpleNamespace(write=write)
        pumps.append(module.Pump(None, Scanner(module), client, lambda tokens: None, flusher, "done"))
        pumps[-1].chunk(HEAD + text + MID + b"7" + TAIL)
    (flush,) = turn
    flush()
    assert written == [HEAD + b"1" + TEMPLATES[0][4], HEAD + b"3" + TEMPLATES[0][4]]
    assert [str(pump.failure) for pump in pumps] == ["None", "gone", "None"]
    assert [pump.over for pump in pumps] == [False, True, False]


@both
def test_a_pump_pauses_the_worker_before_the_client_buffer_exceeds_its_limit(
    module: Any,
) -> None:
    """One turn of the loop may read tens of MiB of one socket."""
    paused: list[bool] = []
    written: list[bytes] = []
    turn: list[Any] = []
    kept = 0

    def write(part: bytes) -> bool:  # as a socket: full once it holds something
        full = bool(written)
        if not full:
            written.append(part)
        return not full

    reply, client = SimpleNamespace(pause=lambda: paused.append(True)), SimpleNamespace(write=write)
    pump = module.Pump(reply, Scanner(module), client, lambda tokens: None, module.Flusher(turn.append), "done")
    while not paused and kept < 2**26:
        pump.chunk(HEAD + b"x" * 10_000 + MID + b"7" + TAIL)
        kept = sum(map(len, written)) + len(pump.out)
    assert kept < 2**20 and paused == [True]
    for flush in turn:
        flush()
    assert paused == [True] and len(pump.out) < kept


@both
@given(st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=4), st.booleans())
def test_parts_are_written_as_chunks_and_the_first_with_the_head(
    module: Any, parts: list[bytes], chunked: bool
) -> None:
    sent: list[bytes] = []
    refused: list[bytes] = []
    writer = module.PartWriter(sent.append, lambda part: bool(refused.append(part)))
    assert not writer.write(parts[0]) and (sent, refused) == ([], parts[:1])
    writer.open, writer.chunked, writer.head = True, chunked, b"head"
    assert all([writer.write(part) for part in parts])
    framed = [b"%x\r\n%b\r\n" % (len(part), part) if chunked else part for part in parts]
    assert sent == [b"head" + framed[0], *framed[1:]]


@both
@given(st.binary(max_size=300), st.binary(min_size=256, max_size=256), st.integers(0, 10))
def test_pairs_of_neighbouring_bytes_are_counted_and_weighed_by_their_classes(
    module: Any, text: bytes, table: bytes, before: int
) -> None:
    class_of = bytes(kind % 11 for kind in table)
    kinds = [before, *(class_of[byte] for byte in text)]
    expected = [0] * 121
    for first, second in zip(kinds, kinds[1:], strict=False):
        expected[first * 11 + second] += 1
    counts = array("q", [0] * 121)
    module.count_pairs(text, class_of, 11, before, counts)
    assert counts.tolist() == expected
    weights = array("d", [pair % 17 for pair in range(242)])  # whole numbers: their sums are exact in any order
    sums = tuple(sum(map(mul, expected, half)) for half in (weights[:121], weights[121:]))
    assert module.weigh_pairs(text, class_of, 11, before, weights, 121) == sums


@both
@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)), min_size=1), st.data())
def test_counts_that_differ_are_found_once_with_their_places(
    module: Any, pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, len(pairs)))
    now, known = (array("q", values) for values in zip(*pairs, strict=True))
    before = known.tolist()
    expected = [place for place in range(1, end) if now[place] != before[place]]
    found = module.grown_counts(memoryview(now).toreadonly(), known, end)
    assert (found[::2], found[1::2]) == (expected, [now[place] for place in expected])
    assert known.tolist() == [now[place] if place in expected else before[place] for place in range(len(pairs))]
    assert module.grown_counts(now, known, end) == []


def test_the_source_digest_in_events_py_is_current() -> None:
    folder = Path(events.__file__).parent
    source = (folder / "events.py").read_text().replace(events.SOURCE, "", 1)
    digest = hashlib.blake2b((source + (folder / "compiled.pxd").read_text()).encode(), digest_size=8).hexdigest()
    assert events.SOURCE == digest, f'write SOURCE: Final = "{digest}" into events.py'


def test_a_compiled_module_of_other_sources_is_not_loaded() -> None:
    script = """
import sys, types
old = types.ModuleType("balanceroute.proxy.hotpath.compiled")
old.SOURCE = "of another version"
sys.modules[old.__name__] = old
import balanceroute.proxy
import balanceroute.proxy.hotpath as hotpath
print(hotpath.STALE, hotpath.COMPILED, hotpath.Pump.__module__)
"""
    environment = {name: value for name, value in os.environ.items() if name != "BALANCEROUTE_PURE_PYTHON"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.split() == ["True", "False", "balanceroute.proxy.hotpath.events"]
