"""A configuration and what its files held, as one: the parent's is what every child starts with.

A child that is started again, a standby that takes the lead, or a child that hears SIGHUP must not depend on what a
file holds in that moment: one that is being written would keep it down, and one that was changed since would make it
differ from the others. So one process reads the files at a reload, the one that tries it, and all others, the parent as
well, go by what that has read (`follow`). None of that imports anything: what is not ours (a policy) may take seconds,
for which the parent would not watch its children. A brain imports it before it decides by it (`learn`).

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
    """The configuration in force, its keys and its certificates."""

    config: Config
    perimeter: Perimeter
    tls: Tls
    agreement: Agreement  # for children that are there when it changes
    number: int = 1  # of the configuration; each reload counts

    @classmethod
    def read(cls, config: Config) -> "Configured":
        """Read the files. Raises: ConfigError: one can't be used."""
        perimeter, tls = Perimeter(config), Tls(config)
        read = cls(config, perimeter, tls, Agreement())
        read.agreement.propose(Agreed.of(config, perimeter))
        read.agreement.accept()
        return read

    def propose(self, new: Config) -> Perimeter:
        """Propose another configuration, in a process of its own, because the certificates change here.

        Raises: ConfigError: it needs a restart, or a file can't be used.
        """
        check_fixed(self.config, new)
        perimeter = Perimeter(new)
        self.tls.reload(new)
        self.agreement.propose(Agreed.of(new, perimeter))
        return perimeter

    def accept(self) -> None:
        """Use what was proposed, in the parent; children may use it from now on."""
        self.agreement.accept()
        self.follow()

    def learn(self) -> None:
        """Import the policy that the agreed configuration names, before a brain uses it; it may take seconds.

        Raises: ConfigError: it can't be imported any more, as it could when the reload was tried.
        """
        learn_policy(self.agreement.get().config.routing.policy)

    def follow(self) -> None:
        """Use the agreed configuration."""
        agreed = self.agreement.get()
        self.tls.follow(agreed.config)
        self.config, self.perimeter = agreed.config, Perimeter(agreed.config, entries=agreed.keys)
        self.number = agreed.number
