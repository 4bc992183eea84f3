"""The third coroutine: it polls workers' metrics.

The KV usage of prefillers is the back-pressure of the prefill dispatcher. If it can't be read:

    page                                        prefiller counts as
    can't be reached (refused, broken, late)    full, so that it is not preferred
    the same of all that are up, for long       usage unknown: only /health counts, which is good
    answers without the gauge (404, 500, ...)   usage unknown: at once, the engine may run with --disable-log-stats
    answers what can't be read (malformed, huge)  the same

With unknown usage only the number of probes under way is bounded (`core/prefill.py`). Only health checks and failed
requests take a worker out. Each of these cases is a condition (`conditions.py`): a log line, `/ready`.

A prefiller reports its prefix cache's size (`cache_config_info`), and counts tokens looked up and found there. If the
operator has set a policy that places prompts by cached prefixes, a prefiller without a cache is a condition, too.

Decoders' reports are compared with the ledger (`reported` in /state), and never replace it: the ledger is exact,
reports are old. A lasting surplus is foreign load (`foreign.py`), which decisions count. An engine that shows fewer
slots than are configured is a condition (`engine_slots.py`).

Pages are read by the router's own client and reader, because the loop that relays streams reads them. For 100 kB, on
two machines, httpx takes 0.6 to 2.4 ms and prometheus-client's parser 20 to 50 ms; the own ones take 0.02 to 0.06 and
0.1 ms. For 144 workers that is 2 to 3 % of a core instead of three cores and more (`scripts/bench/polls.py`).

Workers of one URL share one read; their ranks are told apart by the `engine` label.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from balanceroute.config import Config
from balanceroute.core.prefix import JUDGED_TOKENS
from balanceroute.core.types import Role, WorkerState
from balanceroute.core.view import DecoderView
from balanceroute.errors import BadUpstreamReply, UpstreamError
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.telemetry.conditions import METRICS, PREFIX_CACHE, SLOTS
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.wire.metrics_page import of_worker, read_samples
from balanceroute.proxy.workers.drainer import Drainer
from balanceroute.proxy.workers.fleet import Fleet, Worker
from balanceroute.proxy.workers.foreign import NOBODY, Occupancy, least_own_slots
from balanceroute.proxy.workers.kv_memory import kv_capacity_tokens
from balanceroute.proxy.workers.polling import Polling, Silent, answer_of, still_here

_LIMIT: Final = 4 * 2**20  # a page of one engine has about 100 kB
FULL: Final = 1.0
_UP: Final = WorkerState.UP


@dataclass(frozen=True, slots=True)
class Page:
    """The result of a read of /metrics. `problem`: empty if there is none. `reached`: whether the worker answered."""

    engines: dict[str, dict[str, float]]
    problem: str = ""
    reached: bool = True


class MetricsPoller:
    """Reads every URL's /metrics once per `prefill.poll_interval_s`: `polling` calls it."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        metrics: Metrics,
        drainer: Drainer,
        config: Callable[[], Config],
        on_bug: Callable[[str, Exception, str], None],
    ) -> None:
        """`config`: called for each poll, so a reload takes effect. `on_bug`: called with the place, the error and the
        workers.
        """
        self._fleet, self._ledger, self._metrics, self._drainer = fleet, ledger, metrics, drainer
        self._config, self._on_bug = config, on_bug
        self._divergence, self._conditions = metrics.divergence, metrics.conditions
        self.polling = Polling(fleet, self._read, self._unreadable)

    async def run(self) -> None:
        """Until cancelled."""
        await self.polling.run(lambda: self._config().prefill.poll_interval_s, spread=True)

    async def _read(self, workers: list[Worker]) -> None:
        while asked := still_here(self._fleet, workers):
            page = await self._page(asked[0])
            if page is None:
                return
            present = still_here(self._fleet, asked)
            if asked[0] in present:
                for worker in present:
                    self._report(worker, page)
                return

    async def _page(self, worker: Worker) -> Page | None:
        """Read a worker's page; None: it could not be read by the router's own fault."""
        timeout_s = self._config().health.timeout_s
        try:
            status, text = await answer_of(_metrics_of(worker), timeout_s)
        except BadUpstreamReply as error:
            return Page({}, f"its /metrics can't be read: {error}")
        except UpstreamError as error:
            return Page({}, f"its /metrics can't be reached: {error}", reached=False)
        except Silent as silence:
            if silence.ours:
                return None
            return Page({}, f"its /metrics did not answer within {timeout_s:g} s", reached=False)
        if status != 200:
            return Page({}, f"its /metrics answered with status {status}")
        return Page(read_samples(text))

    def _unreadable(self, workers: list[Worker], error: Exception) -> None:
        self._on_bug("metrics_poller", error, workers[0].id)

    def _report(self, worker: Worker, page: Page) -> None:
        samples = of_worker(page.engines, worker.spec.dp_rank)
        self._note_condition(worker, page, samples)
        if worker.spec.role is Role.PREFILL:
            self._report_prefiller(worker, page, samples)
        else:
            self._ledger.show_report(worker.id, samples or {})
            self._report_decoder(worker, samples)
            if samples is not None and (len(page.engines) == 1 or worker.spec.dp_rank is not None):
                self._note_slots(worker, samples)
        if samples is not None:
            orphans = self._metrics.orphaned_kv + self._metrics.orphaned_elsewhere
            self._divergence.see(worker.id, worker.spec.role, samples, held=self._held(worker), orphans=orphans)

    def _note_condition(self, worker: Worker, page: Page, samples: dict[str, float] | None) -> None:
        """Tell operators whether the worker's page can be used; of a worker that is down its health checks tell."""
        problem = page.problem or ("" if _reports_load(worker, samples) else "its /metrics do not tell its load")
        if problem:
            self._metrics.scrapes_failed.inc(worker.id)
        if not (worker.healthy and (page.reached or worker.seen_healthy)):
            self._conditions.forget(worker.id, (METRICS, PREFIX_CACHE, SLOTS))
            self._divergence.forget(worker.id)
            self._metrics.engine_slots.forget(worker.id)
        elif problem:
            self._conditions.hold(METRICS, worker.id, problem)
        else:
            self._conditions.clear(METRICS, worker.id)

    def _report_prefiller(self, worker: Worker, page: Page, samples: dict[str, float] | None) -> None:
        """Tell the scheduler how full a prefiller is; one that cannot be reached counts as full while another can."""
        worker.unreached = 0 if page.reached else worker.unreached + 1
        usage = None if samples is None else samples.get("kv_cache_usage_perc")
        self._ledger.report_prefiller(worker.id, usage if page.reached or self._all_unreached() else FULL)
        if samples is not None:
            self._report_prefix_cache(worker, samples)

    def _report_prefix_cache(self, worker: Worker, samples: dict[str, float]) -> None:
        """Tell the scheduler the size of a prefiller's cache, and the operator if it caches nothing."""
        capacity = int(samples.get("kv_capacity_tokens", 0)) or None
        off = samples.get("prefix_caching") == 0
        queried, hits = samples.get("prefix_cache_queries_total"), samples.get("prefix_cache_hits_total")
        counters = None if queried is None or hits is None else (queried, hits)
        block = int(samples.get("kv_block_tokens", 0))
        self._ledger.report_prefix_cache(worker.id, 0 if off else capacity, block, counters)
        missed_tokens = self._ledger.prefiller(worker.id).missed_tokens
        wanted = self._config().prefill.wants_prefix_caches and worker.healthy
        if wanted and off:
            reason = "prefix caching is off in the engine: start it with --enable-prefix-caching"
        elif wanted and missed_tokens >= JUDGED_TOKENS:
            reason = f"of the last {missed_tokens} prompt tokens that it should have cached it had none"
        else:
            self._conditions.clear(PREFIX_CACHE, worker.id)
            return
        self._conditions.hold(PREFIX_CACHE, worker.id, f"{reason}; every prompt is computed whole (docs/prefix.md)")

    def _all_unreached(self) -> bool:
        """Whether the usage of no prefiller that is up could be read, several times in a row."""
        up = [worker for worker in self._fleet.of(Role.PREFILL) if worker.healthy and not worker.leaving]
        patience = self._config().health.failure_threshold
        return all(worker.unreached > patience for worker in up)

    def _report_decoder(self, worker: Worker, samples: dict[str, float] | None) -> None:
        """Tell the scheduler a decode worker's foreign load and KV capacity."""
        ledger = self._ledger
        ledger.settle()
        own = ledger.decoder(worker.id)
        foreign = NOBODY  # as long as relays may have requests there of which this ledger does not know
        if not ledger.adopts:
            requests = max(worker.take_peak(), own.active)  # relays report their use later than they ask for a slot
            foreign = worker.foreign.see(samples, requests, own.load_tokens, own.mean_request_tokens)
        least, occupancy = 0, self._occupancy(own, foreign.requests)
        if foreign.requests and occupancy.free <= 0:  # else it needs none, and a view of many workers is dear
            view = ledger.view()
            others = [self._occupancy(other) for other in view.decoders if other.id != own.id and other.state is _UP]
            least = least_own_slots(occupancy, others, view.pooled)
        ledger.report_decoder(worker.id, foreign.requests, foreign.tokens, least)
        if samples is not None:
            load_tokens = own.load_tokens + foreign.tokens
            ledger.report_decoder_memory(worker.id, kv_capacity_tokens(samples, load_tokens, own.ahead))
            ledger.report_tokens_per_step(worker.id, samples.get("tokens_per_step", 1.0))

    def _occupancy(self, worker: DecoderView, foreign: int | None = None) -> Occupancy:
        """The occupancy of a decode worker, with `foreign` if it is newer than the ledger's."""
        held = worker.foreign_requests if foreign is None else foreign
        slowdown = self._fleet[worker.id].spec.slowdown
        return Occupancy(worker.slots, worker.active, held, worker.engine_waiting, slowdown)

    def _note_slots(self, worker: Worker, samples: dict[str, float]) -> None:
        """Tell the operator if the engine has fewer slots than the configuration says."""
        slots = worker.spec.slots
        if found := self._metrics.engine_slots.see(worker.id, samples, slots):
            reason = (
                f"it runs {found} requests at most, and the others queue in the engine, but max_num_seqs is {slots}"
            )
            self._conditions.hold(SLOTS, worker.id, f"{reason} here; set it to the engine's own --max-num-seqs")
        else:
            self._conditions.clear(SLOTS, worker.id)

    def _held(self, worker: Worker) -> int:
        if worker.spec.role is Role.DECODE:
            return worker.in_use
        return self._ledger.prefiller(worker.id).held + self._drainer.pending


def _reports_load(worker: Worker, samples: dict[str, float] | None) -> bool:
    if worker.spec.role is Role.PREFILL:
        return samples is not None and "kv_cache_usage_perc" in samples
    return samples is not None


async def _metrics_of(worker: Worker) -> tuple[int, bytes]:
    reply = await worker.upstream.request("GET", "/metrics")
    return reply.status, await reply.read(_LIMIT)
