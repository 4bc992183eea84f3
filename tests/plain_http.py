"""What every client says that speaks plain HTTP to what a test serves."""

from typing import Any, Final

# httpx reads all certificates of CAs for each client, whatever its URLs: 30 ms of CPU, more than many a test takes
PLAIN: Final[dict[str, Any]] = {"trust_env": False, "verify": False}
