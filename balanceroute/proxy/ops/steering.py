"""`POST /routing/policy`: switch the policy until a reload or restart reads the configuration again."""

from collections.abc import Awaitable, Callable, Mapping

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.config import Config, with_sections
from balanceroute.core.knobs import Option
from balanceroute.core.policies import POLICIES
from balanceroute.errors import ConfigError, InputError, InvalidRequest
from balanceroute.plugins import installed, learn_policy
from balanceroute.proxy.ops.admin import json_response
from balanceroute.proxy.ops.guard import add_log_fields
from balanceroute.proxy.ops.services import Services

Switch = Callable[[Config], Awaitable[object]]


class Steering:
    """The handler; `switch` applies a configuration to the router."""

    def __init__(self, services: Callable[[], Services], switch: Switch, read: Config) -> None:
        """`read`: as it was read; a brain may begin under another policy (`run_folder/changes.py`)."""
        self._services, self._switch = services, switch
        self._options_of = {read.routing.policy: read.routing.options}  # of policies that were switched away from

    def routes(self) -> list[Route]:
        """The one route."""
        return [Route("/routing/policy", self.policy, methods=["POST"])]

    async def policy(self, request: Request) -> Response:
        """Switch to the policy of `{"policy": NAME}`. Admitted requests stay; waiting ones are decided on anew.

        The other settings stay. `routing.options` belong to a policy: they come back when it is switched back to.
        """
        services = self._services()
        try:
            name = _wanted(await request.body())
            add_log_fields(request, policy=name)
            async with services.changing:
                before = services.config
                if name != before.routing.policy:
                    await self._switch(with_policy(before, name, self._options_of.get(name)))
                    self._options_of[before.routing.policy] = before.routing.options
                    services.keep_changes()
        except (ConfigError, InputError) as error:
            raise InvalidRequest(str(error), param="policy") from None
        until = "the configuration is read again (SIGHUP or restart)"
        return json_response({"policy": name, "before": before.routing.policy, "until": until})


def _wanted(body: bytes) -> str:
    """The policy's name: built in, of an installed package, or a user's own that has been configured.

    Raises: InvalidRequest: there is no such policy. ConfigError: it can't be imported.
    """
    try:
        asked = orjson.loads(body)
        name = asked["policy"] if len(asked) == 1 else None  # knobs beside it would change nothing
    except (orjson.JSONDecodeError, KeyError, TypeError):
        name = None
    known = {*POLICIES, *installed()}
    if not isinstance(name, str) or name not in known:
        raise InvalidRequest(f'The body must be {{"policy": NAME}}, NAME one of {", ".join(sorted(known))}.')
    learn_policy(name)
    return name


def with_policy(config: Config, name: str, options: Mapping[str, Option] | None = None) -> Config:
    """The configuration with another policy, and the `options` that it had before.

    The present policy's options are dropped. Raises: ConfigError: the settings do not fit the policy.
    """
    if name == config.routing.policy:
        return with_sections(config)
    changed = config.routing.model_copy(update={"policy": name, "options": dict(options or {})})
    return with_sections(config, routing=changed)
