"""What `/metrics` shows of the predictor and its history: plain counters elsewhere, read when scraped."""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balanceroute.prediction import Forecaster, History, Refitter
from balanceroute.proxy.telemetry.instruments import HistogramFamily

_TOKENS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 79.0, 160.0, 320.0, 640.0)  # 79: the default anchor stands alone


class ForecastMetrics(Collector):
    """Series of one predictor; without a forecaster only those of the history."""

    def __init__(self, history: History, forecaster: Forecaster | None = None) -> None:
        self._history, self._forecaster = history, forecaster
        self.refitter: Refitter[Any] | None = None
        self.errors = HistogramFamily(
            "balanceroute_predictor_error_tokens",
            "Expected remaining tokens that a request still had when it finished; H where it was not seen coming.",
            _TOKENS,
        )
        self.error_tokens = self.errors.child()

    def describe(self) -> Iterable[Metric]:
        """Names and helps, for documentation tests."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Everything, as it is now."""
        stored = self._history.stats
        yield GaugeMetricFamily(
            "balanceroute_predictor_history_rows", "Finished requests in the history file.", value=stored.rows
        )
        yield CounterMetricFamily(
            "balanceroute_predictor_history_dropped", "Finished requests that could not be recorded.", stored.dropped
        )
        if self._forecaster is not None:
            yield from self._of_forecaster(self._forecaster)
        if self.refitter is not None:
            yield from self._of_refits(self.refitter)

    def _of_forecaster(self, forecaster: Forecaster) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "balanceroute_predictor_refreshes", "Forecasts renewed for running requests.", forecaster.refreshes
        )
        yield CounterMetricFamily(
            "balanceroute_predictor_failures",
            "Forecasts that failed, a batch as one; their requests count as staying until they are asked for again.",
            forecaster.failures,
        )
        gate = CounterMetricFamily(
            "balanceroute_predictor_gate",
            "Forecasts by the confidence gate: open where a finish within the horizon is likely or certain.",
            labels=["kind"],
        )
        gate.add_metric(["open"], forecaster.gate_open)
        gate.add_metric(["closed"], forecaster.gate_closed)
        yield gate
        keys = CounterMetricFamily(
            "balanceroute_predictor_keys", "Forecasts by whether the prompt's key was known.", labels=["kind"]
        )
        keys.add_metric(["hit"], forecaster.key_hits)
        keys.add_metric(["miss"], forecaster.key_misses)
        yield keys
        yield self.errors.family()

    def _of_refits(self, refitter: Refitter[Any]) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "balanceroute_predictor_fit_age_seconds", "Time since the predictor was last fitted.", refitter.fit_age_s
        )
        fits = CounterMetricFamily("balanceroute_predictor_fits", "Re-fits, by outcome.", labels=["outcome"])
        fits.add_metric(["adopted"], refitter.fits)
        fits.add_metric(["failed"], refitter.failures)
        yield fits
