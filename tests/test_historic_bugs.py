"""Defects that other systems have had, and the tests here that would catch them.

The numbers are ours; the addresses name the issue or pull request that tells the story.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Bug:
    """A defect of somebody's, and our tests: `file::function`."""

    number: int
    story: str
    address: str
    tests: tuple[str, ...] = ()
    not_here: str = ""
    """Why it cannot occur (yet), where there is no test."""


BUGS = (
    Bug(
        1,
        "the bonus token's keys never reach the draft's cache",
        "vLLM 3951, 5765, 9730",
        (
            "runtime/test_modes.py::test_a_draft_equal_to_the_target_has_an_acceptance_rate_of_exactly_one",
            "runtime/test_sampled.py::test_a_draft_equal_to_the_target_is_always_accepted",
        ),
    ),
    Bug(
        2,
        "the draft goes back by one or two too few",
        "mlxcel 994, 1002",
        (
            "runtime/test_rollback.py::test_a_drafter_that_fails_at_any_call_never_disagrees_with_its_session",
            "drafters/test_contract.py::test_what_is_proposed_depends_on_the_context_alone",
        ),
    ),
    Bug(
        3,
        "a reset in the place of a rollback; a token twice where acceptance ends",
        "aprender 2014, imp 667",
        (
            "protocol/test_sessions.py::test_rejected_at_each_index",
            "runtime/test_modes.py::test_partly_right_drafts_are_partly_accepted_round_after_round",
        ),
    ),
    Bug(
        4,
        "a cache that cannot be cut is used all the same; an error in mid-round leaves the counts wrong",
        "mlx-lm 1109, 1528",
        (
            "models/test_loading.py::test_what_cannot_roll_back_is_refused_by_name_from_its_configuration",
            "runtime/test_rollback.py::test_a_drafter_that_cannot_be_opened_again_leaves_the_session_as_it_was",
            "runtime/test_rollback.py::test_a_drafter_that_fails_at_any_call_never_disagrees_with_its_session",
        ),
    ),
    Bug(
        5,
        "a rejection of the last candidate leaves a counter high",
        "openvino.genai 4190",
        ("protocol/test_sessions.py::test_rejected_at_each_index",),
    ),
    Bug(
        6,
        "padding is taken for tokens; drafts beyond the length limit",
        "vLLM 38098, 38711",
        (
            "protocol/test_fuzz.py::test_hostile_candidates_are_refused_and_honest_ones_taken_after_them",
            "protocol/test_sessions.py::test_the_limit_is_kept",
            "runtime/test_modes.py::test_the_context_limit_ends_an_answer_like_a_length",
            "runtime/test_modes.py::test_a_pass_is_never_wider_than_the_cap",
        ),
    ),
    Bug(
        7,
        "a cache keeps tokens that were never verified, or those of another request",
        "vLLM 12193, 18668, 56734, mlx-vlm 1715",
        (
            "models/test_exactness.py::test_ragged_blocks_and_paths_give_the_bits_of_plain_decoding",
            "models/test_decoder.py::test_no_key_beyond_those_announced_is_read",
            "models/test_loading.py::test_a_window_as_long_as_the_longest_sequence_is_accepted",
        ),
    ),
    Bug(
        8,
        "positions are right for one new token only",
        "transformers 30042, 30068",
        (
            "models/test_decoder.py::test_ragged_blocks_with_rollbacks_agree_with_the_stock_forward",
            "models/test_huggingface.py::test_ragged_blocks_with_rollbacks_agree_with_the_stock_forward",
        ),
    ),
    Bug(
        9,
        "the first candidate of a block is never verified",
        "lattice 243",
        (
            "runtime/test_modes.py::test_a_draft_that_is_always_wrong_costs_no_token",
            "runtime/test_modes.py::test_partly_right_drafts_are_partly_accepted_round_after_round",
        ),
    ),
    Bug(
        10,
        "the token behind a rejection comes from the wrong row",
        "vLLM 8320",
        (
            "runtime/test_modes.py::test_partly_right_drafts_are_partly_accepted_round_after_round",
            "sampling/test_rejection.py::test_a_target_with_the_wrong_row_filter_or_noise_is_exposed",
        ),
    ),
    Bug(
        11,
        "sampling parameters on one side only",
        "vLLM 10198, transformers 47932, DeepSpec 31",
        (
            "sampling/test_rejection.py::test_a_row_that_is_not_what_was_drawn_from_is_exposed",
            "sampling/test_rejection.py::test_a_target_with_the_wrong_row_filter_or_noise_is_exposed",
        ),
    ),
    Bug(
        12,
        "a greedy draft beside a target that samples",
        "transformers 33534",
        ("sampling/test_rejection.py::test_a_row_that_is_not_what_was_drawn_from_is_exposed",),
    ),
    Bug(
        13,
        "the draft's probabilities are not used in the residual",
        "EAGLE 329, 50",
        ("sampling/test_rejection.py::test_a_wrong_residual_is_exposed",),
    ),
    Bug(
        14,
        "one random number for two decisions",
        "vLLM 47386, 54282",
        ("sampling/test_rejection.py::test_a_target_with_the_wrong_row_filter_or_noise_is_exposed",),
    ),
    Bug(
        15,
        "ids beyond the vocabulary, rows that are no numbers, nothing left to draw from",
        "GHSA-8wr5-jm2h-8r4f",
        (
            "sampling/test_ranking.py::test_a_row_without_a_largest_number_is_an_error",
            "sampling/test_rejection.py::test_equal_distributions_leave_p_itself",
            "sampling/test_rejection.py::test_a_candidate_stays_with_the_probability_of_the_ratio",
            "sampling/test_rejection.py::test_what_cannot_be_a_row_is_refused",
            "sampling/test_rejection.py::test_the_law_holds_under_every_parameter",
        ),
    ),
    Bug(16, "wrong at batch sizes above 2", "1Cat-vLLM 656", not_here="sequences are decoded one at a time"),
    Bug(
        17,
        "tokens behind an end-of-sequence token inside the accepted span",
        "koboldcpp 1276, openvino.genai 1951, SGLang 33758",
        ("runtime/test_stopping.py::test_end_of_sequence_against_every_length_cap",),
    ),
    Bug(
        18,
        "the length limit is looked at before the stop condition",
        "SGLang 31599",
        ("sampling/test_text.py::test_end_of_sequence_wins_over_stop_and_stop_over_length",),
    ),
    Bug(
        19,
        "the answer is a block too long, or counted wrong",
        "ik_llama 2358, SGLang 39826",
        (
            "runtime/test_stopping.py::test_end_of_sequence_against_every_length_cap",
            "runtime/test_stopping.py::test_stop_strings_against_every_length_cap",
        ),
    ),
    Bug(
        20,
        "an end that only the draft sees ends the answer",
        "openvino.genai 3293",
        ("runtime/test_stopping.py::test_an_end_of_sequence_that_only_the_draft_sees_ends_nothing",),
    ),
    Bug(
        21,
        "stop strings over the borders of tokens and blocks",
        "onnxruntime-genai 2528",
        (
            "runtime/test_stopping.py::test_stop_strings_against_every_length_cap",
            "sampling/test_text.py::test_blocks_do_not_matter_and_the_text_is_cut_before_the_first_stop",
        ),
    ),
    Bug(22, "grammars are not checked where drafts are accepted", "SGLang 21723", not_here="there are no grammars"),
    Bug(
        23,
        "log-probabilities are 0.0 or missing for accepted tokens",
        "llama.cpp 27972, vLLM 6967",
        ("runtime/test_sampled.py::test_logprobs_are_those_of_scoring_the_answer_again",),
    ),
    Bug(
        24,
        "what is streamed is not the answer",
        "several",
        (
            "runtime/test_stopping.py::test_streamed_text_is_the_answers_text",
            "runtime/test_modes.py::test_every_token_is_handed_out_with_the_pass_that_committed_it",
        ),
    ),
    Bug(
        25,
        "a late message of an earlier request is taken for one of this",
        "SGLang (retracted requests)",
        (
            "protocol/test_sessions.py::test_a_late_message_of_an_earlier_request_changes_nothing",
            "runtime/test_modes.py::test_an_answer_can_be_left_early_and_the_next_is_whole",
        ),
    ),
    Bug(
        26,
        "ranks of one model accept different numbers of candidates",
        "vLLM 17498, 17509",
        not_here="each model has one rank",
    ),
    Bug(
        27,
        "the edge of the context",
        "llama.cpp (tests of its context shift)",
        (
            "runtime/test_modes.py::test_the_context_limit_ends_an_answer_like_a_length",
            "models/test_decoder.py::test_it_agrees_up_to_the_last_position",
            "test_engine.py::test_a_prompt_that_leaves_no_room_is_refused_and_the_engine_goes_on",
        ),
    ),
    Bug(
        28,
        "a dead draft hangs the generation; its errors are swallowed",
        "the code published with AMUSD",
        (
            "runtime/test_survival.py::test_a_draft_that_is_killed_again_and_again_costs_no_token",
            "runtime/test_survival.py::test_a_draft_that_fails_is_replaced",
        ),
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.number}: {bug.story}")
def test_each_has_a_test_that_exists_or_a_reason(bug: Bug) -> None:
    assert bool(bug.tests) != bool(bug.not_here)
    for name in bug.tests:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_they_are_numbered_without_a_gap() -> None:
    assert [bug.number for bug in BUGS] == list(range(1, len(BUGS) + 1))
