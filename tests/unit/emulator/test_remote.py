"""KV between two emulated processes, here two clusters of one loop that reach each other over HTTP alone."""

import asyncio

import httpx
import pytest

from balanceroute.emulator import ClusterShape, EmulatedCluster
from balanceroute.emulator.cluster import Part
from balanceroute.emulator.connectors import Connector, PinState
from tests.plain_http import PLAIN
from tests.unit.emulator.conversation import FAST, decode_ids, probe
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 340))


@pytest.mark.parametrize("connector", [Connector.MOONCAKE_V1, Connector.NIXL])
async def test_kv_claimed_by_an_engine_that_died_is_available_to_another(connector: Connector) -> None:
    lease_s = PATIENCE_S / FAST
    shape = ClusterShape(decoders=2, connector=connector, max_num_seqs=1, lease_s=lease_s, time_scale=FAST)
    async with EmulatedCluster(shape, part=Part(range(1), range(0))) as prefill:
        part = Part(range(0), range(2), tuple(prefill.prefill_urls))
        async with (
            EmulatedCluster(shape, part=part) as decode,
            httpx.AsyncClient(timeout=PATIENCE_S, **PLAIN) as client,
        ):
            params = await probe(prefill, client, PROMPT, max_tokens=1)
            pin = prefill.prefill[0].pins.get(params["remote_request_id"])
            assert pin is not None
            await decode.inject("d0", "freeze")  # it claims, and never pulls
            asked = asyncio.ensure_future(decode_ids(decode, client, PROMPT, kv_transfer_params=params))
            await until(lambda: decode.decode[0].queue_counts() == (0, 1, 0))
            assert pin.state is PinState.CLAIMED
            await decode.inject("d0", "kill_engine")
            await asyncio.gather(asked, return_exceptions=True)
            await until(lambda: pin.state is PinState.PINNED)
            decode.decode_urls.reverse()
            ids = await decode_ids(decode, client, PROMPT, kv_transfer_params=params, max_tokens=5)
            assert len(ids) == 5
            assert (decode.violations(), prefill.idle()) == ({}, True)
