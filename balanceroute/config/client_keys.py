"""The file of client keys (`auth.client_keys`): a name, a SHA-256 hash and limits per key, never a key itself.

    - name: search-team
      sha256: 3f5c...             # 64 hex digits; `balanceroute key NAME >> FILE` makes a key and adds its entry
      priority: {min: 0, max: 10} # of the key's requests, in place of limits.priority
      max_in_flight: 32
      requests_per_minute: 600
      tokens_per_minute: 2000000

The list may stand under `keys:`.

A key is 256 random bits, so a plain hash of it can't be guessed backwards as one of a password could.
"""

import hashlib
import re
import secrets
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from balanceroute.config.describe import accepts
from balanceroute.config.documents import read_document
from balanceroute.config.sections.limits import PriorityBounds
from balanceroute.config.sections.section import Section
from balanceroute.errors import ConfigError

KEY_PREFIX: Final = "sk-br-"


def _digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError("accepted are the 64 hex digits of a key's SHA-256 hash")
    return text.lower()


def _key_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", text):
        raise ValueError("accepted are 1 to 64 letters, digits and . _ @ -")
    return text


class KeyEntry(Section):
    """One client key."""

    name: Annotated[str, AfterValidator(_key_name)]
    sha256: Annotated[str, AfterValidator(_digest)]
    priority: PriorityBounds | None = None
    max_in_flight: int | None = Field(None, ge=1, le=1_000_000)
    requests_per_minute: int | None = Field(None, ge=1, le=10_000_000)
    tokens_per_minute: int | None = Field(None, ge=1, le=10**12)


class _File(Section):
    keys: tuple[KeyEntry, ...] = Field(strict=False)


def read_client_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The entries of a file. Raises: ConfigError: one line with the file and what is wrong in it."""
    content = read_document(path)
    tree = {"keys": content} if isinstance(content, list) else content
    if not isinstance(tree, dict) or "keys" not in tree:
        reason = "is empty" if content is None else f"is a {'mapping' if isinstance(tree, dict) else 'single value'}"
        raise ConfigError(f"{path}: {reason}; accepted is a list of keys, as `balanceroute key` makes it ([] for none)")
    try:
        entries = _File.model_validate(tree).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        raise ConfigError(f"{path}: {where}: {problem_of_entry(first, _File)}") from None
    for field in ("name", "sha256"):
        seen: dict[str, int] = {}
        for index, entry in enumerate(entries):
            value = getattr(entry, field)
            if value in seen:
                raise ConfigError(f"{path}: keys[{index}].{field}: the same as that of keys[{seen[value]}]")
            seen[value] = index
    return entries


def problem_of_entry(found: ErrorDetails, whole: type[BaseModel] = KeyEntry) -> str:
    """What is wrong with one value, without the value, which may be a key.

    Args: found: pydantic's error of it. whole: what was checked, an entry or the file.
    """
    loc = found["loc"]
    model: type[BaseModel] = KeyEntry
    if len(loc) == 1:
        model = whole
    elif "priority" in loc:
        model = PriorityBounds
    fields = ", ".join(model.model_fields)
    match found["type"]:
        case "value_error":
            return str(found["ctx"]["error"])
        case "extra_forbidden":
            return f"unknown key; accepted are {fields}"
        case "model_type":
            return f"accepted is a mapping with the keys {fields}"
        case "tuple_type":
            return "accepted is a list of keys"
        case "missing":
            return "required and missing"
        case "string_type":
            return "accepted is text; write it in quotes if it is all digits"
        case _:
            return f"accepted is {accepts(model.model_fields[str(loc[-1])])}"


def digest_of(key: bytes) -> bytes:
    """The SHA-256 hash of a key."""
    return hashlib.sha256(key).digest()


def new_key() -> tuple[str, str]:
    """A new key and the hash for its entry."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, digest_of(key.encode()).hex()
