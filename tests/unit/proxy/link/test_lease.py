"""One pod leads at a time, whatever becomes of the API server and of clocks."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.link import lease as lease_module
from balanceroute.proxy.link.kubernetes import Lease, LeaseApi, LeaseSpec
from balanceroute.proxy.link.leadership import FileLead
from balanceroute.proxy.link.lease import LeaseLead
from tests.api_server import ApiServer, an_api_server
from tests.descriptors import open_files
from tests.waiting import PATIENCE_S, block_until

SHORT_S = 2  # of leases that are to be lost
LONG_S = 3600  # and of those that are not renewed as long as a test takes, nor asked for too late


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with an_api_server(tmp_path) as running:
        yield running


class Clock:
    """A clock of one pod."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Pod:
    """A pod's run folder, its own view of the time, and the brains in it."""

    def __init__(
        self, server: ApiServer, name: str, clock: Clock | None = None, duration_s: int = 15, token: str = "first"
    ) -> None:
        self._server, self.name, self.clock, self._duration_s = server, name, clock, duration_s
        self._folder = server.account / name
        self._folder.mkdir()
        shutil.copy(server.account / "ca.crt", self._folder)
        (self._folder / "token").write_text(token)
        self._leads: list[LeaseLead] = []

    def brain(self, again: bool = False) -> LeaseLead:
        api = LeaseApi(self._server.url, "serving", "router", self._folder, timeout_s=self._duration_s / 3)
        clock = self.clock or time.monotonic
        lead = LeaseLead(FileLead(self._folder / "lead"), api, lambda: self.name, self._duration_s, clock, again)
        self._leads.append(lead)
        return lead

    def close(self) -> None:
        for lead in self._leads:
            lead.release()


@contextmanager
def pods(*those: Pod) -> Iterator[list[LeaseLead]]:
    """A brain of each."""
    try:
        yield [pod.brain() for pod in those]
    finally:
        for pod in those:
            pod.close()


def test_one_pod_leads_and_writes_itself_into_the_lease(server: ApiServer) -> None:
    with pods(Pod(server, "a", duration_s=LONG_S), Pod(server, "b")) as (first, second):
        assert first.take() and first.renew() and first.epoch == 1
        assert not second.take()
        assert server.spec["holderIdentity"] == "a"
        assert server.spec["leaseDurationSeconds"] == LONG_S
        assert server.spec["leaseTransitions"] == 1
        assert server.spec["renewTime"] == server.spec["acquireTime"]


def test_a_standby_waits_for_the_whole_duration_by_its_own_clock(server: ApiServer) -> None:
    clock = Clock()
    with pods(Pod(server, "a", duration_s=LONG_S), Pod(server, "b", clock)) as (first, second):
        assert first.take()
        for _ in range(6):
            assert not second.take()
            clock.now_s += LONG_S / 6 - 0.01
        assert not second.take()
        clock.now_s += 3.0
        assert second.take() and second.epoch == 2
        assert server.spec["holderIdentity"] == "b"


def test_a_renewed_lease_restarts_the_standbys_wait_whatever_its_timestamp(server: ApiServer) -> None:
    clock, api = Clock(), server.api()
    with pods(Pod(server, "b", clock)) as (standby,):
        # another's clock may be years off, either way, and may be put back
        for year in (1971, 2199, 2001, 2001, 1999, 2050):
            spec = LeaseSpec(
                holder_identity="a",
                lease_duration_seconds=15,
                renew_time=f"{year}-01-01T00:00:00.{len(server.calls):06d}Z",
                lease_transitions=4,
            )
            found = api.read()
            assert api.create(spec) if found is None else api.replace(found, spec)
            assert not standby.take()
            clock.now_s += 12.0
            assert not standby.take()
            clock.now_s += 2.5
        clock.now_s += 3.0
        assert standby.take() and standby.epoch == 5
    api.close()


def test_a_standby_asks_the_api_server_every_two_seconds(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, answer = Clock(), list[str](), server.answer
    with pods(Pod(server, "a"), Pod(server, "b", clock)) as (first, second):
        assert first.take()
        monkeypatch.setattr(server, "answer", lambda method, *rest: (asked.append(method), answer(method, *rest))[1])
        for _ in range(40):
            assert not second.take()
            clock.now_s += 0.25
        assert 4 <= asked.count("GET") <= 5


def test_the_lease_duration_is_that_of_its_holder(server: ApiServer) -> None:
    clock = Clock()
    with pods(Pod(server, "a", duration_s=LONG_S), Pod(server, "b", clock)) as (first, second):
        assert first.take() and not second.take()
        clock.now_s += LONG_S - 3.0
        assert not second.take()
        clock.now_s += 4.0
        assert second.take()


def test_a_leader_that_renews_keeps_the_lease(server: ApiServer) -> None:
    clock = Clock()
    with pods(Pod(server, "a"), Pod(server, "b", clock)) as (first, second):
        assert first.take() and not second.take()
        clock.now_s += 12.0
        version = server.version
        block_until(lambda: server.version > version)
        assert not second.take()
        clock.now_s += 12.0
        assert not second.take() and first.renew()
        assert server.spec["leaseTransitions"] == 1
        assert server.spec["renewTime"] > server.spec["acquireTime"]


def refuses(server: ApiServer) -> None:
    server.failure = 500


def hangs(server: ApiServer) -> None:
    server.goes_on.clear()


def works(server: ApiServer) -> None:
    server.failure = None
    server.goes_on.set()


@pytest.mark.parametrize("fails", [refuses, hangs])
def test_a_leader_that_cannot_renew_steps_down_and_another_leads(
    server: ApiServer, fails: Callable[[ApiServer], None]
) -> None:
    with pods(Pod(server, "a", duration_s=SHORT_S), Pod(server, "b", duration_s=SHORT_S)) as (first, second):
        block_until(first.take)
        assert not second.take()
        fails(server)
        block_until(lambda: not first.renew())
        works(server)
        first.release()  # as a brain does that leads no more
        block_until(second.take)
        assert second.epoch > first.epoch and not first.renew()


def test_a_disconnected_leader_has_stepped_down_before_another_leads(server: ApiServer) -> None:
    alone = Pod(server, "a", duration_s=SHORT_S, token="of a")
    with pods(alone, Pod(server, "b", duration_s=SHORT_S)) as (first, second):
        server.tokens.add("of a")
        block_until(first.take)
        assert not second.take()
        server.tokens.remove("of a")
        block_until(second.take)
        assert not first.renew() and second.epoch > first.epoch


def test_a_leader_without_the_api_server_leads_for_two_thirds_of_the_duration_and_logs_it_once(
    server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with pods(Pod(server, "a", clock)) as (leader,):
        assert leader.take()
        server.failure = 503
        clock.now_s += 9.9
        assert leader.renew()
        clock.now_s += 0.2
        assert not leader.renew() and not leader.renew()
    assert caplog.messages.count("the lease was not renewed in time") == 1


def test_a_leader_whose_lease_was_taken_loses_the_lead_at_its_next_renewal(server: ApiServer) -> None:
    clock = Clock()
    with pods(Pod(server, "a"), Pod(server, "b", clock)) as (first, second):
        assert first.take() and not second.take()

        def takes() -> bool:  # its clock runs far too fast
            clock.now_s += 1000.0
            return second.take()

        block_until(takes)  # the first one may just have renewed
        block_until(lambda: not first.renew())
        assert second.renew() and second.epoch == 2
        assert server.spec["holderIdentity"] == "b"


def test_one_of_several_pods_that_take_the_lease_at_once_leads(server: ApiServer) -> None:
    names = [f"pod-{number}" for number in range(6)]
    with pods(*(Pod(server, name, duration_s=LONG_S) for name in names)) as leads:  # a busy machine answers late
        together = threading.Barrier(len(leads))
        won: list[LeaseLead] = []

        def take(lead: LeaseLead) -> None:
            together.wait()
            if lead.take():
                won.append(lead)

        threads = [threading.Thread(target=take, args=(lead,)) for lead in leads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and won[0].epoch == 1


def test_a_renewal_whose_answer_was_lost_loses_no_lead(server: ApiServer) -> None:
    with pods(Pod(server, "a")) as (leader,):
        assert leader.take()
        calls = len(server.calls)
        server.lost_answers = 1
        block_until(lambda: server.lost_answers == 0)
        block_until(lambda: leader.renew() and server.calls[calls:].count(("PUT", 200)) >= 3)
        assert ("PUT", 409) in server.calls[calls:]


def test_foreign_fields_of_the_lease_are_kept(server: ApiServer) -> None:
    with pods(Pod(server, "a")) as (leader,):
        assert leader.take()
        with server.turn:
            (lease,) = server.leases.values()
            server.version += 1
            lease["metadata"] = lease["metadata"] | {"labels": {"of": "ops"}, "resourceVersion": str(server.version)}
        version = server.version
        block_until(lambda: leader.renew() and server.version >= version + 2)
        (lease,) = server.leases.values()
        assert lease["metadata"]["labels"] == {"of": "ops"}


def test_the_next_brain_of_a_pod_leads_at_once_and_the_former_one_writes_no_more(server: ApiServer) -> None:
    pod = Pod(server, "a")
    with pods(pod) as (first,):
        assert first.take()
        second = pod.brain()
        assert not second.take()  # while the first one has the file
        first.release()
        block_until(second.take)
        assert second.epoch == 2 and second.renew() and not first.renew()
        assert server.spec["leaseTransitions"] == 2


def test_a_leader_that_resigns_lets_another_pod_lead_and_finishes_its_own_requests(server: ApiServer) -> None:
    own, clock = Clock(), Clock()
    with pods(Pod(server, "a", own), Pod(server, "b", clock)) as (first, second):
        assert first.take() and not second.take()
        first.resign()
        block_until(lambda: server.spec["holderIdentity"] == "")
        clock.now_s += 3.0
        assert second.take() and second.epoch == 2
        own.now_s += 3600.0
        assert first.renew()


def test_a_deleted_lease_is_recreated_with_a_larger_number(server: ApiServer) -> None:
    clock = Clock()
    pod = Pod(server, "a")
    with pods(pod, Pod(server, "b", clock)) as (former, second):
        assert former.take()
        former.release()
        first = pod.brain()
        assert first.take() and first.epoch == 2 and not second.take()
        with server.turn:
            server.leases.clear()
        clock.now_s += 3.0
        assert second.take() and second.epoch == 3
        block_until(lambda: not first.renew())


def test_a_pod_that_leads_again_detects_whether_another_pod_led_meanwhile(server: ApiServer) -> None:
    first, second = Pod(server, "a"), Pod(server, "b")
    with pods(first, second) as (lead, other):
        assert lead.take() and lead.others == 0
        lead.release()
        again = first.brain()
        assert again.take() and (again.epoch, again.others) == (2, 0)
        again.resign()
        block_until(lambda: server.spec["holderIdentity"] == "")
        again.release()
        third = first.brain()
        assert third.take() and (third.epoch, third.others) == (3, 2), "whoever has given it up led before it"
        third.resign()
        block_until(lambda: server.spec["holderIdentity"] == "")
        third.release()
        assert other.take() and other.epoch == 4
        other.resign()
        block_until(lambda: server.spec["holderIdentity"] == "")
        fourth = first.brain()
        assert fourth.take() and (fourth.epoch, fourth.others) == (5, 4)


def test_a_brain_that_learns_of_a_larger_epoch_ends_and_its_successor_exceeds_it(
    server: ApiServer,
) -> None:
    """The Lease was deleted while no pod ran; only a relay of another machine knows the number."""
    pod = Pod(server, "a")
    with pods(pod) as (first,):
        assert first.take() and first.epoch == 1
        assert not first.raise_epoch(50)
        first.release()
        second = pod.brain()
        assert second.take() and second.epoch > 50
        assert not second.raise_epoch(2**31 - 1)  # no number would be left in Kubernetes' int32
        second.release()
        third = pod.brain()
        assert third.take() and second.epoch < third.epoch < 100


@pytest.mark.parametrize("status", [401, 403])
def test_a_service_account_without_rights_is_one_line_at_the_start(server: ApiServer, status: int) -> None:
    server.failure = status
    with pods(Pod(server, "a")) as (lead,), pytest.raises(ConfigError, match=f"^listen.lease: .*{status}") as refused:
        lead.take()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("status", [401, 403])
def test_a_temporarily_refused_token_ends_no_brain_of_a_pod_that_has_led(server: ApiServer, status: int) -> None:
    clock = Clock()
    pod = Pod(server, "a", clock)
    with pods(pod):
        server.failure = status
        again = pod.brain(again=True)
        assert not again.take()
        server.failure = None
        clock.now_s += 3.0
        assert again.take()


def test_an_answer_that_differs_from_the_written_lease_makes_no_leader(server: ApiServer) -> None:
    clock = Clock()
    with pods(Pod(server, "a", clock), Pod(server, "b")) as (first, second):
        server.blank_answers = 2
        for _ in range(2):  # the Lease is created, then replaced
            assert not first.take() and not second.take()
            clock.now_s += 3.0
        assert first.take() and first.epoch == server.spec["leaseTransitions"] == 3


def test_a_brain_that_waits_for_an_endless_answer_does_not_block_another_brain_of_its_pod(
    server: ApiServer,
) -> None:
    pod = Pod(server, "a", duration_s=1)
    with pods(pod) as (first,):
        asked, answers = threading.Event(), threading.Event()
        replace = first._api.replace

        def without_end(lease: Lease, spec: LeaseSpec) -> Lease | None:
            asked.set()
            answers.wait()
            return replace(lease, spec)

        block_until(first.take)
        first._api.replace = without_end  # type: ignore[method-assign]
        assert asked.wait(PATIENCE_S)
        first.release()
        block_until(pod.brain().take)
        answers.set()


def test_a_pod_that_can_start_no_thread_leaves_the_lease_to_another(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name == "lease":
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    clock, start_thread = Clock(), threading.Thread.start
    with pods(Pod(server, "a", clock), Pod(server, "b", clock)) as (first, second):
        with monkeypatch.context() as lacking:
            lacking.setattr(threading.Thread, "start", start)
            assert not first.take()
        assert second.take() and not first.take()
        second.resign()
        block_until(lambda: server.spec["holderIdentity"] == "", "the lease given up")
        clock.now_s += 3.0
        assert first.take() and first.renew()  # there is room by now


@pytest.mark.parametrize("status", [403, 429, 500, 503, 200])
def test_an_api_server_that_fails_later_does_not_end_a_standby(server: ApiServer, status: int) -> None:
    clock = Clock()
    with pods(Pod(server, "a", duration_s=LONG_S), Pod(server, "b", clock)) as (first, second):
        assert first.take() and not second.take()
        server.failure = status  # 200: what it says then is no Lease
        for _ in range(20):
            clock.now_s += LONG_S / 10
            assert not second.take()
        server.failure = None
        clock.now_s += 3.0
        assert second.take()  # the lease was over long ago by its clock


@pytest.mark.parametrize(("answer_s", "leads"), [(9.9, True), (10.0, False)])
def test_a_brain_whose_lease_answer_arrives_too_late_does_not_lead(
    server: ApiServer, answer_s: float, leads: bool
) -> None:
    """Two thirds of 15 s. The Lease says that we hold it, so the next call takes it at once."""
    clock = Clock()
    pod = Pod(server, "a", clock)
    with pods(pod) as (lead,):
        create = lead._api.create

        def slowly(spec: LeaseSpec) -> Lease | None:
            clock.now_s += answer_s
            return create(spec)

        lead._api.create = slowly  # type: ignore[method-assign]
        assert lead.take() is leads
        assert leads or lead.take()


def test_a_brain_that_is_deposed_in_its_pod_while_it_waits_for_the_api_server_does_not_lead(server: ApiServer) -> None:
    pod = Pod(server, "a", Clock())
    with pods(pod) as (first,):
        create, file = first._api.create, server.account / "a" / "lead"

        def while_another_deposes(spec: LeaseSpec) -> Lease | None:
            file.with_name("lead.next").write_text("7\n")
            file.with_name("lead.next").replace(file)
            return create(spec)

        first._api.create = while_another_deposes  # type: ignore[method-assign]
        assert not first.take()
        second = pod.brain()
        assert second.take() and second.epoch == 8


def test_a_hanging_event_loop_loses_the_lease(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "STUCK_S", 0.5)
    with pods(Pod(server, "a", duration_s=SHORT_S), Pod(server, "b", duration_s=SHORT_S)) as (first, second):
        block_until(first.take)
        block_until(second.take)  # nobody asks the first one
        assert not first.renew()


class Stored(LeaseApi):
    """A Lease in memory; `meanwhile` is called before each write that may change it, `reads` before each read."""

    def __init__(self, spec: LeaseSpec | None = None) -> None:
        self.name, self.spec, self.version = "serving/router", spec, 1
        self.meanwhile: Callable[[], None] = lambda: None
        self.reads: Callable[[], None] = lambda: None

    def read(self) -> Lease | None:
        self.reads()
        return self.present()

    def present(self) -> Lease | None:
        return None if self.spec is None else Lease({"version": self.version}, self.spec)

    def create(self, spec: LeaseSpec) -> Lease | None:
        return self.put(spec) if self.spec is None else None

    def replace(self, lease: Lease, spec: LeaseSpec) -> Lease | None:
        self.meanwhile()
        return self.put(spec) if lease.whole["version"] == self.version else None

    def put(self, spec: LeaseSpec) -> Lease | None:
        self.spec, self.version = spec, self.version + 1
        return self.present()

    def close(self) -> None:
        """Nothing is open."""


class Unattended(LeaseLead):
    """Its thread renews nothing, so that only the test does."""

    def _keep(self, lease: Lease, ends: threading.Event) -> None: ...


@contextmanager
def a_lead(folder: Path, api: Stored, clock: Clock) -> Iterator[LeaseLead]:
    lead = Unattended(FileLead(folder / "lead"), api, lambda: "a", 15, clock)
    try:
        yield lead
    finally:
        lead.release()


def of(holder: str, number: int) -> LeaseSpec:
    return LeaseSpec(holder_identity=holder, lease_duration_seconds=15, lease_transitions=number)


@pytest.mark.parametrize("renewed", [False, True])
def test_a_leader_counts_the_time_of_its_lease_from_before_it_asked(tmp_path: Path, renewed: bool) -> None:
    api, clock = Stored(of("", 1)), Clock(1000.0)

    def late() -> None:
        clock.now_s += 5.0

    with a_lead(tmp_path, api, clock) as lead:
        api.meanwhile = late
        assert lead.take()
        if renewed:
            held = api.read()
            assert held is not None and lead._renewed(held)
        clock.now_s = (1005.0 if renewed else 1000.0) + 9.9
        assert lead.renew()
        clock.now_s += 0.2
        assert not lead.renew()


class Pauses(threading.Event):
    """Ends a leader's thread after some pauses, whose lengths it notes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.lengths_s = clock, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.lengths_s.append(round(timeout, 6))
        self.clock.now_s += timeout
        return len(self.lengths_s) == 4


@pytest.mark.parametrize(
    ("takes_s", "pauses_s"), [(0.0, 2.0), (1.5, 0.5), (4.5, 0.0)], ids=["at once", "slow", "very slow"]
)
def test_a_leader_keeps_its_lease_with_an_api_server_that_answers_slowly(
    tmp_path: Path, takes_s: float, pauses_s: float
) -> None:
    api, clock = Stored(of("", 1)), Clock()

    def late() -> None:
        clock.now_s += takes_s

    def late_in_the_thread() -> None:
        late()
        assert lead.renew()

    api.reads = api.meanwhile = late
    with a_lead(tmp_path, api, clock) as lead:
        assert lead.take() and lead.renew()
        held, pauses = api.present(), Pauses(clock)
        assert held is not None
        api.meanwhile = late_in_the_thread
        LeaseLead._keep(lead, held, pauses)
        assert pauses.lengths_s == [pauses_s] * 4 and lead.renew()


def test_a_leader_whose_machine_was_suspended_for_too_long_leads_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Unattended(FileLead(tmp_path / "lead"), Stored(), lambda: "a", 15)
    assert lead.take() and lead.renew()
    awake = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: awake(clock) + 11.0)  # `time.monotonic` stood still
    assert not lead.renew()
    lead.release()


def test_a_leader_keeps_its_lease_while_others_change_other_fields_again_and_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api, clock = Stored(of("", 1)), Clock()

    def others() -> None:
        api.version += 1

    with a_lead(tmp_path, api, clock) as lead:
        assert lead.take()
        held = api.present()
        api.meanwhile = others
        for _ in range(3):
            clock.now_s += 3.0
            assert held is not None and lead.renew()
            held = lead._renewed(held)
        assert held is not None and "can't be read or renewed" in caplog.text
        clock.now_s += 2.0
        assert not lead.renew()  # as it has not been renewed


@pytest.mark.parametrize(
    ("found", "is_ours"),
    [(None, True), (of("a", 3), False), (of("b", 2), False)],
    ids=["others changed another field", "the next brain of the pod has it", "another pod has it, by a lost number"],
)
@pytest.mark.parametrize("gives_up", [False, True])
def test_a_leader_renews_and_gives_up_only_its_own_lease(
    tmp_path: Path, found: LeaseSpec | None, is_ours: bool, gives_up: bool
) -> None:
    api = Stored(of("", 1))
    with a_lead(tmp_path, api, Clock()) as lead:
        assert lead.take() and lead.epoch == 2
        held, spec = api.read(), found or api.spec
        assert held is not None and spec is not None
        api.put(spec)
        if gives_up:
            lead._give_up(held)
        else:
            assert (lead._renewed(held) is not None) is is_ours
        assert api.spec is not None and (api.spec.holder_identity == "") is (is_ours and gives_up)
        assert is_ours or api.spec == spec


def test_the_number_of_a_leader_is_above_all_that_its_pod_has_seen_and_in_its_file(tmp_path: Path) -> None:
    api, clock = Stored(of("b", 41)), Clock()
    with a_lead(tmp_path, api, clock) as lead:
        assert not lead.take()
        api.put(of("c", 3))  # it was deleted, and a pod that did not know its number has created it again
        clock.now_s += 3.0
        assert not lead.take()
        clock.now_s += 16.0
        assert lead.take() and lead.epoch == 42
        assert (tmp_path / "lead").read_text() == "42\n"


def test_a_brain_that_waits_for_the_lease_while_its_run_folder_is_lost_keeps_no_file_open(tmp_path: Path) -> None:
    api = Stored(of("b", 1))
    with a_lead(tmp_path, api, Clock()) as lead:
        assert not lead.take()
        before = open_files(tmp_path)
        for _ in range(3):
            (tmp_path / "lead").unlink()
            assert not lead.take()
        assert open_files(tmp_path) == before
