"""The figures of `GET /metrics`: vLLM's names where it has one for a figure, `amusd:` before the others."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from amusd.answer import Generation
from amusd.engine import Engine
from amusd.serving.responses import FINISH_REASONS
from amusd.types import DraftPresence

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
"""Upper bounds of the buckets in seconds, as vLLM has them."""


class ServerMetrics(Collector):
    """Counts since the server began. For the event loop's thread; the engine's own are read when somebody asks."""

    def __init__(self, model: str, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._labels = {"model_name": model, "engine": "0"}
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.").labels(**self._labels)
        self._tokens = self._counter("vllm:generation_tokens", "Tokens of answers.").labels(**self._labels)
        text = "Tokens that the draft computed, judged or not."
        self._drafted = self._counter("amusd:drafted_tokens", text).labels(**self._labels)
        text = "Requests whose client went away, or whose answer failed."
        self._gone = self._counter("amusd:requests_aborted", text).labels(**self._labels)
        self._success = self._counter("vllm:request_success", "Finished answers.", "finished_reason")
        text = "Accepted candidates by their place in the pass, from 0."
        self._accepted_at = self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", text, "position")
        text = "From the request to the first token."
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", text, _FIRST_TOKEN)
        text = "Between two target passes of an answer, each of which brings one token or more."
        self._between = self._histogram("vllm:inter_token_latency_seconds", text, _BETWEEN_TOKENS)
        text = "From the request to its end."
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", text, _WHOLE)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*self._labels, *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        found = Histogram(name, text, (*self._labels,), buckets=buckets, registry=self._registry)
        return found.labels(**self._labels)

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that the engine is not asked before there is one."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The engine's figures of now."""
        turns, counts = self._engine.turns, self._engine.counts
        gauges = (
            ("vllm:num_requests_running", "Answers that are computed.", turns.num_running),
            ("vllm:num_requests_waiting", "Answers that wait for others.", turns.num_waiting),
            ("amusd:draft_present", "1 while a draft is connected.", self._engine.draft is DraftPresence.PRESENT),
        )
        counters = (
            ("vllm:spec_decode_num_drafts", "Target passes that had candidates to judge.", counts.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Candidates that a pass judged.", counts.num_verified),
            ("vllm:spec_decode_num_accepted_tokens", "Candidates that were accepted.", counts.num_accepted),
            ("amusd:target_passes", "Passes of the target, each over all answers.", counts.num_passes),
            ("amusd:tokens_alone", "Tokens that came while the draft was lost or silent.", counts.num_tokens_alone),
            ("amusd:draft_restarts", "Drafts that took the place of a lost one.", self._engine.num_draft_restarts),
        )
        for kind, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in figures:
                family = kind(name, text, labels=[*self._labels])
                family.add_metric([*self._labels.values()], float(value))
                yield family

    def begun(self, num_prompt_tokens: int) -> None:
        """The engine has got a request."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def came(self, number: int, began: float | None) -> None:
        """Tokens of an answer came. `began`: of its first ones, when its request came (`time.perf_counter`)."""
        self._tokens.inc(number)
        if began is not None:
            self._first_token.observe(time.perf_counter() - began)

    def finished(self, generation: Generation) -> None:
        """An answer is complete."""
        metrics = generation.metrics
        self._success.labels(**self._labels, finished_reason=FINISH_REASONS[generation.finish_reason]).inc()
        if metrics.draft is not None:
            self._drafted.inc(metrics.draft.num_drafted)
        for position, number in enumerate(metrics.accepted_by_position):
            self._accepted_at.labels(**self._labels, position=position).inc(number)
        for gap_ns in metrics.chunk_gaps_ns:
            self._between.observe(gap_ns / 1e9)

    def ended(self, began: float, is_whole: bool) -> None:
        """A request that came at `began` (`time.perf_counter`) has got all of its answer, or will not."""
        if is_whole:
            self._latency.observe(time.perf_counter() - began)
        else:
            self._gone.inc()

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self._registry)
