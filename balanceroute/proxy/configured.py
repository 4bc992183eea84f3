"""A configuration and what its files held, as one: the parent's is what every child starts with.

A child that is started again, a standby that takes the lead, or a child that hears SIGHUP must not depend on what a
file holds in that moment: one that is being written would keep it down, and one that was changed since would make it
differ from the others. So the parent alone reads files, and children that are there get what it has read (`follow`).
Certificates are the exception: they are renewed without a signal (`perimeter/tls.py`).
"""

from dataclasses import dataclass

from balanceroute.config import Config
from balanceroute.plugins import learn_policy
from balanceroute.proxy.agreement import Agreed, Agreement
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.reload import check_fixed


@dataclass(slots=True)
class Configured:
    """The configuration that holds, its keys and its certificates."""

    config: Config
    perimeter: Perimeter
    tls: Tls
    agreement: Agreement  # for children that are there when it changes

    @classmethod
    def read(cls, config: Config) -> "Configured":
        """Read the files. Raises: ConfigError: one can't be used."""
        perimeter, tls = Perimeter(config), Tls(config)
        read = cls(config, perimeter, tls, Agreement())
        read.agreement.put(read.agreement.packed(Agreed.of(config, perimeter)))
        return read

    def reload(self, new: Config) -> None:
        """Go by another one, which children may follow.

        Raises: ConfigError: it needs a restart, or a file can't be used; nothing changed.
        """
        check_fixed(self.config, new)
        perimeter = Perimeter(new)
        agreed = self.agreement.packed(Agreed.of(new, perimeter))
        self.tls.reload(new)  # the last that may refuse
        self.config, self.perimeter = new, perimeter
        self.agreement.put(agreed)

    def learn(self) -> None:
        """Import a policy of one's own that the parent goes by, before `follow` in a child; it may take seconds.

        Raises: ConfigError: it can't be imported here; the parent has imported it.
        """
        learn_policy(self.agreement.get().config.routing.policy)

    def follow(self) -> None:
        """Go by what the parent goes by: in a child that has learned it."""
        agreed = self.agreement.get()
        self.tls.follow(agreed.config)
        self.config, self.perimeter = agreed.config, Perimeter(agreed.config, entries=agreed.keys)
