"""A server, or a rank of it, has one name."""

import pytest

from balanceroute.core.types import Role, WorkerSpec
from balanceroute.proxy.workers.places import Places


def a_worker(name: str, url: str, rank: int | None = None) -> WorkerSpec:
    return WorkerSpec(name, Role.DECODE, url, dp_rank=rank)


@pytest.mark.parametrize(
    ("first", "second", "one_place"),
    [
        (("http://h:1", None), ("http://h:1", None), True),
        (("http://h", None), ("http://h:80", None), True),
        (("http://localhost:1", None), ("http://127.0.0.1:1", None), True),
        (("http://h:1", 0), ("http://h:1", 0), True),
        (("http://h:1", 0), ("http://h:1", None), True),
        (("http://h:1", None), ("http://h:1", 3), True),
        (("http://h:1", 0), ("http://h:1", 1), False),
        (("http://h:1", None), ("http://h:2", None), False),
        (("http://h:1/a", None), ("http://h:1/b", None), False),
    ],
    ids=[
        "one server",
        "its port left out",
        "this machine",
        "one rank",
        "a server beside its rank",
        "a rank beside its server",
        "two ranks",
        "two ports",
        "two paths",
    ],
)
def test_a_place_is_a_rank_of_a_server_or_the_whole_server_where_no_rank_is_named(
    first: tuple[str, int | None], second: tuple[str, int | None], one_place: bool
) -> None:
    places = Places([a_worker("a", *first)])
    assert places.whose(a_worker("b", *second)) == ("a" if one_place else None)
    assert places.take(a_worker("b", *second)) == ("a" if one_place else "b")
