"""A draft with fewer positions than the sequence: it drafts up to its last one, and the target goes on alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from models import tiny
from models.test_block_models import (
    LAYERS,
    dflash_weights,
    load_dflash,
    load_medusa,
    medusa_weights,
    save_dflash,
    save_medusa,
)
from models.test_eagle import OPTIONS, WIDTH, save_eagle3
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, pair, params, reference
from table_model import TableModel

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Drafter
from amusd.drafters.block import BlockDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.eagle import EagleDrafter
from amusd.drafters.tree import ModelTreeDrafter
from amusd.models.eagle import load_eagle
from amusd.models.huggingface import wrap_model
from amusd.protocol.messages import Features, Open, Verdict
from amusd.runtime.rollback import RollbackManager, propose
from amusd.types import Mode

POSITIONS = 30
SHORT = TableModel(VOCAB_SIZE, seed=7, max_length=POSITIONS, num_tracks=3)
"""The target's own model, with fewer positions: it is always right."""
SCHEDULES = {
    "synchronous": decoding(Mode.SYNCHRONOUS, 4),
    "chain": decoding(Mode.ASYNCHRONOUS, policy="chain"),
    "windowed": decoding(Mode.ASYNCHRONOUS, policy="windowed"),
}
MAKERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: AutoregressiveDrafter(SHORT),
    "cascade": lambda: CascadeDrafter(SHORT, AutoregressiveDrafter(SHORT)),
}

WIDTHS = {"eagle": WIDTH, "medusa": WIDTH, "dflash": WIDTH}
"""Numbers of a feature, of those that read some."""


@pytest.mark.parametrize(
    ("schedule", "drafter", "prompt"),
    [
        ("synchronous", "model", PROMPT),
        ("chain", "cascade", PROMPT),
        ("windowed", "model", PROMPT),
        ("synchronous", "cascade", reference(POSITIONS)),
        ("chain", "model", reference(POSITIONS)),
    ],
)
def test_the_answer_is_the_targets_and_is_drafted_as_far_as_the_draft_reaches(
    schedule: str, drafter: str, prompt: tuple[int, ...]
) -> None:
    with pair({drafter: MAKERS[drafter]}) as (engine, draft):
        answer = engine.generate(prompt, params(60), decoding=SCHEDULES[schedule])
    assert draft.error is None
    assert answer.token_ids == reference(60, prompt)[len(prompt) :]
    num_drafted = answer.metrics.num_accepted
    assert num_drafted <= max(0, POSITIONS - len(prompt))
    assert num_drafted >= (10 if prompt is PROMPT else 0)
    waits = [event.duration_ns for event in engine.worker.recorder.events if event.name == "target_wait"]
    assert sum(waits) < 15e9, "the target waits for what cannot come"


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Drafter]]:
    target, folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafts")
    tiny.save_checkpoint(target, tiny.tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=False))
    save_medusa(folder / "medusa", medusa_weights())
    save_dflash(folder / "dflash", dflash_weights())
    save_eagle3(folder / "eagle")
    options = replace(OPTIONS, max_model_len=POSITIONS)
    llama = wrap_model(tiny.tiny_causal_lm(tiny.tiny_config()), options)
    return {
        "tree": lambda: ModelTreeDrafter(llama),
        "eagle": lambda: EagleDrafter(load_eagle(folder / "eagle", target, options)),
        "medusa": lambda: BlockDrafter(load_medusa(folder / "medusa", target, options)),
        "dflash": lambda: BlockDrafter(load_dflash(folder / "dflash", target, options)),
    }


@pytest.mark.parametrize("kind", ["tree", "eagle", "medusa", "dflash"])
@pytest.mark.parametrize("fan_out", [1, 3])
def test_trees_and_what_reads_features_end_at_the_last_position(
    kind: str, fan_out: int, makers: dict[str, Callable[[], Drafter]]
) -> None:
    opening = Open(1, 1, (5, 6, 7), 100, kind, 8, 1, fan_out=fan_out, rows_per_step=fan_out)
    manager, width, deepest = RollbackManager(opening, makers[kind]()), WIDTHS.get(kind, 0), 0
    start = 0
    while (base := manager.session.base) < 2 * POSITIONS:
        if width:
            rows = torch.zeros(base - 1 - start, width, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
            manager.take_features(Features(1, 1, start, base - 1, rows))
            start = base - 1
        for _ in range(4):
            propose([manager])
        assert manager.session.num_nodes > 0 or base >= POSITIONS
        deepest = max([deepest, *(node.position for node in manager.session.root.below())])
        manager.apply(Verdict(1, 1, 0, base, (3, 4), 0))
    assert deepest == POSITIONS - 1
    assert not manager.has_work
