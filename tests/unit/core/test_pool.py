"""Who has waited too long in the pool, when requests come back with another patience."""

from balanceroute.core.pool import PromptPool
from balanceroute.core.tracker import RequestTracker


def test_a_readmitted_request_with_longer_patience_becomes_overdue_by_it() -> None:
    pool = PromptPool()
    stays, back = RequestTracker("stays", 100, 0), RequestTracker("back", 100, 1)
    stays.overdue_s, back.overdue_s = 9.0, 2.0
    for tracker in (stays, back):
        pool.add(tracker)
    pool.remove(back)
    back.overdue_s = 7.0
    pool.add(back)
    assert pool.front.most_overdue(2.0) is None
    assert pool.front.most_overdue(7.0) is back


def test_only_classes_with_waiting_requests_are_behind_the_front_class() -> None:
    pool = PromptPool()
    of = {priority: RequestTracker(f"{priority}", 100, 0, priority) for priority in (0, 5, -3)}
    assert pool.behind == []
    for tracker in of.values():
        pool.add(tracker)
    assert [list(waiting) for waiting in pool.behind] == [[of[0]], [of[5]]]
    pool.remove(of[0])
    assert [list(waiting) for waiting in pool.behind] == [[of[5]]]
    pool.remove(of[-3])
    assert pool.behind == [] and list(pool.front) == [of[5]]
