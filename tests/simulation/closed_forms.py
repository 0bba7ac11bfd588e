"""Speed-ups over plain decoding that can be written down, for comparison with the simulated ones.

    a      probability that a draft token behind a right prefix is accepted, independent of all others
    c      draft steps in the time of one target pass, at least 1
    delay  of a message, one way, in target passes
    tokens are counted per target pass, whose time does not depend on its width

All of them hold for an endless answer. A *rejection cycle* is what lies between two rejections (a bonus token that
contradicts the draft's own counts as one); it yields 1 / (1 - a) tokens, whatever the schedule.
"""

from __future__ import annotations

import math


def tokens_per_verification(a: float, num_candidates: int) -> float:
    return num_candidates + 1.0 if a == 1 else (1 - a ** (num_candidates + 1)) / (1 - a)


def synchronous(a: float, c: float, num_tokens: int, *, overhead: float = 0.0) -> float:
    """Draft `num_tokens`, verify them, repeat (https://arxiv.org/abs/2211.17192).

    `overhead`: per round, in target passes; with the two models on two devices at least two delays.
    """
    return tokens_per_verification(a, num_tokens) / (1 + num_tokens / c + overhead)


def windowed(a: float, c: float, num_tokens: int) -> float:
    """Lock-step windows, drafted while the one before is verified (PEARL, https://arxiv.org/abs/2408.11850).

    After a rejection one pass has nothing to verify. `num_tokens` at least 1.
    """
    window = max(1.0, num_tokens / c)
    if a == 1:
        return num_tokens / window
    full = a**num_tokens
    return (1 - full) / ((1 - a) * (1 - full + a)) / window


def chain(a: float, c: float, min_candidates: int, *, delay: float = 0.0, restart_loss: float = 0.0) -> float:
    """A draft that never pauses; after a rejection the target waits for `min_candidates`.

    AMUSD, https://arxiv.org/abs/2410.17375; PipeSpec, https://arxiv.org/abs/2505.01572. `restart_loss`: the part of a
    draft step that is lost because a rollback finds the draft amid it. The form forgets what is done already of a step
    that a pass's end interrupts: if c is not whole, it is a few percent too low.
    """
    steps = math.floor(c)
    if a == 1:
        return float(steps)
    follow_up = 1 - a**steps
    if min_candidates:
        waited = (min_candidates + restart_loss) / c + 2 * delay
        passes = waited + 1 + a ** (min_candidates + 1) / follow_up
    else:
        first_follow_up = max(0.0, math.floor((1 - 2 * delay) * c) - restart_loss)
        passes = 1 + a * (1 + a**first_follow_up / follow_up)
    return 1 / (1 - a) / passes


def upper_bound(a: float, c: float) -> float:
    """Return what no schedule with one chain of candidates exceeds.

    Every rejection needs a pass, and accepted tokens are drafted one after another.
    """
    by_passes = math.inf if a == 1 else 1 / (1 - a)
    return min(by_passes, math.inf if a == 0 else c / a)
