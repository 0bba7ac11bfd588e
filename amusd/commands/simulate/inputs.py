"""The inputs of a prediction: times and answers, as given or as measured in a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amusd.config import RunConfig
from amusd.errors import ConfigError
from amusd.policies.factory import make_policy
from amusd.simulation.calibration import Calibration, calibrate
from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.simulator import Simulator
from amusd.simulation.tokens import Answer, drawn_answers, replayed_answers
from amusd.types import Mode

TREE_ROW_SHARE = 0.06
"""What each node beyond the first adds to a draft step, as a share of it, if nothing is known. Measured on the embedded
draft, whose step of eight nodes takes 1.4 times that of one."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The machine to simulate, and where its figures come from."""

    simulator: Simulator
    acceptance: dict[str, Any]
    """The origin of its answers, for the result."""

    def as_dict(self) -> dict[str, Any]:
        """Return all that the rows follow from except the knobs, for a result."""
        simulator = self.simulator
        return {
            "acceptance": self.acceptance,
            "num_answers": len(simulator.answers),
            "num_tokens": sum(map(len, simulator.answers)),
            "batch_size": simulator.num_slots,
            "costs": simulator.costs.as_dict(),
            "max_candidates_in_a_pass": simulator.max_candidates,
            "accept_next": simulator.accept_next,
            "can_branch": simulator.can_branch,
            "seed": simulator.seed,
        }


def inputs_of(config: RunConfig, calibration: Calibration | None = None) -> Inputs:
    """Collect times and answers, measured or as given; a given value wins. Raises `ConfigError`.

    Passes are as wide as `compare` would make them for the same block lengths. `calibration`: one in the place of what
    the configured run shows.
    """
    settings = config.simulate
    longest_wait = max(settings.min_candidates)
    if longest_wait > config.max_lookahead:
        raise ConfigError(
            f"simulate.min_candidates={longest_wait}: must be at most max_lookahead ({config.max_lookahead})"
        )
    make_policy(
        replace(config.decoding(), mode=Mode.ASYNCHRONOUS)
    )  # a mistake in an own policy is said before all else
    width = config.engine(longest_block=max(settings.synchronous_lengths)).max_verify_width
    if calibration is None and config.calibration is not None:
        calibration = calibrate(Path(config.calibration), config.drafter.kind)
    if calibration is None:
        for name in ("accept", "verify_ms", "draft_ms"):
            if getattr(config, name) is None:
                raise ConfigError(f"{name}: required to simulate without calibration=RUN_DIR")
    answers, acceptance = _answers(config, calibration)
    simulator = Simulator(
        costs=_costs(config, None if calibration is None else calibration.costs),
        answers=answers,
        max_candidates=width - 1,
        accept_next=_accept_next(config, calibration),
        can_branch=config.drafter.can.tree,
        seed=config.sampling.seed,
        batch_size=settings.batch_size,
    )
    return Inputs(simulator, acceptance)


def _answers(config: RunConfig, calibration: Calibration | None) -> tuple[tuple[Answer, ...], dict[str, Any]]:
    if calibration is not None and config.accept is None:
        answers = replayed_answers(calibration.traces, config.sampling.seed)
        return answers, {
            "kind": "replay",
            "drafter": calibration.drafter,
            "accept": calibration.acceptance,
        }
    assert config.accept is not None
    return drawn(config, config.accept), {"kind": "drawn", "accept": config.accept}


def _accept_next(config: RunConfig, calibration: Calibration | None) -> float:
    """Return that of the run whose answers are replayed, if it drafted trees; else the given one."""
    if calibration is None or config.accept is not None or calibration.accept_next is None:
        return config.drafter.accept_next
    return calibration.accept_next


def _costs(config: RunConfig, measured: Costs | None) -> Costs:
    settings = config.simulate
    if settings.devices_apart and measured is None:
        raise ConfigError("simulate.devices_apart=true: needs calibration=RUN_DIR, a run that shows what workers share")
    costs = Costs(passes={}, draft_token=Shared.of_ms(0.0)) if measured is None else measured
    costs = costs.each(lambda shared: shared.with_spread(settings.jitter))
    given: dict[str, Any] = {
        "sequence_ns": round(settings.sequence_ms * 1e6),
        "draft_sequence_ns": round(settings.draft_sequence_ms * 1e6),
        "knee_rows": settings.knee_rows,
    }
    if config.verify_ms is not None:
        given["passes"] = {0: Shared.of_ms(config.verify_ms, settings.jitter)}
    if config.draft_ms is not None:
        given |= {"draft_token": Shared.of_ms(config.draft_ms, settings.jitter), "tree_steps": {}}
    if config.delay_ms is not None:
        given["to_target"] = given["to_draft"] = Duration.of_ms(config.delay_ms)
    if settings.draft_row_ms is not None:
        given |= {"tree_row_ns": round(settings.draft_row_ms * 1e6), "tree_steps": {}}
    costs = replace(costs, **given)
    if settings.draft_row_ms is None and not costs.tree_steps:
        costs = replace(costs, tree_row_ns=round(TREE_ROW_SHARE * costs.draft_token.alone.mean_ms * 1e6))
    return costs.where_other(works=False) if settings.devices_apart else costs


def drawn(config: RunConfig, accept: float) -> tuple[Answer, ...]:
    """Make answers in which a share `accept` of the tokens is right, at least one for each place of the batch."""
    settings = config.simulate
    num_answers = max(settings.num_answers, settings.batch_size)
    return drawn_answers(accept, num_answers=num_answers, num_tokens=settings.num_tokens, seed=config.sampling.seed)
