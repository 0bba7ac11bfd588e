"""The table of all drafters: what is read off the comparisons, and the whole of it on two prompts."""

from __future__ import annotations

from experiments.drafters.compare import cells, row_of


def test_a_row_holds_the_best_of_each_mode_and_a_drafter_that_cannot_run_ahead_has_no_asynchronous_one() -> None:
    plain = {"mode": "autoregressive", "drafter": None, "tokens_per_second": 20.0}
    best = {
        "mode": "synchronous",
        "drafter": "ngram",
        "tokens_per_second": 30.0,
        "num_speculative_tokens": 3,
        "tree": True,
        "mean_acceptance_length": 2.0,
    }
    job = {"settings": {"sampling.temperature": "0.7"}, "rows": [plain, best]}
    chain = {"settings": {}, "rows": [plain, {"drafter": "ngram", "acceptance_by_position": [0.5, 0.2]}]}
    row = row_of("ngram", job, chain, {"ngram": 0.1})
    assert (row["temperature"], row["plain"], row["synchronous"], row["block"]) == (0.7, 20.0, 30.0, "3 as a tree")
    assert row["asynchronous"] is None
    assert row["feature_bytes_per_pass"] == 0
    assert cells(row)[-2:] == ("-", "-")
