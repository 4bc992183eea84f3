"""Traits of a prompt from which its number of tokens is estimated, before an engine has counted them.

Tokenizers cut text into runs of one kind (words, digits, marks, blanks, characters of a script) and the runs into
pieces. So the traits (`TRAITS`) are the numbers of such runs and of their bytes, and the tokens are a weighted sum of
them. The weights differ between models; `admission/prompt_estimates.py` learns them.

Everything that a chat template writes is counted: messages with their roles, tool calls and results, `tools`,
`documents`. The JSON is counted in place of the template's output: its names and brackets are words and marks, too, and
the weights allow for the difference. Media count by their number and the sizes of images, not by their bytes.

Of texts longer than `SAMPLED_BYTES` only evenly spread pieces are read, so the cost is bounded: 2 us of CPU for 1 kB,
10 us for a large prompt; two to four times that if the count is not compiled.
"""

import base64
import binascii
import math
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from balanceroute.proxy.hotpath import COMPILED, count_pairs, weigh_pairs
from balanceroute.proxy.wire.client_request import ClientRequest

Traits = npt.NDArray[np.float64]
PairCounts = npt.NDArray[np.int64]
"""How often each pair of classes is in a text, shape (classes ** 2,)."""
PairWeights = npt.NDArray[np.float64]
"""What each pair of classes weighs, by one model and then by another, shape (2 * classes ** 2,)."""

# The traits in their order, all counts. A run is consecutive bytes of one class.
TRAITS: Final = (
    "prompts", "messages", "words", "letters", "capitals", "digit_runs", "digits", "mark_runs", "marks", "newline_runs",
    "indents", "wide", "letters_2", "letters_3", "letters_4", "media", "patches",
)  # fmt: skip
SAMPLED_BYTES: Final = 2**14
_PIECE_BYTES: Final = 2**9
_PATCH: Final = 28  # pixels per side for one token in Qwen's vision models; for others the weight is learned
_MAX_PATCHES: Final = 16384
_UNKNOWN_PATCHES: Final = 1000  # patches of an image behind a URL, whose size is unknown
MAX_SIZED: Final = 256  # images of a prompt whose sizes are read; of 7000 it took two seconds
_HEAD: Final = 2**12  # characters of a data URL in which an image's size is searched
_TEMPLATE_FIELDS: Final = ("tools", "functions", "documents")
_MEDIA: Final = (b'"image', b'"video', b'"audio', b'"input_audio', b'"file')

LETTER, CAPITAL, DIGIT, MARK, BLANK, NEWLINE, INSIDE, LEAD_2, LEAD_3, WIDE, LEAD_4 = range(11)
_CLASSES: Final = 11


def _class_table() -> bytes:
    table = bytearray([MARK]) * 256
    for first, last, kind in (
        ("a", "z", LETTER), ("A", "Z", CAPITAL), ("0", "9", DIGIT), (" ", " ", BLANK), ("\t", "\t", BLANK),
        ("\n", "\n", NEWLINE), ("\r", "\r", NEWLINE), ("\x80", "\xbf", INSIDE), ("\xc0", "\xdf", LEAD_2),
        ("\xe0", "\xef", LEAD_3), ("\xe3", "\xed", WIDE), ("\xf0", "\xff", LEAD_4),
    ):  # fmt: skip
        table[ord(first) : ord(last) + 1] = bytes([kind]) * (ord(last) - ord(first) + 1)
    return bytes(table)


def _traits_of_pairs() -> npt.NDArray[np.float64]:
    """The traits in each pair of neighbouring bytes, by their classes; shape (traits, classes ** 2)."""
    letters = (LETTER, CAPITAL)
    rules: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # (a byte's class, classes not allowed before it)
        "words": (letters, letters),
        "letters": (letters, ()),
        "capitals": ((CAPITAL,), (CAPITAL,)),
        "digit_runs": ((DIGIT,), (DIGIT,)),
        "digits": ((DIGIT,), ()),
        "mark_runs": ((MARK,), (MARK,)),
        "marks": ((MARK,), ()),
        "newline_runs": ((NEWLINE,), (NEWLINE,)),
        "indents": ((BLANK,), tuple(kind for kind in range(_CLASSES) if kind != NEWLINE)),
        "wide": ((WIDE,), ()),
        "letters_2": ((LEAD_2,), ()),
        "letters_3": ((LEAD_3,), ()),
        "letters_4": ((LEAD_4,), ()),
    }
    table = np.zeros((len(TRAITS), _CLASSES, _CLASSES))
    for name, (comes, not_after) in rules.items():
        for before in set(range(_CLASSES)) - set(not_after):
            table[TRAITS.index(name), before, list(comes)] = 1.0
    return table.reshape(len(TRAITS), -1)


_CLASS_OF: Final = _class_table()
_TRAITS_OF_PAIR: Final = _traits_of_pairs()


def traits_of(request: ClientRequest) -> Traits:
    """The traits of a request's prompt, shape (len(TRAITS),). Not needed for token ids."""
    text, media, patches = _text_of(request)
    pairs, share = pairs_of_text(text)
    traits: Traits = _TRAITS_OF_PAIR.dot(pairs) * share
    traits[0], traits[1], traits[-2], traits[-1] = 1, request.messages, media, patches
    return traits


def weigh(request: ClientRequest, weights: PairWeights) -> tuple[float, float, int, int]:
    """The weighted sum of a prompt's text, computed without its traits.

    Returns: the sum by each row of `weights_of_pairs`, the number of media and their patches.
    """
    text, media, patches = _text_of(request)
    if COMPILED:
        sample, share = _sampled(text)
        own, other = weigh_pairs(sample, _CLASS_OF, _CLASSES, NEWLINE, weights, _CLASSES**2)
    else:
        pairs, share = pairs_of_text(text)
        own, other = weights.reshape(2, -1).dot(pairs).tolist()
    return own * share, other * share, media, patches


def _text_of(request: ClientRequest) -> tuple[bytes, int, int]:
    """The text that a chat template writes, without media; the number of media, and their patches."""
    text, media, patches = request.prompt_json, 0, 0
    if request.endpoint == "chat":
        # media are in a list within the list; a search for one byte is fast
        if text.find(b"[", 1) > 0 and b'"type":' in text and any(name in text for name in _MEDIA):
            text, media, patches = _without_media(text)
        written = template_fields(request)
        if written:
            text = b"".join((text, *written))
    return text, media, patches


def weights_of_pairs(weights: npt.NDArray[np.float64]) -> PairWeights:
    """The weight of each pair of classes, from two rows of weights of traits."""
    of_pairs: PairWeights = weights.dot(_TRAITS_OF_PAIR).ravel()
    return of_pairs


def template_fields(request: ClientRequest) -> list[bytes]:
    """The fields that a chat template writes beside the messages, each as JSON."""
    rest = request.rest
    if rest.keys().isdisjoint(_TEMPLATE_FIELDS):
        return []
    return [_written(rest[name]) for name in _TEMPLATE_FIELDS if rest.get(name)]


def _written(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # nested deeper than orjson writes: refused elsewhere
        return b""


def pairs_of_text(text: bytes) -> tuple[PairCounts, float]:
    """The pairs of neighbouring bytes in UTF-8 text, escaped as in JSON, by class; and the pairs that each sample
    stands for.
    """
    text, share = _sampled(text)
    if COMPILED:
        pairs = np.zeros(_CLASSES**2, np.int64)
        count_pairs(text, _CLASS_OF, _CLASSES, NEWLINE, pairs)
        return pairs, share
    # as Python, a count in a loop takes ten times as long
    classes = np.frombuffer((b"\n" + text).translate(_CLASS_OF), np.uint8)
    return np.bincount(classes[:-1] * _CLASSES + classes[1:], minlength=_CLASSES**2), share


def _sampled(text: bytes) -> tuple[bytes, float]:
    """The sampled pieces of a text, and how many bytes each of their bytes stands for."""
    size = len(text)
    if size > SAMPLED_BYTES:
        step = size * _PIECE_BYTES // SAMPLED_BYTES
        text = b"".join(text[start : start + _PIECE_BYTES] for start in range(0, size - _PIECE_BYTES, step))
    share = size / len(text) if text else 1.0
    if text.find(b"\\") >= 0:
        text = text.replace(b"\\n", b"\n").replace(b'\\"', b'"').replace(b"\\t", b"\t")
    return text, share


def _without_media(messages_json: bytes) -> tuple[bytes, int, int]:
    """Messages without media, the number of media, and the patches of their images."""
    messages = orjson.loads(messages_json)
    media = patches = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        kept = []
        for part in content:
            if isinstance(part, dict) and not isinstance(part.get("text"), str):
                media += 1
                patches += _patches_of(part, sized=media <= MAX_SIZED)
            else:
                kept.append(part)
        message["content"] = kept
    return orjson.dumps(messages), media, patches


def _patches_of(part: dict[str, Any], *, sized: bool) -> int:
    image = part.get("image_url")
    if isinstance(image, dict):
        image = image.get("url")
    if not isinstance(image, str):
        return 0
    size = image_size(image) if sized else None
    if size is None:
        return _UNKNOWN_PATCHES
    width, height = size
    return min(_MAX_PATCHES, math.ceil(width / _PATCH) * math.ceil(height / _PATCH))


def image_size(url: str) -> tuple[int, int] | None:
    """Width and height in pixels of a PNG, GIF, JPEG or WebP in a data URL; None: unknown."""
    head, comma, data = url[:_HEAD].partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        return None
    try:
        raw = base64.b64decode(data[: len(data) // 4 * 4], validate=True)
        return _size_in(raw)
    except (binascii.Error, ValueError, struct.error, IndexError):
        return None


def _size_in(raw: bytes) -> tuple[int, int] | None:
    if raw.startswith(b"\x89PNG"):
        width, height = struct.unpack(">II", raw[16:24])
    elif raw.startswith(b"GIF8"):
        width, height = struct.unpack("<HH", raw[6:10])
    elif raw.startswith(b"RIFF") and raw[12:16] == b"VP8X":
        width, height = (1 + int.from_bytes(raw[at : at + 3], "little") for at in (24, 27))
    elif raw.startswith(b"\xff\xd8"):
        return _jpeg_size(raw)
    else:
        return None
    return width, height


def _jpeg_size(raw: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 < len(raw) and raw[at] == 0xFF:
        marker, length = raw[at + 1], int.from_bytes(raw[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", raw[at + 5 : at + 9])
            return width, height
        at += 2 + length
    return None
