"""Where answers end: each stop position with each length cap, in every mode."""

from __future__ import annotations

from typing import get_args

import pytest
from oracle import always_right
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, oracle, pair, params, reference
from table_model import TableTokenizer

from amusd.drafters.synthetic import right_with_probability
from amusd.types import Mode

BLOCK = 4
CAPS = range(1, BLOCK + 3)
"""`max_new_tokens` from 1 to K + 2."""
ANSWER = reference(BLOCK + 20)[len(PROMPT) :]
SCHEDULES = {"right": always_right(), "partly": right_with_probability(0.6, 5)}
MODES = get_args(Mode)
CASES = [
    ("autoregressive", "right"),
    ("synchronous", "right"),
    ("asynchronous", "right"),
    ("synchronous", "partly"),
    ("asynchronous", "partly"),
]


def first_index(token_id: int) -> int:
    return ANSWER.index(token_id)


@pytest.mark.parametrize(("mode", "schedule"), CASES)
def test_end_of_sequence_against_every_length_cap(mode: Mode, schedule: str) -> None:
    """EOS at each place of the block, the cap at each place: nothing after the first of the two, the reason right."""
    for eos_index in range(BLOCK + 3):
        eos = ANSWER[eos_index]
        with pair({"oracle": oracle(30, SCHEDULES[schedule])}, eos_token_id=eos) as (engine, _):
            for cap in CAPS:
                answer = engine.generate(PROMPT, params(cap), decoding=decoding(mode, BLOCK))
                end = min(first_index(eos) + 1, cap)
                assert answer.token_ids == ANSWER[:end]
                # At the same token end-of-sequence wins over the length.
                expected = "eos" if first_index(eos) + 1 <= cap else "length"
                assert answer.finish_reason is expected
                assert answer.metrics.num_tokens == end
                assert answer.metrics.num_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize(("mode", "schedule"), CASES)
def test_stop_strings_against_every_length_cap(mode: Mode, schedule: str) -> None:
    """Stop strings of one to three tokens, so that they lie across tokens and blocks, at each place."""
    text = TableTokenizer(VOCAB_SIZE).decode(ANSWER)
    with pair({"oracle": oracle(30, SCHEDULES[schedule])}) as (engine, _):
        for length in (1, 2, 3):
            for start in range(BLOCK + 2):
                stop = text[start : start + length]
                end = text.index(stop) + length
                for cap in (1, end - 1, end, end + 1):
                    if cap < 1:
                        continue
                    answer = engine.generate(PROMPT, params(cap, (stop,)), decoding=decoding(mode, BLOCK))
                    stopped = end <= cap
                    assert answer.token_ids == ANSWER[: min(end, cap)]
                    assert answer.finish_reason is ("stop" if stopped else "length")
                    assert answer.text == (text[: end - length] if stopped else text[:cap])
                    assert answer.metrics.num_tokens == min(end, cap)


@pytest.mark.parametrize("mode", MODES)
def test_streamed_text_is_the_answers_text(mode: Mode) -> None:
    text = TableTokenizer(VOCAB_SIZE).decode(ANSWER)
    with pair({"oracle": oracle(30, SCHEDULES["partly"])}) as (engine, _):
        for stop in ((), (text[6:9],), (text[5:7], text[4:6]), ("nowhere to be found",)):
            stream = engine.stream(PROMPT, params(12, stop), decoding=decoding(mode, BLOCK))
            tokens = list(stream)
            assert "".join(token.text for token in tokens) == stream.generation.text
            assert tuple(token.token_id for token in tokens) == stream.generation.token_ids
            assert not any(string in stream.generation.text for string in stop)
