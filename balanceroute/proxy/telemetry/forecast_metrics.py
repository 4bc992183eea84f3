"""Metrics of the predictor and its history, read at each scrape from their own counters.

A predictor ends with its brain, or with a reload to another one. Its counts are carried over (`former`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balanceroute.prediction import Forecaster, History, Refitter
from balanceroute.proxy.telemetry.instruments import CounterFamily, CounterRow, HistogramFamily, HistogramRow

_TOKENS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 79.0, 160.0, 320.0, 640.0)  # 79: the default anchor stands alone
_OF_HISTORY: Final = {"history_dropped": ("Finished requests that could not be recorded.",)}
_OF_FORECASTER: Final = {
    "refreshes": ("Forecasts renewed for running requests.",),
    "failures": (
        "Forecasts that failed, a batch as one; their requests count as staying until they are asked for again.",
    ),
    "gate": ("Forecasts by the confidence gate: open where a finish within the horizon is likely or certain.", "kind"),
    "keys": ("Forecasts by whether the prompt's key was known.", "kind"),
}
_OF_REFITS: Final = {"fits": ("Re-fits, by outcome.", "outcome")}


class ForecastCounts:
    """What predictors have counted."""

    def __init__(self) -> None:
        self.counters = {
            name: CounterFamily(f"balanceroute_predictor_{name}", meaning, labels)
            for name, (meaning, *labels) in (_OF_HISTORY | _OF_FORECASTER | _OF_REFITS).items()
        }
        self.errors = HistogramFamily(
            "balanceroute_predictor_error_tokens",
            "Expected remaining tokens that a request still had when it finished; H where it was not seen coming.",
            _TOKENS,
        )

    def as_data(self) -> dict[str, Any]:
        """The counts as plain data."""
        rows = {name: rows for name, counter in self.counters.items() if (rows := counter.rows())}
        return {"counters": rows, "errors": self.errors.rows()}

    def add(self, counters: Mapping[str, Iterable[CounterRow]], errors: Iterable[HistogramRow]) -> None:
        """Add the counts of others."""
        for name, counter in self.counters.items():
            counter.add(counters.get(name, ()))
        self.errors.add(errors)


class ForecastMetrics(Collector):
    """Series of one predictor, and of those before it; without a forecaster only those of the history."""

    def __init__(self, history: History, forecaster: Forecaster | None = None) -> None:
        self._history, self._forecaster = history, forecaster
        self.refitter: Refitter[Any] | None = None
        self.former = ForecastCounts()
        self.errors = ForecastCounts().errors
        self.error_tokens = self.errors.child()

    def whole(self) -> ForecastCounts:
        """The counts of this predictor and of those before it."""
        whole = ForecastCounts()
        whole.add(**self.former.as_data())
        whole.errors.add(self.errors.rows())
        counters = whole.counters
        counters["history_dropped"].inc(by=self._history.dropped)
        if (forecaster := self._forecaster) is not None:
            counters["refreshes"].inc(by=forecaster.refreshes)
            counters["failures"].inc(by=forecaster.failures)
            counters["gate"].inc("open", by=forecaster.gate_open)
            counters["gate"].inc("closed", by=forecaster.gate_closed)
            counters["keys"].inc("hit", by=forecaster.key_hits)
            counters["keys"].inc("miss", by=forecaster.key_misses)
        if self.refitter is not None:
            counters["fits"].inc("adopted", by=self.refitter.fits)
            counters["fits"].inc("failed", by=self.refitter.failures)
        return whole

    def collect(self) -> Iterator[Metric]:
        """Everything, as it is now."""
        whole = self.whole()
        yield GaugeMetricFamily(
            "balanceroute_predictor_history_rows", "Finished requests in the history file.", self._history.rows
        )
        for name in _OF_HISTORY:
            yield whole.counters[name].family()
        if self._forecaster is not None:
            for name in _OF_FORECASTER:
                yield whole.counters[name].family()
            yield whole.errors.family()
        if self.refitter is not None:
            yield GaugeMetricFamily(
                "balanceroute_predictor_fit_age_seconds",
                "Time since the predictor was last fitted.",
                self.refitter.fit_age_s,
            )
            for name in _OF_REFITS:
                yield whole.counters[name].family()
