"""The defects of AMUSD's published code (R1 to R14 of its analysis), each as a test that this code does not have it.

What is tested elsewhere: R2 (draft equal to the target: test_modes), R11 and R12 (test_stopping), R3 and R13 (the
sessions under random interleavings: tests/protocol), R4 (whole frames only: tests/transport).
"""

from __future__ import annotations

import pytest
from memory_link import MemoryTransport
from oracle import OracleDrafter, always_right
from runtime.pair import PROMPT, VOCAB_SIZE, WIDTH, decoding, oracle, pair, params, reference, target_model

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.synthetic import right_with_probability
from amusd.protocol.messages import Message, Open, Verdict
from amusd.protocol.wire import encode
from amusd.runtime.rollback import RollbackManager, propose
from amusd.types import Mode

SPECULATIVE = [Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS]
NUM_TOKENS = 40


def opening(lookahead: int = 8) -> Open:
    return Open(1, 1, PROMPT, 100, "same", lookahead, 1)


def verdict(start: int, token_ids: tuple[int, ...], epoch: int = 0) -> Verdict:
    return Verdict(1, 1, epoch, start, token_ids, 0)


@pytest.mark.parametrize(("num_drafted", "divergence"), [(1, 0), (4, 0), (4, 2), (4, 3), (7, 3)])
def test_after_a_rollback_at_any_index_the_draft_equals_a_fresh_one(num_drafted: int, divergence: int) -> None:
    """R1 and R10: the crop is exact at the first index, the last and all between, and so is what is proposed next."""
    drafter = AutoregressiveDrafter(target_model())
    manager = RollbackManager(opening(), drafter)
    while manager.length < len(PROMPT) + num_drafted:
        propose([manager])
    path = tuple(node.token_id for node in manager.session.root.below())
    kept, other = path[:divergence], (path[divergence] + 1) % VOCAB_SIZE
    transition = manager.apply(verdict(len(PROMPT), (*kept, other)))
    assert transition is not None
    assert transition.num_discarded == num_drafted - divergence
    stream = (*PROMPT, *kept, other)
    assert manager.session.committed == stream
    assert manager.session.num_nodes == 0
    assert drafter.length == len(stream)
    assert drafter.cache_length <= len(stream) - 1
    fresh = AutoregressiveDrafter(target_model())
    fresh.open(stream, 100)
    assert drafter.propose(5) == fresh.propose(5)
    assert drafter.cache_length == drafter.length - 1 == fresh.cache_length


class CountingLink:
    """Passes everything on, and keeps the size of every frame that leaves."""

    def __init__(self, inner: MemoryTransport) -> None:
        self.inner = inner
        self.sizes: list[int] = []

    def send(self, message: Message) -> None:
        self.sizes.append(len(encode(message, 0)))
        self.inner.send(message)

    def receive(self, timeout: float) -> Message | None:
        return self.inner.receive(timeout)

    def close(self) -> None:
        self.inner.close()


def test_messages_do_not_grow_with_the_text() -> None:
    """R5: a round's message carries what is new, not the history."""
    links: list[CountingLink] = []

    def wrap(link: MemoryTransport) -> CountingLink:
        links.append(CountingLink(link))
        return links[-1]

    with pair({"oracle": oracle(300, always_right())}, wrap_target_link=wrap) as (engine, _):
        engine.generate(PROMPT, params(300), decoding=decoding(Mode.SYNCHRONOUS, 4))
    verdicts = links[0].sizes[2:-2]
    assert len(verdicts) > 40
    assert max(verdicts[-10:]) <= max(verdicts[:10])


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_a_pass_is_never_wider_than_the_cap(mode: Mode) -> None:
    """R6."""
    with pair({"oracle": oracle(NUM_TOKENS, always_right())}, pass_seconds=0.005) as (engine, _):
        engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, 20))
        widths = [
            1 + event.fields["num_candidates"] for event in engine.worker.recorder.events if event.name == "target_pass"
        ]
    assert max(widths) == WIDTH


class FailingOracle(OracleDrafter):
    """Raises at a chosen proposal."""

    def __init__(self, fail_at: int) -> None:
        super().__init__(reference(NUM_TOKENS + 20), right_with_probability(0.5, 2), VOCAB_SIZE)
        self._left = fail_at

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        self._left -= 1
        if self._left < 0:
            raise MemoryError("out of memory")
        return super().propose(max_tokens)


@pytest.mark.parametrize(("mode", "fail_at"), [(Mode.SYNCHRONOUS, 4), (Mode.ASYNCHRONOUS, 0)])
def test_an_error_of_the_draft_surfaces_and_the_text_is_whole(mode: Mode, fail_at: int) -> None:
    """R8: never printed and swallowed. The draft's own thread raises it, the target goes on alone and says why."""
    with pair({"failing": lambda: FailingOracle(fail_at)}) as (engine, draft):
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, 4))
        assert engine.draft_failure is not None
        again = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, 4))
    assert answer.token_ids == again.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert isinstance(draft.error, MemoryError)
