"""Prefillers and decode ranks that speak vllm-ascend's HTTP over a modelled engine: a test instrument.

    async with EmulatedCluster(ClusterShape(prefillers=2, decoders=8)) as cluster:
        cluster.prefill_urls, cluster.decode_urls        # real loopback ports
        cluster.transport()                              # or an httpx transport without sockets
        await cluster.inject("d0", "reset", after_events=3)
        cluster.state(), cluster.violations(), cluster.idle()

Answers are a deterministic function of the prompt (`balanceroute.engine.continuation`), so a client can
check them token by token. Shares no code with the router.
"""

from balanceroute.emulator.cluster import EmulatedCluster
from balanceroute.emulator.connectors import Connector
from balanceroute.emulator.faults import Fault, FaultKind
from balanceroute.emulator.processes import ProcessCluster
from balanceroute.emulator.shape import ClusterShape
from balanceroute.emulator.transport import StreamingTransport

__all__ = ["ClusterShape", "Connector", "EmulatedCluster", "Fault", "FaultKind", "ProcessCluster", "StreamingTransport"]
