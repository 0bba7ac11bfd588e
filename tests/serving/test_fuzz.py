"""The server against its own OpenAPI document, by schemathesis: no 5xx, and only responses that are documented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed: make test-all")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'amusd[serve]'")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from runtime.pair import oracle, pair
from schemathesis import checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as openapi_checks
from serving.running import MODEL, Running, serving

from amusd.drafters.synthetic import right_with_probability

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

NUM_CASES = 150
"""For each operation and kind of data."""
OPERATIONS = ("POST /v1/chat/completions", "POST /v1/completions")
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]
"""Not that whatever fits the schema is accepted: that `top_logprobs` needs `logprobs` is in no schema."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    factories = {"oracle": oracle(300, right_with_probability(0.9, 1))}
    with pair(factories, max_num_seqs=4) as (engine, _), serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def schema(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("label", OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_breaks_the_server(server: Running, schema: Any, label: str, mode: GenerationMode) -> None:
    statuses = fuzz(schema, label, mode, NUM_CASES)
    assert server.get("/health").status_code == 200
    if mode is GenerationMode.POSITIVE:  # some of the data asks for an answer, and gets one
        assert statuses[200], statuses


def fuzz(schema: Any, label: str, mode: GenerationMode, num_cases: int) -> Counter[int]:
    """Send data of this kind, and check each response. The statuses of the responses."""
    method, path = label.split(" ")
    found: Counter[int] = Counter()

    @settings(
        max_examples=num_cases,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if isinstance(case.body, dict):
            for name, value in (("model", MODEL), ("max_tokens", 3), ("max_completion_tokens", 3)):
                if type(case.body.get(name)) is type(value):  # or nearly all requests end there, or last long
                    case.body[name] = value
        found[case.call_and_validate(checks=CHECKS, timeout=60).status_code] += 1

    send()
    return found
