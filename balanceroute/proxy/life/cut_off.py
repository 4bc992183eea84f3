"""After a decode that ended before its answer did: the worker is judged, and the rest of the answer queues again.

The same in both orders (`pull.py`, `layerwise.py`).
"""

import asyncio

from balanceroute.errors import UpstreamError
from balanceroute.proxy.life.leg import COMPLETE, CUT_OFF, Event, Leg
from balanceroute.proxy.life.retries import pushes_back
from balanceroute.proxy.life.seam import seam_of
from balanceroute.proxy.workers.fleet import Worker


async def failed(leg: Leg, worker: Worker, error: UpstreamError, tokens: int) -> None:
    """After a decode that failed; `tokens`: those before it. Waits before the next try.

    Raises: `error`: it was the last try. DecodersLost: too many workers have died under the request.
    """
    answer, retries = leg.answer, leg.retries
    _note_growth(leg, tokens)
    try:
        await retries.suspect_loss(error, worker, midway=bool(answer.scanner.generated.in_segment))
    except asyncio.CancelledError:
        worker.circuit.inconclusive()  # otherwise a trial would never be judged
        raise
    finally:
        retries.left_worker()  # another suspect may go there only now, when the death is known
    await asyncio.sleep(retries.judge(error, worker, begun=bool(answer.scanner.tokens)))


async def given_back(leg: Leg, worker: Worker, tokens: int) -> None:
    """After a decode that the worker gave back; `tokens`: those before it. Waits if it has left no lasting one.

    Raises: BadUpstreamReply: it has left none again and again.
    """
    _note_growth(leg, tokens)
    if leg.answer.scanner.generated.lasting > tokens:
        worker.circuit.inconclusive()
    else:
        await asyncio.sleep(leg.retries.given_back(worker))


async def requeue_rest(leg: Leg, lost: UpstreamError | None, why: str) -> Event:
    """After a decode that ended early, queue again for the rest of the answer, if any.

    Args: lost: how the worker was lost, if it was. why: any other cause, as in the metrics.

    Raises: UpstreamError: the answer can't go on.
    """
    leg.retries.note_waiting()
    seam = await seam_of(leg)
    if not leg.answer.resume(lost, leg.decoder_id, seam.broken, seam.withheld):
        await leg.answer.end_by_length()
        return COMPLETE
    anew = not leg.answer.scanner.tokens
    if anew:
        leg.first_token_s = 0.0  # the client has got nothing yet
    if lost is None or not pushes_back(lost):
        leg.services.metrics.recomputes.inc(why if lost is None else "worker_lost")
    leg.recomputes += 1
    leg.ticket.requeue(anew)
    leg.free_kv()
    return CUT_OFF


def _note_growth(leg: Leg, tokens: int) -> None:
    """Forget earlier failures if a decode that ended early has left more to go on from than the `tokens` before it."""
    if len(leg.answer.ids_to_resume_from) > tokens:
        leg.retries.grown()
