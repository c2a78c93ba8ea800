"""What the service counts and measures, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from tpurec.features import Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """The metrics of one application; each has a registry of its own, so that two never mix.

    Args:
        model: version of the model that is served.
        tables: names of its tables; their counters exist from the start, at 0.
    """

    def __init__(self, model: str, tables: list[str]) -> None:
        disable_created_metrics()  # a gauge beside every counter would double the page and says nothing here
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tpurec_requests", "Requests answered, by path and status.", ["path", "status"], registry=self.registry
        )
        self._errors = Counter("tpurec_errors", "Errors answered, by code.", ["code"], registry=self.registry)
        self._rows = Counter("tpurec_rows", "Rows scored.", registry=self.registry)
        self._request_seconds = Histogram(
            "tpurec_request_seconds",
            "Seconds from the request's head to its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._batch_rows = Histogram("tpurec_batch_rows", "Rows of a batch.", buckets=_ROWS, registry=self.registry)
        self._batch_seconds = Histogram(
            "tpurec_batch_seconds", "Seconds to score a batch.", buckets=_SECONDS, registry=self.registry
        )
        self.waiting_rows = Gauge("tpurec_waiting_rows", "Rows that wait for a batch.", registry=self.registry)
        self._ids = Counter("tpurec_ids", "Ids met, by table.", ["table"], registry=self.registry)
        self._policy_ids = Counter(
            "tpurec_policy_ids",
            "Ids that have no row and were left to the id policy, by table and reason.",
            ["table", "reason"],
            registry=self.registry,
        )
        Gauge("tpurec_model", "The model that is served; always 1.", ["version"], registry=self.registry).labels(
            version=model
        ).set(1)
        for table in tables:
            self._ids.labels(table=table)
            for reason in POLICY_REASONS:
                self._policy_ids.labels(table=table, reason=reason)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request.

        Args:
            path: the route's path; `other` for paths that are none, so that strangers cannot grow the metrics.
            status: HTTP status.
            seconds: how long it took.
        """
        self._requests.labels(path=path, status=str(status)).inc()
        self._request_seconds.labels(path=path).observe(seconds)

    def error(self, code: str) -> None:
        """Count an error.

        Args:
            code: the error's code, as in the answer.
        """
        self._errors.labels(code=code).inc()

    def batch(self, rows: int, seconds: float) -> None:
        """Count a scored batch.

        Args:
            rows: its rows.
            seconds: how long scoring took.
        """
        self._rows.inc(rows)
        self._batch_rows.observe(rows)
        self._batch_seconds.observe(seconds)

    def ids(self, counts: Counts) -> None:
        """Count what the transform of one request met.

        Args:
            counts: per table, ids in all and per reason.
        """
        for table, numbers in counts.tables.items():
            for reason, number in numbers.items():
                if reason == "ids":
                    self._ids.labels(table=table).inc(number)
                else:
                    self._policy_ids.labels(table=table, reason=reason).inc(number)

    def text(self) -> bytes:
        """Write everything in Prometheus' text format.

        Returns:
            The body of `GET /metrics`.
        """
        return generate_latest(self.registry)


# The reasons in `Counts.tables` beside `ids`.
POLICY_REASONS = ("malformed", "out_of_range", "unseen")
