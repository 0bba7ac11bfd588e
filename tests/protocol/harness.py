"""A random schedule of everything that the two sessions can do, with faults on the way between them.

The oracle is a function from a prefix to the target's next token. A ghost record says what every candidate was drafted
from. After every step the invariants of docs/protocol.md are checked; `Violation` names the one that broke.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.channel import Channel

from amusd.errors import AmusdError
from amusd.protocol import prefix_hash
from amusd.protocol.draft_session import DraftSession, Guesses, Node, Transition
from amusd.protocol.messages import Candidate, Open, Verdict
from amusd.protocol.target_session import Reception, TargetSession
from amusd.protocol.verification import Block
from amusd.sampling.acceptance import Acceptance, accept_along

VOCAB_SIZE = 5

Drafted = tuple[tuple[int, ...], int]
"""A token, behind the prefix that it was drafted from."""


def accept_equal(target_token_ids: Sequence[int], candidates: Sequence[int]) -> Acceptance:
    """Compare candidates with the target's choices.

    `target_token_ids[i]` is the target's choice at candidate i's position, given that all before were accepted: one for
    each candidate that went through the pass, and one behind them. `candidates` may have that one more (a late one).
    """
    num_accepted = 0
    for choice, candidate in zip(target_token_ids, candidates, strict=False):
        if choice != candidate:
            break
        num_accepted += 1
    return Acceptance(tuple(target_token_ids[: num_accepted + 1]), num_accepted)


class Violation(AssertionError):  # noqa: N818 - a finding, not an error of the harness
    """An invariant does not hold."""


def oracle_token(prefix: tuple[int, ...]) -> int:
    """The target's next token: depends on the whole prefix."""
    value = prefix_hash.EMPTY
    for token_id in prefix:
        value = prefix_hash.extend(value, token_id)
    return value % VOCAB_SIZE


def oracle_text(prompt: tuple[int, ...], max_length: int) -> tuple[int, ...]:
    """What plain decoding writes."""
    text = prompt
    while len(text) < max_length:
        text = (*text, oracle_token(text))
    return text


@dataclass(frozen=True)
class Faults:
    """What may go wrong on the way, as probabilities per step."""

    lose: float = 0.0
    duplicate: float = 0.0
    restart: float = 0.0
    vanish: float = 0.0
    """The draft is gone and the target knows; it comes back, as a new life, with probability `restart`."""
    right: float = 0.7
    """How often the target's own token is among what the draft proposes."""
    silent: float = 0.1
    """How often the drafter of a chain has nothing to propose."""


@dataclass
class Harness:
    """One sequence between a target and a draft session, and the two channels between them."""

    seed: int
    faults: Faults = field(default_factory=Faults)
    fan_out: int = 0
    """1: a chain; 0: the seed chooses, a chain every other time."""
    max_length: int = 40
    max_lookahead: int = 6
    target_class: type[TargetSession] = TargetSession
    draft_class: type[DraftSession] = DraftSession
    num_accepted: int = 0
    num_alternatives: int = 0
    num_accepted_alternatives: int = 0
    num_rollbacks: int = 0
    num_adopted: int = 0
    """Verdicts that the tree foresaw."""
    num_gaps: int = 0
    num_returns: int = -1
    """Lives of the draft behind the first."""
    num_alone: int = 0
    """Tokens committed while there was no draft."""
    receptions: list[Reception] = field(default_factory=list)

    num_round_trips = 3
    """Until all that was lost is made up for, of a draft that makes no mistakes."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.fan_out = self.fan_out or self.random.choice((1, 1, 2, 3))
        self.prompt = tuple(self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 4)))
        self.target = self.target_class(
            sequence_id=1,
            prompt=self.prompt,
            max_length=self.max_length,
            vocab_size=VOCAB_SIZE,
            fan_out=self.fan_out,
        )
        self.incarnation = 0
        self.to_target = Channel[tuple[Candidate, tuple[Drafted, ...]]](self.random)
        self.to_draft = Channel[Verdict](self.random)
        self.arrived: set[Drafted] = set()
        """What the present life of the draft has drafted and sent, as far as it has arrived."""
        self.block = Block(0, 0, ())
        self.prefixes: list[tuple[int, ...]] = []
        """Of the pass under way: what stands behind each row."""
        self.is_verifying = False
        self.committed_before = self.prompt
        self.restart_draft()

    # The draft's actions

    def prefix_of(self, node: Node) -> tuple[int, ...]:
        """All tokens up to and with this node's."""
        path: list[int] = []
        here: Node | None = node
        while here is not None and here is not self.draft.root:
            path.append(here.token_id)
            here = here.parent
        return (*self.draft.committed, *reversed(path))

    def propose(self) -> None:
        nodes = self.draft.next_nodes()
        if nodes and self.fan_out == 1:
            self.draft.grow(nodes, self._path_behind(nodes[0]))
        elif nodes:
            self.draft.grow(nodes, [self._guesses_behind(self.prefix_of(node)) for node in nodes])

    def _path_behind(self, last: Node) -> list[Guesses]:
        prefix, path = self.prefix_of(last), []
        for _ in range(0 if self.random.random() < self.faults.silent else self.random.randint(1, self.draft.room)):
            right = oracle_token(prefix)
            wrong = (right + self.random.randint(1, VOCAB_SIZE - 1)) % VOCAB_SIZE
            path.append(right if self.random.random() < self.faults.right else wrong)
            prefix = (*prefix, path[-1])
        return [[(token, 1.0)] for token in path]

    def _guesses_behind(self, prefix: tuple[int, ...]) -> Guesses:
        right = oracle_token(prefix)
        others = [token for token in range(VOCAB_SIZE) if token != right]
        self.random.shuffle(others)
        tokens = others[: self.fan_out]
        if self.random.random() < self.faults.right:
            tokens[self.random.randrange(len(tokens))] = right
        return [(token, self.random.uniform(0.1, 0.6)) for token in tokens]

    def look_up(self) -> None:
        """A chain has no lookups beside its steps."""
        if self.fan_out == 1:
            return
        prefix, tokens = self.draft.committed, []
        for _ in range(self.random.randint(1, 4)):
            tokens.append(oracle_token((*prefix, *tokens)) if self.random.random() < self.faults.right else 0)
        self.draft.guess_path(tokens, 0.9)

    def offer(self) -> None:
        unsent = list(self.draft._unsent)
        message = self.draft.offer()
        if message is not None:
            drafted = tuple((self.prefix_of(node)[:-1], node.token_id) for node in unsent)
            self.to_target.send((message, drafted), lose=self.faults.lose, duplicate=self.faults.duplicate)

    def deliver_verdict(self) -> None:
        self._hear(self.to_draft.next())

    def deliver_old_verdict(self) -> None:
        self._hear(self.to_draft.any_copy())

    def _hear(self, verdict: Verdict | None) -> None:
        transition = None if verdict is None else self.draft.preview(verdict)
        if transition is not None:
            self.draft.apply(transition)
            self.heard(transition)

    def heard(self, transition: Transition) -> None:
        self.num_rollbacks += transition.num_discarded > 0
        self.num_adopted += bool(transition.kept) and not transition.token_ids

    # The target's

    def lose_draft(self) -> None:
        """The target goes on alone; what the draft sent may still arrive."""
        self.target.detach()
        self.to_draft.clear()

    def restart_draft(self) -> None:
        """A draft (again): what was on its way to the old one is lost, what it sent may still arrive."""
        self.incarnation += 1
        self.target.attach(self.incarnation)
        self.num_returns += 1
        self.to_draft.clear()
        is_chain = self.fan_out == 1
        opening = Open(
            sequence_id=1,
            incarnation=self.incarnation,
            token_ids=self.target.committed,
            max_length=self.max_length,
            drafter="test",
            max_lookahead=self.max_lookahead,
            tokens_per_message=self.random.randint(1, 3) if is_chain else 1,
            fan_out=self.fan_out,
            rows_per_step=1 if is_chain else self.random.randint(1, 4),
        )
        self.draft = self.draft_class(opening)
        self.base_before, self.epoch_before, self.target_epoch_before = self.draft.base, 0, 0
        self.arrived = set()

    def deliver(self) -> None:
        self._receive(self.to_target.next())

    def deliver_copy(self) -> None:
        self._receive(self.to_target.any_copy())

    def _receive(self, sent: tuple[Candidate, tuple[Drafted, ...]] | None) -> None:
        if sent is None:
            return
        message, drafted = sent
        epoch = self.target.epoch
        self.receptions.append(self.target.receive(message))
        self.num_gaps += self.target.epoch > epoch
        if message.incarnation == self.incarnation:
            self.arrived |= set(drafted)

    def begin(self, depth: int | None = None) -> None:
        if self.is_verifying or self.target.remaining < 1:
            return
        self.is_verifying = True
        num_tracks = 1 if self.fan_out == 1 else self.random.randint(1, 4)
        max_rows = self.random.randint(2, 9)
        depth = self.random.randint(0, self.max_lookahead) if depth is None else depth
        self.block = self.target.begin(depth, num_tracks=num_tracks, max_rows=max_rows)
        self.num_alternatives += len(self.block.alternatives)
        self.prefixes = [self.target.committed]
        for token_id, parent in zip(self.block.token_ids[1:], self.block.parents, strict=True):
            self._check_drafted(self.prefixes[parent], token_id)
            self.prefixes.append((*self.prefixes[parent], token_id))
        if self.block.alternatives and len(self.block.parents) >= max_rows:
            raise Violation(f"{len(self.block.parents) + 1} rows in a pass of {max_rows}")

    def commit(self) -> None:
        if not self.is_verifying:
            return
        acceptance = self._judge()
        token_ids = acceptance.token_ids[: self.target.remaining]
        num_accepted = min(acceptance.num_accepted, len(token_ids))
        outcome = self.target.commit(token_ids, num_accepted)
        self.num_accepted += num_accepted
        self.num_accepted_alternatives += outcome.num_accepted_alternatives
        self.is_verifying = False
        if not self.target.attached:
            self.num_alone += len(token_ids)
            return
        self.to_draft.send(self.target.verdict(), lose=self.faults.lose, duplicate=self.faults.duplicate)

    def _judge(self) -> Acceptance:
        choices = [oracle_token(prefix) for prefix in self.prefixes]
        if self.block.alternatives:
            return accept_along(choices.__getitem__, self.block.next_row, len(choices))[0]
        judged = self.target.candidates_to_judge()
        if len(judged) > len(self.block.candidates):
            self._check_drafted(self.prefixes[-1], judged[-1])
        return accept_equal(choices, judged)

    def _check_drafted(self, prefix: tuple[int, ...], token_id: int) -> None:
        if (prefix, token_id) not in self.arrived:
            raise Violation(f"I6: token {token_id} at {len(prefix)} was drafted from something else")

    # The run

    def step(self) -> None:
        """One random action, then every check."""
        if self.random.random() < self.faults.restart:
            self.restart_draft()
        if self.random.random() < self.faults.vanish:
            self.lose_draft()
        actions = (
            self.propose,
            self.propose,
            self.look_up,
            self.offer,
            self.deliver,
            self.deliver,
            self.deliver_copy,
            self.deliver_verdict,
            self.deliver_old_verdict,
            self.begin,
            self.commit,
        )
        self.random.choice(actions)()
        self.check()

    def run(self, max_steps: int = 4_000) -> None:
        """Until the text is full. Raises `Violation`; an error of the package counts as one."""
        try:
            for _ in range(max_steps):
                self.step()
                if self.target.remaining == 0 and not self.is_verifying:
                    break
            else:
                raise Violation("L1: the text is not finished")
        except AmusdError as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        if self.target.committed != oracle_text(self.prompt, self.max_length):
            raise Violation("I2: the text is not the target's")

    def settle(self) -> None:
        """From here on nothing goes wrong and the draft makes no mistakes, until all that was lost is made up for.

        The target commits tokens of its own, so that what was lost is not merely passed by.
        """
        self.faults = Faults(right=1.0, silent=0.0)
        self.commit()
        if not self.target.attached:
            self.restart_draft()
        num_left = self.num_round_trips
        while num_left > 0:
            num_left -= 1
            while self.to_target or self.to_draft:
                self.deliver()
                self.deliver_verdict()
            self.begin(0)
            self.commit()
            self.deliver_verdict()
            while self.draft.has_work:
                self.propose()
            self.offer()
            root = self.draft.root
            if num_left == 0 and root.computed and not root.children and not self.target.num_candidates:
                num_left = 1  # it had nothing to say of this token before the faults ended
        while self.to_target:
            self.deliver()

    @property
    def knows_all(self) -> bool:
        """The target has every candidate that the draft has, and no other."""
        known, rest = set(), [(self.target.committed, self.target._children)]
        while rest:
            prefix, children = rest.pop()
            known |= {(*prefix, token_id) for token_id in children}
            rest += [((*prefix, node.token_id), node.children) for node in children.values()]
        return known == {self.prefix_of(node) for node in self.draft.root.below()}

    def check(self) -> None:
        committed = self.target.committed
        if committed[: len(self.committed_before)] != self.committed_before:
            raise Violation("I1: the committed prefix changed")
        for length in range(len(self.committed_before), len(committed)):
            if committed[length] != oracle_token(committed[:length]):
                raise Violation("I2: a committed token is not the target's")
        self.committed_before = committed
        if self.draft.epoch < self.epoch_before or self.target.epoch < self.target_epoch_before:
            raise Violation("I3: an epoch went back")
        self.epoch_before, self.target_epoch_before = self.draft.epoch, self.target.epoch
        base = self.draft.base
        if base < self.base_before:
            raise Violation("I4: the draft's base went back")
        self.base_before = base
        if self.draft.committed != committed[:base]:
            raise Violation("I4: the draft's base is not a committed prefix")
        if len(committed) > self.max_length:
            raise Violation("I5: the text is too long")
        below = list(self.draft.root.below())
        if len(below) != self.draft.num_nodes:
            raise Violation("the draft miscounts its nodes")
        for node in below:
            if not base <= node.position < base + self.max_lookahead:
                raise Violation("R1: the draft runs too far ahead")
            if node.position >= self.max_length - 1:
                raise Violation("R1: the draft writes where the target alone does")
