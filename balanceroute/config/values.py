"""Types of the fields in `models.py`, with their accepted values and names."""

import ipaddress
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field, SecretStr

from balanceroute.config.urls import normalised_url
from balanceroute.core.knobs import DAY_S
from balanceroute.core.policies import KNOBS
from balanceroute.errors import ConfigError
from balanceroute.plugins import check_predictor_name, installed, learn_policy

Connector = Literal["mooncake_v1", "nixl", "mooncake_layerwise"]
# connector -> (seconds a prefiller keeps KV that no decoder pulled, share of it that the pool may use up).
# vLLM's defaults: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT 480 s; NIXL's kv_lease_duration 30 s, which a decoder's
# heartbeats extend only once it knows the request. Layerwise pins nothing: the decoder is chosen first.
KV_PIN_S: dict[str, tuple[float | None, float]] = {
    "mooncake_v1": (480.0, 1 / 2),
    "nixl": (30.0, 2 / 3),
    "mooncake_layerwise": (None, 1.0),
}
PrefillPolicyName = Literal["least_tokens", "prefix_affinity", "round_robin"]
POLICY_NAMES = tuple(KNOBS)
PREDICTOR_NAMES = ("none", "survival", "exact_match", "learned")
OF_YOUR_OWN = "module:Class of your own"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a text that is one of `names`, or names a class of the user's own."""

    names: tuple[str, ...]


def _policy_name(text: str) -> str:
    if text not in POLICY_NAMES:
        if ":" not in text and text not in installed():
            raise ValueError(f"accepted is one of {', '.join([*POLICY_NAMES, *sorted(installed())])}, or {OF_YOUR_OWN}")
        try:
            learn_policy(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return text


PolicyName = Annotated[str, AfterValidator(_policy_name), OneOf(POLICY_NAMES)]


def _predictor_name(text: str) -> str:
    try:
        check_predictor_name(text, PREDICTOR_NAMES)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text


PredictorName = Annotated[str, AfterValidator(_predictor_name), OneOf(PREDICTOR_NAMES)]


def _host(text: str) -> str:
    if not text or any(c.isspace() or c in "*/[]" or not c.isprintable() for c in text):
        raise ValueError("accepted is a host name or an IP address without brackets, such as 0.0.0.0 or ::")
    if ":" in text:
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            raise ValueError("accepted is a host name or an IP address; the port has its own key") from None
        return text
    try:
        text.encode("idna")  # as whoever looks it up does
    except UnicodeError:
        raise ValueError("accepted is a host name of parts of 1 to 63 characters, or an IP address") from None
    return text


Host = Annotated[str, AfterValidator(_host)]


def split_host_and_port(text: str) -> tuple[str, int]:
    """HOST:PORT, an IPv6 HOST in brackets. Raises: ValueError."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or (":" in host and bare == host):
        raise ValueError("accepted is HOST:PORT, such as 127.0.0.1:8001, an IPv6 HOST in brackets")
    return _host(bare), int(port)


def _host_and_port(text: str) -> str:
    split_host_and_port(text)
    return text


HostAndPort = Annotated[str, AfterValidator(_host_and_port)]


_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes; of Linux


def _path(text: str) -> str:
    """A path that the system can be asked for: what is none is often the content of the file that was meant."""
    if text.startswith(("~", "$")):
        raise ValueError("~ and variables are not replaced here; accepted is the path itself")
    path = text.encode()
    too_long = len(path) > _LONGEST_PATH or any(len(name) > _LONGEST_NAME for name in path.split(b"/"))
    if too_long or any(byte < 32 for byte in path):
        raise ValueError(f"accepted is a path of names of at most {_LONGEST_NAME} bytes, without control characters")
    return text


FilePath = Annotated[str, Field(min_length=1), AfterValidator(_path)]


def _worker_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9\[][A-Za-z0-9._:@\[\]/-]{0,127}", text):
        raise ValueError("accepted are 1 to 128 letters, digits and . _ : @ / - [ ]")
    return text


WorkerId = Annotated[str, AfterValidator(_worker_id)]


def _header_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", text):
        raise ValueError("accepted is the name of an HTTP header, such as X-Task")
    return text


HeaderName = Annotated[str, AfterValidator(_header_name)]


def is_wildcard(host: str) -> bool:
    """Whether an address to listen on is none to be reached at."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _secret(value: SecretStr) -> SecretStr:
    """A secret as it goes into a header; files and variables like to end in a line break, which does not belong to it.

    Raises: ValueError.
    """
    text = value.get_secret_value().strip()
    if re.fullmatch(r"\$(\{.*\}|[A-Z][A-Z0-9_]*)", text):
        raise ValueError("a variable is not replaced here; set BALANCEROUTE_SECTION__KEY in the environment instead")
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError("accepted are printable ASCII characters without spaces, at least one")
    return SecretStr(text)


Secret = Annotated[SecretStr, AfterValidator(_secret)]


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Level = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)]


def _options(value: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(option, bool | int | float | str) for option in value.values()):
        raise ValueError("accepted is a mapping of names to true, false, numbers or texts")
    return value


Options = Annotated[dict[str, Any], AfterValidator(_options)]


Seconds = Annotated[float, Field(gt=0, le=86_400)]
SecondsOrZero = Annotated[float, Field(ge=0, le=86_400)]
Period = Annotated[float, Field(ge=0.01, le=86_400)]  # of what repeats: a shorter one would take a whole core


class Endless:
    """Marks a time of a day at most that may also be infinite: `.inf` in YAML, `inf` where characters are given."""


def _infinite(value: object) -> object:
    return math.inf if value == "inf" else value


def _a_day_or_endless(value: float) -> float:
    if not 0 <= value <= DAY_S and value != math.inf:
        raise ValueError(f"accepted is a number, 0 to {DAY_S:g}, or .inf")
    return value


SecondsOrEndless = Annotated[
    float, AllowInfNan(), AfterValidator(_a_day_or_endless), BeforeValidator(_infinite), Endless()
]


def _origin(text: str) -> str:
    """As browsers send it: in lower case, without the scheme's own port."""
    if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._~\[\]:-]+", text.lower()):
        raise ValueError("accepted is * or SCHEME://HOST[:PORT] without a path, such as https://chat.example.com")
    origin = text.lower()
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80" if origin.startswith("http:") else "")


Origin = Annotated[str, AfterValidator(_origin)]


Url = Annotated[str, AfterValidator(normalised_url)]
# RFC 1123, as Kubernetes has it: labels for a namespace, labels and dots for a name
_LEASE = re.compile(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/)?[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


def _lease_name(text: str) -> str:
    if not _LEASE.fullmatch(text):
        raise ValueError("accepted is NAME or NAMESPACE/NAME, of small letters, digits, - and in NAME also .")
    return text


LeaseName = Annotated[str, AfterValidator(_lease_name)]
