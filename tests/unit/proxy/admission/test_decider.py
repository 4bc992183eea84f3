"""What crosses between requests and who decides is plain data: refusals, and the errors that clients get for them."""

from dataclasses import asdict

import orjson
import pytest

from balanceroute.core.types import RejectReason, WorkerState
from balanceroute.core.view import ClusterView, DecoderView, PrefillerView
from balanceroute.errors import Draining, NoHealthyWorkers, QueueFull, QueueTimeout
from balanceroute.proxy.admission.decider import Refusal, RefusalKind, no_workers, refusal

NOBODY = ClusterView((), (), 0, 0, 0, 0, draining=False)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (RefusalKind.QUEUE_FULL, QueueFull),
        (RefusalKind.NO_WORKERS, NoHealthyWorkers),
        (RefusalKind.DRAINING, Draining),
        (RefusalKind.EXPIRED, QueueTimeout),
        (RefusalKind.LOST, NoHealthyWorkers),
    ],
)
def test_a_refusal_survives_being_written_down_and_is_an_error_for_the_client(
    kind: RefusalKind, error: type[Exception]
) -> None:
    fields = orjson.loads(orjson.dumps(asdict(Refusal(kind, "why", 2.5))))
    found = Refusal(RefusalKind(fields["kind"]), fields["text"], fields["retry_after_s"]).error()
    assert type(found) is error and str(found) == "why" and found.retry_after_s == 2.5


def test_each_reject_reason_of_the_core_has_its_own_refusal() -> None:
    kinds = [refusal(reason, lambda: NOBODY).kind for reason in RejectReason]
    assert len(set(kinds)) == len(kinds) and not {RefusalKind.EXPIRED, RefusalKind.LOST} & set(kinds)


def test_only_a_tier_without_a_worker_is_reported() -> None:
    up, down, draining = WorkerState.UP, WorkerState.DOWN, WorkerState.DRAINING
    decoders = tuple(DecoderView("d", state, 1, 0, 0, 0, 0, 0, 0.0, 0) for state in (down, draining))
    prefillers = tuple(PrefillerView("p", state, None, 0, 0, 0) for state in (up, down))
    refused = no_workers(ClusterView(decoders, prefillers, 0, 0, 0, 0, draining=False))
    assert "none of 2 decode workers is up (1 down)" in refused.text and "prefillers" not in refused.text
    assert refused.retry_after_s == 5.0
