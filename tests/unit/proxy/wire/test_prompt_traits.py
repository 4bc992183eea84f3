"""What is counted of a prompt that no tokenizer has seen."""

import json
from base64 import b64encode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from balanceroute.proxy.wire import prompt_traits
from balanceroute.proxy.wire.prompt_traits import (
    MAX_SIZED,
    SAMPLED_BYTES,
    TRAITS,
    Traits,
    image_size,
    traits_of,
    weigh,
    weights_of_pairs,
)
from tests.unit.proxy.admission.prompts import a_request, jpeg, measured, png


def traits_of_text(text: bytes) -> Traits:
    """The traits of a prompt that is this text, as in JSON."""
    return traits_of(replace(a_request({"prompt": "x"}), prompt_json=text))


def test_a_huge_prompt_is_sampled_and_still_met() -> None:
    text = "\n\n".join(json.dumps(row["body"]) for row in measured()).encode()
    assert len(text) > SAMPLED_BYTES
    sampled, whole = (
        traits_of_text(text),
        sum(traits_of_text(text[at : at + 60_000]) for at in range(0, len(text), 60_000)),
    )
    assert abs(sampled.sum() / whole.sum() - 1) < 0.05


def test_a_text_counts_the_same_whether_the_count_is_compiled_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'Zwölf Boxkämpfer, 12 of them:\n\tx == "Ж漢字😀" \\n ALL'.encode() * 20
    seen = []
    for compiled in (True, False):
        monkeypatch.setattr(prompt_traits, "COMPILED", compiled)
        seen.append(traits_of_text(text).tolist())
    assert seen[0] == seen[1] and sum(seen[0]) > 100


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("row", measured()[:8], ids=lambda row: row["kind"])
def test_a_prompt_weighs_the_same_by_its_pairs_of_bytes_as_by_its_traits(
    row: dict[str, Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_traits, "COMPILED", compiled)
    request = a_request(row["body"])
    weights = np.random.default_rng(7).normal(size=(2, len(TRAITS)))
    weights[:, [TRAITS.index(name) for name in ("prompts", "messages", "media", "patches")]] = 0.0
    *weighed, _, _ = weigh(request, weights_of_pairs(weights))
    assert np.allclose(weighed, weights.dot(traits_of(request)))


UNSIZED = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


def counts(body: dict[str, Any]) -> dict[str, float]:
    """What is counted of a request, by its name."""
    return dict(zip(TRAITS, traits_of(a_request(body)).tolist(), strict=True))


def chat(*contents: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("text", "trait", "count"),
    [
        ("three little words", "words", 3),
        ("in 2026 and 7", "digit_runs", 2),
        ("in 2026 and 7", "digits", 5),
        ("x == y;", "mark_runs", 2),
        ("Big and LARGE words", "capitals", 2),
    ],
)
def test_runs_of_one_kind_and_their_bytes_are_counted(text: str, trait: str, count: float) -> None:
    before = dict(zip(TRAITS, traits_of_text(b"").tolist(), strict=True))[trait]
    assert dict(zip(TRAITS, traits_of_text(text.encode()).tolist(), strict=True))[trait] - before == count


def test_every_message_counts_beside_its_text() -> None:
    one, three = counts(chat("a b c")), counts(chat("a", "b", "c"))
    assert (one["messages"], three["messages"]) == (1, 3)


def test_an_image_counts_by_its_patches_and_not_by_its_bytes() -> None:
    assert image_size(jpeg(56, 28)) == (56, 28)
    small, large = (counts(chat([{"type": "image_url", "image_url": {"url": png(side, side)}}])) for side in (280, 560))
    assert small["media"] == large["media"] == 1 and large["patches"] == 4 * small["patches"] > 0
    assert small["letters"] == large["letters"] < 1000


def test_the_text_beside_an_image_counts_and_an_image_elsewhere_counts_as_one_of_usual_size() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    both = counts(chat([{"type": "text", "text": "three little words"}, image], "two more"))
    text = counts(chat([{"type": "text", "text": "three little words"}], "two more"))
    assert (both["words"], both["media"], text["media"]) == (text["words"], 1, 0)
    assert both["patches"] == counts(chat([image | {"image_url": "https://example.com/cat.png"}]))["patches"] > 0
    assert counts(chat([{"type": "input_audio", "input_audio": {"data": "AAAA"}}]))["patches"] == 0


def test_what_a_chat_template_writes_beside_the_messages_counts() -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "some words of a tool"}}]
    assert counts(chat("a") | {"tools": tools})["words"] >= counts(chat("a"))["words"] + 7
    assert counts(chat("a") | {"tools": []}) == counts(chat("a"))


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("gif", b"GIF89a" + (640).to_bytes(2, "little") + (48).to_bytes(2, "little") + b"..."),
        (
            "webp",
            b"RIFF....WEBPVP8X" + bytes(8) + (639).to_bytes(3, "little") + (47).to_bytes(3, "little") + b"VP8 ...",
        ),
        ("jpeg", b"\xff\xd8\xff\xe0\x00\x04..\xff\xc0\x00\x11\x08\x00\x30\x02\x80..."),
    ],
)
def test_an_image_s_size_is_read_from_its_head(kind: str, raw: bytes) -> None:
    assert image_size(f"data:image/{kind};base64,{b64encode(raw + bytes(5000)).decode()}") == (640, 48)


@pytest.mark.parametrize("raw", [b"RIFF....WEBPVP8 ", b"\xff\xd8\xff\xe0\x00\x04", b"\x89PNG", b"GIF8", b""])
def test_an_image_of_another_kind_or_cut_short_has_no_size(raw: bytes) -> None:
    assert image_size(f"data:image/x;base64,{b64encode(raw).decode()}") is None


def test_of_very_many_images_the_first_have_their_sizes_read() -> None:
    """Seven thousand heads of JPEGs full of markers stopped everybody's stream for two seconds."""
    small = {"type": "image_url", "image_url": {"url": png(28, 28)}}
    all_sized, two_more = counts(chat([small] * MAX_SIZED)), counts(chat([small] * (MAX_SIZED + 2)))
    assert (all_sized["media"], all_sized["patches"]) == (MAX_SIZED, MAX_SIZED)
    assert two_more["patches"] == MAX_SIZED + 2 * counts(chat([UNSIZED]))["patches"]


@pytest.mark.parametrize("url", ["https://example.com/cat.png", "data:image/png;base64,!!", "data:,", ""])
def test_an_image_that_cannot_be_looked_at_has_no_size(url: str) -> None:
    assert image_size(url) is None
