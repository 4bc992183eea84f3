"""`Config`: all settings of a router, put together from the sections of the YAML.

Each section is a frozen model in `config/sections`, and each field of it has its bounds, its default and its meaning.
The field is the only place where a setting is described: error texts (`loading.py`), docs/settings.md and
`check-config` (`describe.py`) are derived from it. What one value may be is in `values.py`, the rules that involve two
settings in `rules.py`: `Config` asks for them and raises `ConfigError` itself, so a `Config` that exists is consistent,
however it was made.

None means unset: the value then follows from another setting, and the description says how. Zero is a value.
"""

from collections.abc import Iterator
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from balanceroute.config.addresses import host_in_url, is_loopback
from balanceroute.config.rules import broken_rules
from balanceroute.config.sections.access import Auth, MetricsPage, TlsFiles
from balanceroute.config.sections.failures import Health, Retry
from balanceroute.config.sections.limits import Limits
from balanceroute.config.sections.listen import Listen
from balanceroute.config.sections.operation import Layerwise, Lifecycle, Log
from balanceroute.config.sections.routing import Predictor, Routing
from balanceroute.config.sections.section import Section
from balanceroute.config.sections.tiers import Decode, Prefill, Worker
from balanceroute.config.sections.waiting import Pool, Queue
from balanceroute.config.urls import normalised_url
from balanceroute.config.values import KV_PIN_S, Connector, is_wildcard
from balanceroute.core.knobs import BR_H_BETA, PolicySettings
from balanceroute.errors import ConfigError

UNPINNED_TTL_S = 240.0  # of the pool where the connector pins nothing: half of mooncake_v1's pin time, as there


class Config(Section):
    """The whole configuration of a router, checked."""

    listen: Listen = Listen.model_validate({})
    connector: Connector = Field(
        "mooncake_v1",
        description="How KV gets from prefiller to decoder; the engines' own connector. mooncake_v1: "
        "MooncakeConnectorV1 or V2 of vllm-ascend, the decoder pulls. nixl: NixlConnector of vLLM, the decoder pulls "
        "under a short lease. mooncake_layerwise: MooncakeLayerwiseConnector of vllm-ascend, the decoder is chosen "
        "first and requests the prefill.",
    )
    prefill: Prefill
    decode: Decode
    routing: Routing = Routing.model_validate({})
    predictor: Predictor = Predictor.model_validate({})
    pool: Pool = Pool.model_validate({})
    queue: Queue = Queue.model_validate({})
    limits: Limits = Limits.model_validate({})
    retry: Retry = Retry.model_validate({})
    health: Health = Health.model_validate({})
    lifecycle: Lifecycle = Lifecycle.model_validate({})
    auth: Auth = Auth.model_validate({})
    tls: TlsFiles = TlsFiles.model_validate({})
    metrics: MetricsPage = MetricsPage.model_validate({})
    log: Log = Log.model_validate({})
    layerwise: Layerwise = Layerwise.model_validate({})

    @property
    def decode_first(self) -> bool:
        """Whether the decode worker is chosen before the prefill, and asks for it."""
        return self.connector == "mooncake_layerwise"

    @property
    def callback_url(self) -> str:
        """Base URL of the router as decode workers reach it (mooncake_layerwise); "" where it can't be known."""
        if self.layerwise.callback_url is not None:
            return self.layerwise.callback_url
        host, port = self.listen.host, self.listen.port
        elsewhere = not all(is_loopback(urlsplit(worker.url).hostname) for worker in self.decode.workers)
        if port == 0 or is_wildcard(host) or (elsewhere and is_loopback(host)):
            return ""
        scheme = "http" if self.tls.cert_file is None else "https"
        try:
            return normalised_url(f"{scheme}://{host_in_url(host)}:{port}")
        except ValueError:  # fe80::1%eth0, or a name that is not ASCII: listened on, but not put into a URL
            return ""

    @property
    def kv_pin_s(self) -> float | None:
        """Seconds that a prefiller keeps KV nobody pulled; None: the connector pins none."""
        default = KV_PIN_S[self.connector][0]
        return default if self.prefill.kv_pin_s is None else self.prefill.kv_pin_s

    @property
    def pool_ttl_s(self) -> float:
        """Longest wait in the prompt pool, seconds: `pool.ttl_s` or the connector's default."""
        if self.pool.ttl_s is not None:
            return self.pool.ttl_s
        pin_s = self.kv_pin_s
        return UNPINNED_TTL_S if pin_s is None else pin_s * KV_PIN_S[self.connector][1]

    @property
    def max_wait_s(self) -> float:
        """Pool wait after which a request goes first, in seconds."""
        given = self.routing.max_wait_s
        return min(PolicySettings().max_wait_s, self.pool_ttl_s / 2) if given is None else given

    @property
    def beta(self) -> float | None:
        """Penalty per token above the margin; None: the number of decode workers at that moment (br_0)."""
        if self.routing.beta is not None:
            return self.routing.beta
        return None if self.routing.policy == "br_0" else BR_H_BETA

    @property
    def refresh_period_steps(self) -> int:
        """Generated tokens between two predictions (the paper's dT = H/2)."""
        given = self.predictor.period_steps
        return max(1, self.routing.horizon_steps // 2) if given is None else given

    @model_validator(mode="after")
    def _rules_between_settings(self) -> Self:
        if problems := list(broken_rules(self)):
            raise ConfigError(*problems)
        return self

    def all_workers(self) -> Iterator[tuple[str, Worker]]:
        """Every worker with the path of its key."""
        yield from ((f"prefill.workers[{i}]", worker) for i, worker in enumerate(self.prefill.workers))
        yield from ((f"decode.workers[{i}]", worker) for i, worker in enumerate(self.decode.workers))
