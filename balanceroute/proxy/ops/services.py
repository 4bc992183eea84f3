"""What operators' routes need of the router: beside what client requests share, who decides."""

from dataclasses import dataclass

from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.client.services import ClientServices


@dataclass(slots=True, eq=False, kw_only=True)
class OperatorServices(ClientServices):
    """In the process that holds the ledger."""

    ledger: Ledger
