"""A reload without threads, for tests in virtual time."""

from balanceroute.config import Config
from balanceroute.proxy import reload
from balanceroute.proxy.admission.forecasts import build_forecasts
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.perimeter.perimeter import Perimeter


async def apply(services: Services, new: Config) -> list[str]:
    """As `reload.reload`, which reads what may be long beside the loop."""
    reload.check(services, new)
    perimeter, predictor = Perimeter(new), None
    if reload.makes_predictor(services, new):
        predictor = reload.NewPredictor(build_forecasts(new, reload.past_of(services)))
    return await reload.apply(services, new, predictor, perimeter, certificates=True)
