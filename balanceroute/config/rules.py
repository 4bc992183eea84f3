"""Rules between settings, for values that are valid one by one. `Config` applies them when it is made."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from balanceroute.config.addresses import host_in_url
from balanceroute.config.urls import place_of
from balanceroute.config.values import KV_PIN_S, POLICY_NAMES, is_wildcard
from balanceroute.plugins import try_policy

if TYPE_CHECKING:
    from balanceroute.config.models import Config


def broken_rules(config: "Config") -> Iterator[str]:
    """One line per rule that the settings break together, with the key, its value and what would be accepted."""
    yield from _worker_problems(config)
    yield from _tls_problems(config)
    yield from _listen_problems(config)
    yield from _predictor_problems(config)
    yield from _routing_problems(config)
    yield from _layerwise_problems(config)
    yield from _time_problems(config)


def _listen_problems(config: "Config") -> Iterator[str]:
    listen = config.listen
    if listen.lease is not None and not listen.relays:
        yield f"listen.lease = {listen.lease!r}: accepted only with listen.relays, 1 or more"
    yield from _link_problems(config)
    yield from _brains_problems(config)
    if listen.admin_address is not None and listen.admin_address[1] == listen.port != 0:
        yield f"listen.admin = {listen.admin!r}: accepted is another port than listen.port"


def _routing_problems(config: "Config") -> Iterator[str]:
    routing = config.routing
    if routing.options and routing.policy in POLICY_NAMES:
        yield f"routing.options: {routing.policy} takes none; its knobs are the other keys of routing"
    if routing.policy not in POLICY_NAMES:
        try_policy(routing.policy, routing.horizon_steps, routing.options)
    if routing.pool_bypass and routing.policy == "br_h":
        yield "routing.pool_bypass = true: accepted only with routing.policy br_0; br_h needs the pool"


def _layerwise_problems(config: "Config") -> Iterator[str]:
    if config.decode_first:
        if not config.callback_url:
            yield (
                f"listen = {config.listen.host}:{config.listen.port}: decode workers call the router back "
                "(mooncake_layerwise) and can't reach it there; set layerwise.callback_url, such as "
                "http://10.0.0.5:8000, or listen on one address and port"
            )
        if config.decode.overlap_requests not in (0, "auto"):
            yield (
                f"decode.overlap_requests = {config.decode.overlap_requests}: accepted only where prefill comes "
                "first; mooncake_layerwise prefills when a decode worker asks"
            )
    elif config.layerwise.callback_url is not None:
        yield (
            f"layerwise.callback_url = {config.layerwise.callback_url!r}: accepted only with connector "
            f"mooncake_layerwise, not {config.connector}"
        )


def _time_problems(config: "Config") -> Iterator[str]:
    if config.prefill.kv_pin_s is not None and KV_PIN_S[config.connector][0] is None:
        yield f"prefill.kv_pin_s = {config.prefill.kv_pin_s:g}: {config.connector} pins no KV; leave it out"
    pin_s = config.kv_pin_s
    if pin_s is not None and config.pool_ttl_s >= pin_s:
        yield (
            f"pool.ttl_s = {config.pool_ttl_s:g}: accepted is less than the {pin_s:g} s after which a "
            f"{config.connector} prefiller drops the KV (prefill.kv_pin_s)"
        )
    if config.retry.longest_delay_s < config.retry.base_delay_s:
        yield (
            f"retry.max_delay_s = {config.retry.longest_delay_s:g}: accepted is at least retry.base_delay_s "
            f"({config.retry.base_delay_s:g})"
        )


def _predictor_problems(config: "Config") -> Iterator[str]:
    chosen = config.predictor
    if chosen.kind == "learned" and chosen.model is None and chosen.history is None:
        yield (
            "predictor.kind = 'learned': needs predictor.model (from `balanceroute predictor fit`) or "
            "predictor.history to be fitted from; accepted without them are survival, exact_match, none"
        )
    if chosen.key_header is not None and not chosen.by_key and not chosen.history:
        yield (
            f"predictor.key_header = {chosen.key_header!r}: accepted only with predictor.kind exact_match or "
            f"learned, or with predictor.history, not with {chosen.kind} alone"
        )
    if chosen.model is not None and (chosen.kind == "none" or chosen.of_ones_own):
        yield (
            f"predictor.model = {chosen.model!r}: accepted only with predictor.kind survival, exact_match or "
            f"learned, not {chosen.kind}"
        )
    if chosen.options and not chosen.of_ones_own:
        yield f"predictor.options: {chosen.kind} takes none"


def _tls_problems(config: "Config") -> Iterator[str]:
    for key, needed in (
        ("key_file", "cert_file"),
        ("client_ca_file", "cert_file"),
        ("worker_key_file", "worker_cert_file"),
        ("link_key_file", "link_cert_file"),
    ):
        value = getattr(config.tls, key)
        if value is not None and getattr(config.tls, needed) is None:
            yield f"tls.{key} = {value!r}: accepted only with tls.{needed}"


def _link_problems(config: "Config") -> Iterator[str]:
    """What both ends of a link between machines need."""
    listen = config.listen
    given = [("listen.link", listen.link)] if listen.link is not None else []
    if listen.brains:
        given.append(("listen.brains", ", ".join(listen.brains)))
    for key, value in given:
        if not listen.relays:
            yield f"{key} = {value!r}: accepted only with listen.relays, 1 or more"
        if config.tls.link_ca_file is None or config.tls.link_cert_file is None:
            yield f"{key} = {value!r}: needs tls.link_ca_file and tls.link_cert_file; the link is never plain TCP"
        if config.decode_first:
            yield (
                f"{key} = {value!r}: not accepted with connector mooncake_layerwise, whose callbacks reach the "
                "relays of one machine alone"
            )
    if listen.link_address is not None and listen.link_address[1] == 0:
        yield f"listen.link = {listen.link!r}: accepted is a port that relays can name, 1 to 65535"


def _brains_problems(config: "Config") -> Iterator[str]:
    listen = config.listen
    if listen.brains:
        for key, other in (("link", listen.link), ("lease", listen.lease)):
            if other is not None:
                yield f"listen.{key} = {other!r}: accepted only where a brain runs, so without listen.brains"
    for brain, (host, port) in zip(listen.brains, listen.brain_addresses, strict=True):
        if not port or is_wildcard(host):
            yield f"listen.brains = {brain!r}: accepted is an address that can be reached"


def own_places(config: "Config") -> frozenset[str]:
    """The places (`place_of`) at which the router listens: no worker's, as its requests would go round."""
    listen = config.listen
    addresses = [(listen.host, listen.port), listen.admin_address or (listen.host, listen.port)]
    return frozenset(
        place_of(f"http://{host_in_url(host)}:{port}")
        for bound, port in addresses
        for host in (("127.0.0.1", "::1") if is_wildcard(bound) else (bound,))
    )


def _worker_problems(config: "Config") -> Iterator[str]:
    ours = own_places(config)
    by_server: dict[tuple[str, int | None], str] = {}
    by_id: dict[str, str] = {}
    for path, worker in config.all_workers():
        place = (place_of(worker.url), worker.dp_rank)
        rank = "" if worker.dp_rank is None else f" with dp_rank {worker.dp_rank}"
        if place in by_server:
            yield (
                f"{path} = {worker.url!r}{rank}: duplicate of {by_server[place]}; accepted is each server and rank "
                "once, as a prefiller or as a decoder"
            )
        if place[0] in ours:
            yield f"{path} = {worker.url!r}: this is the router's own address (listen); accepted is a worker's"
        if worker.worker_id in by_id:
            taken_by = by_id[worker.worker_id]
            yield f"{path}.id = {worker.worker_id!r}: already the id of {taken_by}; accepted are unique ids"
        by_server[place] = by_id[worker.worker_id] = path
    for path, worker in config.all_workers():
        server = (place_of(worker.url), None)
        if worker.dp_rank is not None and server in by_server:
            yield (
                f"{path} = {worker.url!r}: {by_server[server]} has the same url without a dp_rank; "
                "accepted is a dp_rank on all workers of one url or on none"
            )
