"""What `GET /metrics` shows: vLLM's names where it has one for a figure, `amusd:` before the others."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from amusd.answer import Generation
from amusd.serving.responses import FINISH_REASONS

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
"""Upper bounds of the buckets in seconds, as vLLM has them."""


class ServerMetrics:
    """Counts since the server began. For the event loop's thread; gauges are read when somebody asks."""

    def __init__(self, model: str, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        """`gauges`: what each one means, and what reads it, by name."""
        self._registry = CollectorRegistry()
        labels = {"model_name": model, "engine": "0"}

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, (*labels,), registry=self._registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            found = Histogram(name, text, (*labels,), buckets=buckets, registry=self._registry)
            return found.labels(**labels)

        for name, (text, read) in gauges.items():
            Gauge(name, text, (*labels,), registry=self._registry).labels(**labels).set_function(read)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._tokens = counter("vllm:generation_tokens", "Tokens of answers.")
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From the request to the first token.", _FIRST_TOKEN
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds",
            "Between two target passes of an answer, each of which brings one token or more.",
            _BETWEEN_TOKENS,
        )
        self._latency = histogram("vllm:e2e_request_latency_seconds", "From the request to its end.", _WHOLE)
        self._drafts = counter("vllm:spec_decode_num_drafts", "Target passes that had candidates to judge.")
        self._judged = counter("vllm:spec_decode_num_draft_tokens", "Candidates that a pass judged.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Candidates that were accepted.")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted candidates by their place in the pass, from 0.",
            (*labels, "position"),
            registry=self._registry,
        )
        self._labels = labels
        self._passes = counter("amusd:target_passes", "Target passes of finished answers.")
        self._drafted = counter("amusd:drafted_tokens", "Tokens that the draft computed, judged or not.")
        self._alone = counter("amusd:tokens_alone", "Tokens of answers whose draft was lost or silent.")
        success = Counter(
            "vllm:request_success", "Finished answers.", (*labels, "finished_reason"), registry=self._registry
        )
        self._success = {word: success.labels(**labels, finished_reason=word) for word in FINISH_REASONS.values()}
        self._refused = Counter(
            "amusd:requests_refused",
            "Requests that got an error, by status.",
            (*labels, "status"),
            registry=self._registry,
        )
        self._gone = counter("amusd:requests_aborted", "Requests whose client went away.")

    def begun(self, num_prompt_tokens: int) -> None:
        """The engine has got a request."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """The first token of an answer came, so long after the request."""
        self._first_token.observe(seconds)

    def tokens(self, number: int) -> None:
        """Tokens of an answer came."""
        self._tokens.inc(number)

    def finished(self, generation: Generation) -> None:
        """An answer is complete."""
        metrics = generation.metrics
        self._success[FINISH_REASONS[generation.finish_reason]].inc()
        self._drafts.inc(metrics.num_drafts)
        self._judged.inc(metrics.num_verified)
        self._accepted.inc(metrics.num_accepted)
        self._passes.inc(metrics.num_passes)
        self._alone.inc(metrics.num_tokens_alone)
        if metrics.draft is not None:
            self._drafted.inc(metrics.draft.num_drafted)
        for position, number in enumerate(metrics.accepted_by_position):
            self._accepted_at.labels(**self._labels, position=str(position)).inc(number)
        for gap_ns in metrics.chunk_gaps_ns:
            self._between.observe(gap_ns / 1e9)

    def ended(self, began: float) -> None:
        """A request got all of its answer; `began` is when it came (`time.perf_counter`)."""
        self._latency.observe(time.perf_counter() - began)

    def refused(self, status: int) -> None:
        """A request got an error."""
        self._refused.labels(**self._labels, status=str(status)).inc()

    def aborted(self) -> None:
        """A client went away."""
        self._gone.inc()

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self._registry)
