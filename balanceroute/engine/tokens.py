"""Deterministic text: a tokenizer that loses nothing, and a model whose next token is a function of all ids
before it.

**Vocabulary** (`VOCAB_SIZE` ids). 0-2 are special (begin, turn, `EOS_ID`), 3-258 the bytes, then all
triples over "a".."z" and space, then words " w19942" up to the last id. `encode` reads words first, triples
next, bytes for the rest, so `decode(encode(text)) == text` for every text, and `encode(decode(ids)) == ids`
for everything that the model writes.

**Model.** `TokenStream` keeps a running digest over every id so far, prompt and output alike; the next id
is drawn from the digest alone, like greedy decoding. A request that is interrupted and sent again with
prompt + generated ids therefore continues exactly as if it had never stopped. About one token in sixteen is
the first byte of a two-byte letter, which has no text of its own: clients that count chunks instead of
tokens get it wrong, as on the real engine.

**Output length.** Must survive a resume too, although a resumed request does not say where its prompt once
ended. The model writes only ids of one class (words, and the two-byte letters), so the longest suffix of
that class is taken for what has been generated already, and the length is drawn from the digest of
everything before it. The price: a prompt that itself ends in such ids counts as that far along. Prompts
made of ids below `FIRST_WORD_ID`, or of ordinary text, never do.
"""

import hashlib
import math
import re
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from balanceroute.errors import ConfigError

BOS_ID, TURN_ID, EOS_ID = 0, 1, 2
FIRST_BYTE_ID = 3
FIRST_TRIPLE_ID = FIRST_BYTE_ID + 256
FIRST_WORD_ID = FIRST_TRIPLE_ID + 27**3
VOCAB_SIZE = 32_768

LEAD_BYTE = 0xC3  # with one of 0xA0..0xBF behind it: a letter from "à" to "ÿ"
LEAD_ID = FIRST_BYTE_ID + LEAD_BYTE
_TRAIL_IDS = range(FIRST_BYTE_ID + 0xA0, FIRST_BYTE_ID + 0xC0)
_LETTERS = " abcdefghijklmnopqrstuvwxyz"
_PIECE = re.compile(r" w(\d{5})(?!\d)|[ a-z]{3}", re.ASCII)
_PACK = struct.Struct("<I").pack
_QUANTILE_UNIT = 2.0**-64


def _triple_id(text: str) -> int:
    first, second, third = (_LETTERS.index(letter) for letter in text)
    return FIRST_TRIPLE_ID + (first * 27 + second) * 27 + third


_TRIPLES = {a + b + c: _triple_id(a + b + c) for a in _LETTERS for b in _LETTERS for c in _LETTERS}


def _token_bytes(token: int) -> bytes:
    if token < FIRST_BYTE_ID:
        return b""
    if token < FIRST_TRIPLE_ID:
        return bytes((token - FIRST_BYTE_ID,))
    if token < FIRST_WORD_ID:
        rest, third = divmod(token - FIRST_TRIPLE_ID, 27)
        first, second = divmod(rest, 27)
        return (_LETTERS[first] + _LETTERS[second] + _LETTERS[third]).encode()
    return b" w%d" % token


TOKEN_BYTES = tuple(_token_bytes(token) for token in range(VOCAB_SIZE))


def encode(text: str) -> list[int]:
    """Token ids of a text; `decode` gives the same text back."""
    ids: list[int] = []
    position = 0
    for match in _PIECE.finditer(text):
        word = match[1]
        if word is not None and not FIRST_WORD_ID <= int(word) < VOCAB_SIZE:
            continue
        ids.extend(byte + FIRST_BYTE_ID for byte in text[position : match.start()].encode("utf-8", "replace"))
        ids.append(int(word) if word is not None else _TRIPLES[match[0]])
        position = match.end()
    ids.extend(byte + FIRST_BYTE_ID for byte in text[position:].encode("utf-8", "replace"))
    return ids


def decode_bytes(ids: Sequence[int]) -> bytes:
    """The bytes that the ids stand for, which may end inside a letter."""
    return b"".join([TOKEN_BYTES[token] for token in ids])


def decode(ids: Sequence[int]) -> str:
    """Text of token ids; special ids have none, broken letters become U+FFFD."""
    return decode_bytes(ids).decode("utf-8", "replace")


class LengthKind(StrEnum):
    """Where an answer's length comes from; `max_tokens`: the model never stops by itself."""

    MAX_TOKENS = "max_tokens"
    FIXED = "fixed"
    UNIFORM = "uniform"
    GEOMETRIC = "geometric"
    LOGNORMAL = "lognormal"


_PARAMETERS = {
    LengthKind.MAX_TOKENS: 0,
    LengthKind.FIXED: 1,
    LengthKind.UNIFORM: 2,
    LengthKind.GEOMETRIC: 1,
    LengthKind.LOGNORMAL: 2,
}


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """The distribution of answer lengths (tokens, the end-of-text token included), a function of prompt and
    seed.

    Parameters a, b: fixed N; uniform LOW HIGH; geometric MEAN; lognormal MEDIAN SIGMA (of the natural
    logarithm).
    """

    kind: LengthKind = LengthKind.MAX_TOKENS
    a: float = 0.0
    b: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> "OutputLengths":
        """Read `max_tokens`, `fixed:N`, `uniform:LOW,HIGH`, `geometric:MEAN` or `lognormal:MEDIAN,SIGMA`."""
        name, _, rest = text.partition(":")
        accepted = "max_tokens, fixed:N, uniform:LOW,HIGH, geometric:MEAN or lognormal:MEDIAN,SIGMA"
        try:
            kind = LengthKind(name)
            numbers = [float(part) for part in rest.split(",")] if rest else []
        except ValueError as error:
            raise ConfigError(f"output lengths: {text!r} is not {accepted}") from error
        positive = all(math.isfinite(number) and number > 0 for number in numbers)
        if (
            len(numbers) != _PARAMETERS[kind]
            or not positive
            or (kind is LengthKind.UNIFORM and numbers[0] > numbers[1])
        ):
            raise ConfigError(f"output lengths: {text!r} is not {accepted} with positive numbers")
        a, b = [*numbers, 0.0, 0.0][:2]
        return cls(kind, a, b, seed)

    def draw(self, digest: int) -> int | None:
        """Total output tokens for a prompt digest; None when only the request's own limit ends it."""
        if self.kind is LengthKind.MAX_TOKENS:
            return None
        if self.kind is LengthKind.FIXED:
            return max(1, round(self.a))
        u = (_mix(digest ^ _mix(self.seed)) + 0.5) * _QUANTILE_UNIT
        if self.kind is LengthKind.UNIFORM:
            return max(1, round(self.a + u * (self.b - self.a)))
        if self.kind is LengthKind.GEOMETRIC:
            return max(1, math.ceil(-math.log(1.0 - u) * self.a))
        v = _mix(digest + 1) * _QUANTILE_UNIT  # Box-Muller, so that no inverse normal is needed
        normal = math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v)
        return max(1, round(self.a * math.exp(self.b * normal)))


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def _id_bytes(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def prompt_digest(ids: Sequence[int]) -> int:
    """64 bits that stand for a sequence of ids."""
    return int.from_bytes(hashlib.blake2b(_id_bytes(ids), digest_size=8).digest(), "little")


def generated_suffix(ids: Sequence[int]) -> int:
    """How many ids at the end the model may have written itself."""
    count = 0
    for token in reversed(ids):
        if not (token >= FIRST_WORD_ID or token == LEAD_ID or token in _TRAIL_IDS):
            break
        count += 1
    return count


class TokenStream:
    """The one continuation of a prompt.

    `corruption` stands for KV that is not this prompt's (reused, expired or mixed-up blocks): any other
    value than the empty one yields other tokens.
    """

    __slots__ = ("_digest", "_last", "_prompt", "remaining")

    def __init__(
        self, prompt_ids: Sequence[int], lengths: OutputLengths | None = None, corruption: bytes = b""
    ) -> None:
        self._digest = hashlib.blake2b(_id_bytes(prompt_ids), digest_size=8)
        if corruption:
            self._digest.update(corruption)
        self._last = prompt_ids[-1] if prompt_ids else BOS_ID
        self.remaining = _remaining(prompt_ids, lengths)

    def next(self, *, eos: bool = False) -> int:
        """Append and return the next id; `eos` forces the end of text."""
        draw = _mix(int.from_bytes(self._digest.digest(), "little"))
        if eos:
            token = EOS_ID
        elif self._last == LEAD_ID:
            token = _TRAIL_IDS[draw & 31]
        elif draw & 15 == 0:
            token = LEAD_ID
        else:
            token = FIRST_WORD_ID + (draw >> 8) % (VOCAB_SIZE - FIRST_WORD_ID)
        self._digest.update(_PACK(token))
        self._last = token
        return token


def _remaining(prompt_ids: Sequence[int], lengths: OutputLengths | None) -> int | None:
    """Tokens until the model ends by itself, the end-of-text token included; None: never."""
    if lengths is None or lengths.kind is LengthKind.MAX_TOKENS:
        return None
    age = generated_suffix(prompt_ids)
    total = lengths.draw(prompt_digest(prompt_ids[: len(prompt_ids) - age]))
    return None if total is None else max(1, total - age)


def plan_length(natural: int | None, limit: int, *, ignore_eos: bool, min_tokens: int) -> tuple[int, bool]:
    """(output tokens, whether the last one is the end of text) of a request with the given limits."""
    if natural is None or ignore_eos:
        return limit, False
    natural = max(natural, min_tokens + 1) if min_tokens >= natural else natural
    return (natural, True) if natural <= limit else (limit, False)


def continuation(
    prompt_ids: Sequence[int],
    limit: int,
    *,
    lengths: OutputLengths | None = None,
    ignore_eos: bool = True,
    min_tokens: int = 0,
) -> list[int]:
    """All output ids that a healthy cluster must give for a prompt: what a client compares with."""
    stream = TokenStream(prompt_ids, lengths)
    count, ends = plan_length(stream.remaining, limit, ignore_eos=ignore_eos, min_tokens=min_tokens)
    return [stream.next(eos=ends and index == count - 1) for index in range(count)]
