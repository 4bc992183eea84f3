"""The flags of vllm-ascend's example proxy, so that this router starts with the command line of that one.

Only the sides whose flags are given are set; the others come from the YAML. Where a meaning differs, the
nearest setting of ours is used: `--max-retries` counts tries per tier, `--retry-delay` is the base of the
backoff, and the two waiting flags pace the readiness checks of workers added at run time. `--workers`, processes that
each decide for themselves there, are relays of one that decides here.
"""

import ipaddress
from collections.abc import Sequence

from balanceroute.errors import ConfigError

DEFAULT_HOST = "localhost"  # the example proxy's own, when only ports are given


def from_example_flags(
    *,
    host: str | None = None,
    port: int | None = None,
    prefiller_hosts: Sequence[str] | None = None,
    prefiller_ports: Sequence[int] | None = None,
    decoder_hosts: Sequence[str] | None = None,
    decoder_ports: Sequence[int] | None = None,
    max_retries: int | None = None,
    retry_delay: float | None = None,
    max_waiting_retries: int | None = None,
    waiting_retry_interval: float | None = None,
    workers: int | None = None,
    log_level: str | None = None,
) -> dict[str, object]:
    """Translate the flags that were given (None: not given) into overrides for `load`.

    Raises: ConfigError for lists of unequal length and malformed hosts.
    """
    given: dict[str, object | None] = {
        "listen.host": None if host is None else host.strip("[]"),
        "listen.port": port,
        "prefill.workers": _workers("prefiller", prefiller_hosts, prefiller_ports, 8001),
        "decode.workers": _workers("decoder", decoder_hosts, decoder_ports, 8002),
        "retry.max_attempts": None if max_retries is None else max(1, max_retries),
        "retry.base_delay_s": None if retry_delay is None else float(retry_delay),
        "listen.relays": 0 if workers == 1 else workers,
        "lifecycle.join_attempts": None if max_waiting_retries is None else max(1, max_waiting_retries),
        "lifecycle.join_interval_s": None if waiting_retry_interval is None else float(waiting_retry_interval),
        "log.level": log_level,
    }
    return {key: value for key, value in given.items() if value is not None}


def _url(host: str, port: int, flag: str) -> str:
    """The base URL of a worker; an IPv6 address may come with or without brackets."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare:
        try:
            return f"http://[{ipaddress.IPv6Address(bare).compressed}]:{port}"
        except ValueError:
            raise ConfigError(f"{flag} = {host!r}: accepted is a host name or an IP address, without a port") from None
    if not bare or any(c.isspace() or c in "/@[]?#," for c in bare):
        raise ConfigError(f"{flag} = {host!r}: accepted is a host name or an IP address")
    return f"http://{bare}:{port}"


def _workers(
    role: str, hosts: Sequence[str] | None, ports: Sequence[int] | None, default_port: int
) -> list[dict[str, object]] | None:
    if not hosts and not ports:
        return None
    has = f"has {len(ports)}" if ports else f"is left out, which is {default_port} alone"
    hosts = hosts or [DEFAULT_HOST]
    ports = ports or [default_port]
    if len(hosts) != len(ports):
        raise ConfigError(
            f"--{role}-hosts = {' '.join(hosts)}: {len(hosts)} of them, but --{role}-ports {has}; "
            "accepted is one port per host, in the same order"
        )
    return [{"url": _url(host, port, f"--{role}-hosts")} for host, port in zip(hosts, ports, strict=True)]
