"""The figures of `GET /metrics`, under vLLM's names if possible, else `amusd:` names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from amusd.answer import Generation
from amusd.engine import Engine
from amusd.serving.responses import FINISH_REASONS

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class ServerMetrics(Collector):
    """Counts since the server's start, used in the event loop's thread. The engine's counts are read on request."""

    def __init__(self, model: str, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._gone = self._new(Counter, "amusd:requests_aborted", "Requests whose client left, or that failed.")
        self._success = self._new(Counter, "vllm:request_success", "Finished answers.", "finished_reason")
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted candidates by place in the pass, from 0."
        self._accepted_at = self._new(Counter, name, text, "position")
        self._first_token = self._times("vllm:time_to_first_token_seconds", "To the first token.", _FIRST_TOKEN)
        self._between = self._times("vllm:inter_token_latency_seconds", "Between two passes.", _BETWEEN_TOKENS)
        self._latency = self._times("vllm:e2e_request_latency_seconds", "From a request to its end.", _WHOLE)

    def _new(self, kind: type, name: str, text: str, *labels: str, **options: Any) -> Any:
        made = kind(name, text, ("model_name", *labels), registry=self._registry, **options)
        return made if labels else made.labels(self._model)

    def _times(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        return self._new(Histogram, name, text, buckets=buckets)

    def collect(self) -> Iterator[Metric]:
        """The engine's present figures."""
        engine, counts = self._engine, self._engine.worker.counts
        running, waiting = len(engine.worker.sequences), engine.scheduler.num_waiting
        is_present = engine.draft.presence == "present"
        for kind, name, text, value in (
            (GaugeMetricFamily, "vllm:num_requests_running", "Answers that are computed.", running),
            (GaugeMetricFamily, "vllm:num_requests_waiting", "Answers that wait for others.", waiting),
            (GaugeMetricFamily, "amusd:draft_present", "1 while a draft is connected.", is_present),
            (CounterMetricFamily, "vllm:prompt_tokens", "Tokens of prompts.", counts.num_prompt_tokens),
            (CounterMetricFamily, "vllm:generation_tokens", "Tokens of answers.", counts.num_tokens),
            (CounterMetricFamily, "vllm:prefix_cache_queries", "Tokens of prompts.", counts.num_prompt_tokens),
            (CounterMetricFamily, "vllm:prefix_cache_hits", "Of these not computed again.", counts.num_cached_tokens),
            (CounterMetricFamily, "vllm:spec_decode_num_drafts", "Passes with candidates to judge.", counts.num_drafts),
            (CounterMetricFamily, "vllm:spec_decode_num_draft_tokens", "Candidates judged.", counts.num_verified),
            (CounterMetricFamily, "vllm:spec_decode_num_accepted_tokens", "Of these accepted.", counts.num_accepted),
            (CounterMetricFamily, "amusd:target_passes", "Passes, each over all answers.", counts.num_passes),
            (CounterMetricFamily, "amusd:tokens_alone", "Tokens made without a draft.", counts.num_tokens_alone),
            (CounterMetricFamily, "amusd:draft_restarts", "Lost drafts replaced.", engine.draft.num_restarts),
        ):
            family = kind(name, text, labels=["model_name"])
            family.add_metric([self._model], float(value))
            yield family

    def on_first_token(self, began: float) -> None:
        """Record the first token of an answer. `began`: the request's arrival (`time.perf_counter`)."""
        self._first_token.observe(time.perf_counter() - began)

    def finished(self, generation: Generation) -> None:
        """Record a complete answer."""
        self._success.labels(self._model, FINISH_REASONS[generation.finish_reason]).inc()
        for position, number in enumerate(generation.metrics.accepted_by_position):
            self._accepted_at.labels(self._model, position).inc(number)
        for gap_ns in generation.metrics.chunk_gaps_ns:
            self._between.observe(gap_ns / 1e9)

    def ended(self, began: float, is_whole: bool) -> None:
        """Record the end of a request. `began`: the arrival (`time.perf_counter`)."""
        if is_whole:
            self._latency.observe(time.perf_counter() - began)
        else:
            self._gone.inc()

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self._registry)
