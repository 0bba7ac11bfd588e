"""Speed-ups over plain decoding that can be written down, for comparison with the simulated ones.

    a      probability that a draft token after a right prefix is accepted, independent of all others, below 1
    c      draft steps in the time of one target pass, at least 1
    tokens are counted per target pass, whose time does not depend on its width

All of them hold for an endless answer. A *rejection cycle* is what lies between two rejections (a bonus token that
contradicts the draft's own counts as one); it yields 1 / (1 - a) tokens, whatever the schedule.
"""

from __future__ import annotations

import math


def synchronous(a: float, c: float, num_tokens: int, overhead: float) -> float:
    """Draft `num_tokens`, verify them, repeat (https://arxiv.org/abs/2211.17192).

    `overhead`: per round, in target passes; with the two models on two devices at least two delays.
    """
    return (1 - a ** (num_tokens + 1)) / (1 - a) / (1 + num_tokens / c + overhead)


def windowed(a: float, c: float, num_tokens: int) -> float:
    """Lock-step windows, drafted while the one before is verified (PEARL, https://arxiv.org/abs/2408.11850).

    After a rejection one pass has nothing to verify. `num_tokens` at least 1.
    """
    window, full = max(1.0, num_tokens / c), a**num_tokens
    return (1 - full) / ((1 - a) * (1 - full + a)) / window


def chain(a: float, c: float, min_candidates: int, *, restart_loss: float = 0.0) -> float:
    """A draft that never pauses; after a rejection the target waits for `min_candidates`, at least 1, without delay.

    AMUSD, https://arxiv.org/abs/2410.17375; PipeSpec, https://arxiv.org/abs/2505.01572. `restart_loss`: the part of a
    draft step that is lost because a rollback finds the draft amid it. The form forgets what is done already of a step
    that a pass's end interrupts: if c is not whole, it is a few percent too low.
    """
    waited = (min_candidates + restart_loss) / c
    return 1 / (1 - a) / (waited + 1 + a ** (min_candidates + 1) / (1 - a ** math.floor(c)))


def upper_bound(a: float, c: float) -> float:
    """Return what no schedule with one chain of candidates exceeds, also where `a` is 1.

    Every rejection needs a pass, and accepted tokens are drafted one after another.
    """
    return min(math.inf if a == 1 else 1 / (1 - a), c / a)
