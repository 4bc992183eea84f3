"""Checks that an answer belongs to its request: vLLM puts the X-Request-Id that it got into the answer's `id`.

A worker that has once echoed the id must always do so; one that never has is not checked, which is logged once.
"""

import logging

from balanceroute.errors import ForeignReply
from balanceroute.proxy.wire.bounds import answers
from balanceroute.proxy.workers.fleet import Worker

log = logging.getLogger(__name__)


def check_id(worker: Worker, answer_id: object, sent_id: str) -> None:
    """Check an answer's `id`. Raises: ForeignReply: it is another one, although this worker echoes ids."""
    if answers(answer_id, sent_id):
        worker.echoes_ids = True
    elif worker.echoes_ids:
        raise foreign_reply(worker, "the answer carries the id of another request")
    else:
        learn_id(worker, False)


def learn_id(worker: Worker, echoed: bool) -> None:
    """Note whether a worker echoes ids."""
    if echoed:
        worker.echoes_ids = True
    elif worker.echoes_ids is None:
        worker.echoes_ids = False
        log.info("worker does not echo X-Request-Id, its answers go unchecked", extra={"worker": worker.id})


def foreign_reply(worker: Worker, text: str) -> ForeignReply:
    """The error for another request's answer; also drops the worker's idle connections."""
    worker.upstream.drop_idle()  # the missing answer may still come on one of them
    return worker.failure(ForeignReply, text)
