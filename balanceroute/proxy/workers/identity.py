"""Whose answer it is: vLLM puts our X-Request-Id into an answer's `id`, so one that was meant for another is found out.

A worker that has ever echoed the id always does; one that never has goes unchecked, and the log says so once.
"""

import logging

from balanceroute.errors import ForeignReply
from balanceroute.proxy.wire.bounds import answers
from balanceroute.proxy.workers.fleet import Worker

log = logging.getLogger(__name__)


def check_id(worker: Worker, tier: str, told: object, sent_id: str) -> None:
    """Raises: ForeignReply: an answer has not the `id` of the request, though this worker is known to echo ids."""
    if answers(told, sent_id):
        worker.echoes_ids = True
    elif worker.echoes_ids:
        raise foreign_reply(worker, tier, "the answer carries the id of another request")
    else:
        learn_id(worker, False)


def learn_id(worker: Worker, echoed: bool) -> None:
    """Remember whether a worker echoes ids."""
    if echoed:
        worker.echoes_ids = True
    elif worker.echoes_ids is None:
        worker.echoes_ids = False
        log.info("worker does not echo X-Request-Id, its answers go unchecked", extra={"worker": worker.id})


def foreign_reply(worker: Worker, tier: str, text: str) -> ForeignReply:
    """The error of an answer that is another request's; no idle connection of that worker is used again."""
    worker.upstream.drop_idle()  # the answer that is missing may still come on one of them
    return ForeignReply(text, worker=worker.id, tier=tier)
