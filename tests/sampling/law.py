"""The joint law of an answer's first tokens under the ratio test, through the real sessions, drafter and frames.

A model of five tokens whose distribution depends on the whole prefix; one run is one request with a seed of its own, on
one thread, its messages delivered by a random schedule. What comes out is counted and compared with exact enumeration.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from passes import forward
from sampling.reference import processed, softmax
from table_model import TableModel
from torch import Tensor

from amusd.config import Distribution
from amusd.drafters.model import ModelDrafter
from amusd.models.passes import ModelOutput, Rows
from amusd.protocol.messages import Candidate, Open, Verdict
from amusd.protocol.target_session import TargetSession
from amusd.protocol.wire import decode, encode
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager
from amusd.sampling.acceptance import RatioTest, unpack_draft_probs
from amusd.sampling.sampler import SamplingState

VOCAB_SIZE = 5
PROMPT = (1, 4)
NUM_TOKENS = 3
MAX_LENGTH = len(PROMPT) + NUM_TOKENS + 2
"""Two more than are counted, so that no run is cut short by its end."""


class Cache:
    """The tokens themselves."""

    history = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class PrefixModel(TableModel):
    """A `ModelRunner` whose logits are a table over prefixes, filled as they are asked for."""

    def __init__(
        self,
        seed: int,
        vocab_size: int = VOCAB_SIZE,
        of: PrefixModel | None = None,
        sign: float = 1.0,
        output_ids: Sequence[int] | None = None,
    ) -> None:
        """`of`: the logits lean on another model's, or against them (`sign` -1).

        `output_ids`: the tokens that they score.
        """
        super().__init__(vocab_size, seed, MAX_LENGTH)
        self.output_ids = None if output_ids is None else torch.tensor(output_ids)
        self._of = of
        self._sign = sign
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def row(self, prefix: tuple[int, ...]) -> Tensor:
        known = self._rows.get(prefix)
        if known is None:
            generator = torch.Generator().manual_seed(hash((self._seed, prefix)) & (2**63 - 1))
            known = torch.randn(self.vocab_size, generator=generator)
            if self._of is not None:
                columns = torch.arange(self.vocab_size) if self.output_ids is None else self.output_ids
                known = self._sign * self._of.row(prefix)[columns] + 0.7 * known
            self._rows[prefix] = known
        return known

    def new_caches(self, number: int, capacity: int, *, spare: int = 0) -> list[Cache]:
        return [Cache(capacity) for _ in range(number)]

    def prefill(self, token_ids: Sequence[int], cache: Cache) -> None:
        cache.tokens += token_ids

    def run(self, batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        outputs = []
        for rows in batch:
            tokens, logits = rows.cache.tokens, []  # type: ignore[attr-defined]  # one of this model's
            for token_id in rows.token_ids:
                tokens.append(token_id)
                logits.append(self.row(tuple(tokens)))
            outputs.append(ModelOutput(torch.stack(logits), rows.wanted))
        return outputs


@dataclass
class Experiment:
    """One configuration, run many times."""

    distribution: Distribution
    num_speculative_tokens: int = 2
    asynchronous: bool = True
    target: PrefixModel = field(default_factory=lambda: PrefixModel(1))
    draft: PrefixModel | None = None
    make_drafter: Callable[[PrefixModel], ModelDrafter] = ModelDrafter  # type: ignore[assignment]
    filter_offer: Callable[[Candidate], Candidate] = lambda candidate: candidate
    """Changes a candidate message on its way."""
    num_accepted: int = 0
    num_rejected: int = 0

    def run(self, number: int) -> Counter[tuple[int, ...]]:
        """The first tokens of `number` answers."""
        drafter = self.make_drafter(self.draft or PrefixModel(2, of=self.target))
        return Counter(self._answer(seed, drafter) for seed in range(number))

    def law(self) -> dict[tuple[int, ...], float]:
        """The exact probability of every possible beginning."""
        law: dict[tuple[int, ...], float] = {}
        for tokens in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS):
            probability = 1.0
            for index, token in enumerate(tokens):
                logits = self.target.row((*PROMPT, *tokens[:index])).tolist()
                row = processed(self.distribution, logits, PROMPT, tokens[:index])
                probability *= float(softmax(row)[token])
            if probability > 0:
                law[tokens] = probability
        return law

    def _answer(self, seed: int, drafter: ModelDrafter) -> tuple[int, ...]:
        schedule = random.Random(seed)
        distribution = _seeded(self.distribution, seed)
        sizes = {"max_length": MAX_LENGTH, "vocab_size": VOCAB_SIZE}
        session = TargetSession(sequence_id=1, prompt=PROMPT, wants_draft_probs=True, **sizes)
        session.attach(1)
        sampler = RatioTest(distribution, SamplingState(VOCAB_SIZE), PROMPT)
        length = 8 if self.asynchronous else self.num_speculative_tokens
        manager = RollbackManager(
            Open(1, 1, PROMPT, MAX_LENGTH, "d", length, 1, (), distribution.as_message()), drafter
        )
        manager.open()
        candidates: deque[bytes] = deque()
        verdicts: deque[bytes] = deque()
        [cache] = self.target.new_caches(1, MAX_LENGTH)
        cache.tokens += PROMPT[:-1]
        while session.committed_length < len(PROMPT) + NUM_TOKENS:
            step = schedule.random() if self.asynchronous else 0.0  # synchronous: the first thing that can be done
            if step < 0.4 and manager.has_work:
                draft_step([manager])
                if offer := manager.session.offer():
                    candidates.append(encode(self.filter_offer(offer), 7))
            elif step < 0.6 and candidates:
                self._take(session, candidates)
            elif step < 0.75 and verdicts:
                message = decode(verdicts.popleft())[2]
                assert isinstance(message, Verdict)
                manager.apply(message)
            elif step > 0.75 or not self.asynchronous:
                self._verify(session, sampler, cache, verdicts, candidates, schedule)
        return session.committed[len(PROMPT) : len(PROMPT) + NUM_TOKENS]

    def _take(self, session: TargetSession, candidates: deque[bytes]) -> None:
        message = decode(candidates.popleft())[2]
        assert isinstance(message, Candidate)
        session.receive(message, unpack_draft_probs(message.draft_probs, message.token_ids, VOCAB_SIZE))

    def _verify(
        self,
        session: TargetSession,
        sampler: RatioTest,
        cache: Cache,
        verdicts: deque[bytes],
        candidates: deque[bytes],
        schedule: random.Random,
    ) -> None:
        block = session.begin(min(self.num_speculative_tokens, session.remaining - 1))
        sampler.see(session.committed)
        packed = sampler.inputs(block.start, block.token_ids)
        logits = forward(self.target, block.token_ids, cache).logits
        while self.asynchronous and candidates and schedule.random() < 0.3:
            self._take(session, candidates)  # late ones
        judged, rows = session.to_judge()
        acceptance = sampler.accept(logits, block.start, packed, judged, rows)
        self.num_accepted += acceptance.num_accepted
        self.num_rejected += acceptance.num_accepted < len(judged)
        session.commit(acceptance.token_ids, acceptance.num_accepted)
        cache.truncate(session.committed_length - 1)
        verdicts.append(encode(session.verdict(), 7))


def _seeded(distribution: Distribution, seed: int) -> Distribution:
    """The same as `dataclasses.replace`, without its repeated checks of unchanged fields."""
    copy = object.__new__(Distribution)
    copy.__dict__.update(distribution.__dict__, seed=seed)
    return copy


def check_fit(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Chi-square over cells of at least five expected answers, the rarer ones merged.

    Threshold df + 10 sqrt(2 df): a statistic of a sound sampler has mean df and standard deviation sqrt(2 df), so it is
    ten of them away. For df = 26 a chi-square exceeds it with probability 3e-10.
    """
    number = sum(counts.values())
    assert counts.keys() <= law.keys(), "an answer of probability zero"
    cells = [(counts[answer], number * probability) for answer, probability in law.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if rare:
        common.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in common)
    degrees = len(common) - 1
    assert statistic < degrees + 10 * (2 * degrees) ** 0.5
