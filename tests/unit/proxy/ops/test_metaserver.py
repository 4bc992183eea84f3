"""What a decode worker's callback becomes."""

from types import SimpleNamespace
from typing import Any

from balanceroute.proxy.ops.metaserver import Metaserver
from balanceroute.proxy.telemetry.instruments import CounterFamily
from balanceroute.proxy.wire.connectors import Callbacks


def test_a_callback_reaches_the_prefiller_byte_for_byte() -> None:
    callbacks, asked = Callbacks("http://router"), list[bytes]()
    callbacks.expect("token", "cmpl-a-0", asked.append)
    counts = SimpleNamespace(callbacks=CounterFamily("callbacks", "", ["outcome"]))
    services: Any = SimpleNamespace(callbacks=callbacks, metrics=counts)
    body = b'{"request_id": "cmpl-a-0", "remote_address": 18446744073709551616}'
    assert Metaserver(lambda: services).answer("token", body) == "accepted"
    assert asked == [body]
