"""The bodies that `scripts.check_message_bodies` asks vLLM's own types about: these types are not here."""

import orjson

from scripts.check_message_bodies import bodies


def test_random_messages_become_bodies_for_a_probe_a_decode_worker_and_tokenize() -> None:
    lines, accepted = bodies(40)
    assert 0 < accepted <= 40 and len(lines) == 3 * accepted
    probe, decode, tokenize = (orjson.loads(line) for line in lines[:3])
    assert probe["max_tokens"] == 1
    assert "max_tokens" in decode
    assert "max_tokens" not in tokenize
