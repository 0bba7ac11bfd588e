"""Many seeds at once: what broke, and what happened at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from faults.simulation import MAX_NUM_SEQS, run
from faults.weather import FAULTS

NUM_SEEDS = 100
"""Of `make test`."""
POLICIES = ("ChainPolicy", "WindowedPolicy", "SynchronousPolicy", "BranchingPolicy", "AutoPolicy")
MUST_HAPPEN = (
    *FAULTS,
    *POLICIES,
    "Resting",
    "partitioned",
    "lost",
    "restart",
    "rollback",
    "adoption",
    "alternative scored",
    "alternative accepted",
    "stale candidate",
    "stale verdict",
    "end of a sequence lost",
    "candidate of an earlier life",
    "candidate of an earlier answer",
    "reception taken",
    "reception stale",
    "reception contradicted",
    "cancelled",
    "cancelled in its prompt",
    *(f"pass over {number}" for number in range(1, MAX_NUM_SEQS + 1)),
)
"""Without any of these the rest would prove nothing."""


@dataclass
class Survey:
    """Of some seeds."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    """Each with the command that shows it again."""
    passes_to_accept: list[int] = field(default_factory=list)
    """Of the runs whose faults ended: passes until a candidate was accepted again."""
    num_given_up: int = 0
    """Of these, those whose target had given up on drafts by then: too many had brought nothing."""

    @property
    def missing(self) -> list[str]:
        """What should have happened, and did not."""
        return [name for name in MUST_HAPPEN if not self.counts[name]]

    def __str__(self) -> str:
        lines = [f"{number:9,} {name}" for name, number in sorted(self.counts.items())]
        slowest = max(self.passes_to_accept, default=0)
        lines += [f"{len(self.passes_to_accept)} runs came alive again, within {slowest} passes", *self.violations]
        return "\n".join(lines)


def survey(seeds: Iterable[int]) -> Survey:
    """Run them all."""
    found = Survey()
    for seed in seeds:
        report = run(seed)
        found.counts += report.counts
        if report.violation is not None:
            found.violations.append(f"python -m tests.faults {seed}  # {report.violation}")
        if report.passes_to_accept is not None:
            found.passes_to_accept.append(report.passes_to_accept)
        elif report.is_live and report.violation is None:
            found.num_given_up += 1
    return found
