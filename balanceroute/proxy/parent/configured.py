"""A configuration together with the contents of its files. Every child starts with the parent's.

A restarted child, a standby that takes the lead, or a child that gets SIGHUP must not read the files again: an
incomplete file would keep it down, and a changed one would make it differ from the others. So at a reload only the
process that tries it reads the files, and all others use the contents that it has read (`follow`). None of this imports
a user's policy: that may take seconds, in which the parent would not watch its children. A brain imports it before use
(`learn`).

Certificates are the exception: they are renewed without a signal (`perimeter/tls.py`).
"""

from contextlib import suppress
from dataclasses import dataclass

from balanceroute.config import Config
from balanceroute.config.patience import off_the_loop
from balanceroute.plugins import learn_policy
from balanceroute.proxy.ops.reload_checks import check_fixed
from balanceroute.proxy.parent.shared_config import ConfigWithKeys, SharedConfig
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.perimeter.tls import Tls


@dataclass(slots=True)
class Configured:
    """The configuration in force, its keys and its certificates."""

    config: Config
    perimeter: Perimeter
    tls: Tls
    shared: SharedConfig  # for children that run when it changes
    number: int = 1  # of the configuration; each reload increments it

    @classmethod
    def read(cls, config: Config) -> "Configured":
        """Read the files. Raises: ConfigError: one can't be used."""
        perimeter, tls = Perimeter(config), Tls(config)
        read = cls(config, perimeter, tls, SharedConfig())
        read.shared.propose(ConfigWithKeys(config, perimeter.entries))
        read.shared.accept()
        return read

    def propose(self, new: Config) -> Perimeter:
        """Propose another configuration. Runs in its own process, because it replaces this one's certificates.

        Raises: ConfigError: it needs a restart, or a file can't be used.
        """
        check_fixed(self.config, new)
        perimeter = Perimeter(new)
        self.tls.reload(new)
        self.shared.propose(ConfigWithKeys(new, perimeter.entries))
        return perimeter

    def accept(self) -> None:
        """In the parent: use the proposed configuration; children may use it from now on."""
        self.shared.accept()
        self.follow()

    def learn(self) -> None:
        """Import the policy of the accepted configuration, before a brain uses it. It may take seconds.

        Raises: ConfigError: it can't be imported any more.
        """
        learn_policy(self.shared.get().config.routing.policy)

    async def fetch(self) -> None:
        """Read the accepted configuration off the loop, for `follow`: with thousands of keys that takes a while."""
        with suppress(RuntimeError):  # no thread is to be had
            await off_the_loop(self.shared.get)

    def follow(self) -> None:
        """Use the accepted configuration."""
        accepted = self.shared.get()
        self.tls.follow(accepted.config)
        self.config = accepted.config
        self.perimeter = Perimeter(accepted.config, accepted.keys, self.perimeter.relay_rows)
        self.number = accepted.number
