"""A configuration and what its files held, as one: the parent's is what every child starts with.

A child that is started again, or a standby that takes the lead, must not depend on what a file holds in that moment:
one that is being written would keep it down, and one that was changed without SIGHUP would make it differ from the
others.
Certificates are the exception: they are renewed without a signal (`perimeter/tls.py`).
"""

from dataclasses import dataclass

from balanceroute.config import Config
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.reload import check_fixed


@dataclass(slots=True)
class Configured:
    """The configuration that holds, its keys and its certificates."""

    config: Config
    perimeter: Perimeter
    tls: Tls

    @classmethod
    def read(cls, config: Config) -> "Configured":
        """Read the files. Raises: ConfigError: one can't be used."""
        return cls(config, Perimeter(config), Tls(config))

    def reload(self, new: Config) -> None:
        """Go by another one. Raises: ConfigError: it needs a restart, or a file can't be used; nothing changed."""
        check_fixed(self.config, new)
        perimeter = Perimeter(new)
        self.tls.reload(new)  # the last that may refuse
        self.config, self.perimeter = new, perimeter
