"""The number of waits of the host for a GPU in a pass or a draft's step, and the bytes that are copied to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import propose, propose_together
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.gpus import FakeGpus
from fake_cuda.record import Record
from fake_cuda.workers import Target, TreeDraft
from models import tiny
from models.test_block_models import medusa_weights, save_dflash, save_medusa
from models.test_eagle import LAYERS, OPTIONS, random
from passes import forward

from amusd.checkpoints.draft_networks import DFlashState, MedusaState, load_published
from amusd.config import GREEDY, Distribution
from amusd.drafters.base import Expansion
from amusd.drafters.block import BlockDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramDrafter
from amusd.errors import DeviceError
from amusd.protocol.draft_tree import Node
from amusd.runner.model_runner import extend
from amusd.runner.self_test import measure_width_invariance

TEMPERATURE = Distribution(temperature=0.7, seed=3)
FILTERS = Distribution(temperature=0.3, top_k=40, top_p=0.95, seed=3)
PENALTY = Distribution(temperature=0.1, top_p=0.95, repetition_penalty=1.2, seed=3)
RATIO_TEST = Distribution(temperature=0.7, acceptance="rejection", seed=3)
PROMPT = [(7 * place * place + 3) % 4000 for place in range(20)]


def measured(gpus: FakeGpus, work: Callable[[], object]) -> Record:
    work()  # what is made at first use is made here
    with gpus.recorded() as part:
        work()
    assert part.replays
    return part


def stops(part: Record) -> tuple[int, int]:
    return len(part.waits), len(part.blocking_copies)


def pass_of_the_target(gpus: FakeGpus, distribution: Distribution, **wanted: Any) -> Record:
    target = Target(builders.small("cuda:0"))
    target.open(PROMPT, distribution, **wanted)
    for _ in range(4):
        target.verify(())
    candidates = target.tokens[len(PROMPT) : len(PROMPT) + 3]
    target.open(PROMPT, distribution, **wanted)
    with gpus.recorded() as part:
        acceptance = target.verify(candidates)
    assert distribution.rule == "rejection" or acceptance.num_accepted == 3
    return part


def step_of_a_chain(gpus: FakeGpus, distribution: Distribution) -> Record:
    drafter = ModelDrafter(builders.small("cuda:0", **builders.as_draft("cuda:0")))
    drafter.set_distribution(distribution)
    drafter.open(PROMPT, 200)
    path: list[int] = []

    return measured(gpus, lambda: path.extend(propose(drafter, 4, path)))


def step_of_a_cascade(gpus: FakeGpus, distribution: Distribution) -> Record:
    drafter = CascadeDrafter(builders.small("cuda:0", **builders.as_draft("cuda:0")), NgramDrafter(1))
    drafter.set_distribution(distribution)
    drafter.open([*PROMPT, *PROMPT], 200)
    root = Node(None, PROMPT[-1], 2 * len(PROMPT) - 1, 1.0, 1.0)
    return measured(gpus, lambda: drafter.step([drafter], [Expansion(root, [root], room=5)]))


def step_of_a_tree(gpus: FakeGpus, distribution: Distribution) -> Record:
    draft = TreeDraft(builders.small("cuda:0", **builders.as_draft("cuda:0")))
    draft.open(PROMPT, 200, distribution)
    return measured(gpus, lambda: draft.step(8))


SCORED = {"logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize(
    ("step", "distribution", "replays", "waits", "wanted"),
    [
        (pass_of_the_target, TEMPERATURE, 1, 1, {}),
        (pass_of_the_target, PENALTY, 1, 1, {}),
        (pass_of_the_target, GREEDY, 1, 1, SCORED),
        (pass_of_the_target, RATIO_TEST, 1, 2, {}),
        (pass_of_the_target, RATIO_TEST, 1, 3, SCORED),
        (step_of_a_chain, FILTERS, 4, 1, {}),
        (step_of_a_cascade, TEMPERATURE, 1, 1, {}),
        (step_of_a_tree, FILTERS, 1, 1, {}),
    ],
)
def test_a_step_waits_seldom_and_with_a_deadline_and_copies_few_bytes(
    step: Callable[..., Record], distribution: Distribution, replays: int, waits: int, wanted: dict[str, Any]
) -> None:
    with fake_cuda(values=True) as gpus:
        part = step(gpus, distribution, **wanted)
    assert stops(part) == (waits, 0)  # a blocking copy has no deadline
    assert len(part.replays) == replays
    assert part.bytes_out <= 4096


def test_a_draw_waits_with_a_deadline() -> None:
    with fake_cuda(values=True) as gpus:
        assert stops(step_of_a_chain(gpus, RATIO_TEST)) == (2 * 4, 0)


def test_a_chain_computes_one_step_for_each_token_and_waits_for_four() -> None:
    steps, waits, wanted, path = [], [], (1, 3, 4, 5, 8), list[int]()
    with fake_cuda(values=True) as gpus:
        drafter = ModelDrafter(builders.small("cuda:0", **builders.as_draft("cuda:0")))
        drafter.open(PROMPT, 200)
        for number in wanted:
            with gpus.recorded() as part:
                path += propose(drafter, number, path)
            attended = [kernel for kernel in part.kernels if "attend_rows" in kernel.name]
            steps.append(len(attended) / 2)  # layers
            waits.append(stops(part))
    assert steps == [*wanted]
    assert waits == [(1, 0)] * 3 + [(2, 0)] * 2


def test_chains_of_several_sequences_share_graphs_and_replays_at_a_temperature() -> None:
    with fake_cuda(values=True) as gpus:
        model = builders.small("cuda:0", **builders.as_draft("cuda:0"))
        drafters = [ModelDrafter(model, cache=cache) for cache in model.new_caches(2, 200)]
        # Of one sequence and of all: seven samplers, one and 16 rows, and three steps of three of them.
        assert len(gpus.record.captures) == 2 * (7 * 2 + 3 * 3)
        for drafter in drafters:
            drafter.set_distribution(TEMPERATURE)
            drafter.open(PROMPT, 200)
        paths: list[list[int]] = [[], []]

        def step() -> None:
            made = propose_together(drafters, paths, 4)
            paths[:] = [[*path, *tokens] for path, tokens in zip(paths, made, strict=True)]

        part = measured(gpus, step)
    assert stops(part) == (1, 0)
    assert len(part.replays) == 4


Load = Callable[[str], Any]


@pytest.fixture(params=["medusa", "dflash"])
def load_blocks(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Loads a drafter that scores blocks onto a device."""
    kind = str(request.param)
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=False))
    folder = save_medusa(tmp_path / kind, medusa_weights()) if kind == "medusa" else save_dflash(tmp_path / kind)
    return lambda device: load_published(folder, tmp_path, replace(OPTIONS, device=device), kind)


def test_scoring_a_block_never_makes_the_host_wait(load_blocks: Load) -> None:
    expected = load_blocks("cpu")
    features = random(9, expected.feature_width, seed=1)

    def scored(state: DFlashState | MedusaState) -> torch.Tensor:
        state.take(0, features[:6])
        state.take(6, features[6:])
        return state.score(9, 5)

    with fake_cuda(values=True) as gpus:
        state = load_blocks("cuda:0").new_state()
        scored(state)
        with gpus.recorded() as part:
            scores = scored(state)
        assert stops(part) == (0, 0)
        assert part.copies
        torch.testing.assert_close(scores.cpu(), scored(expected.new_state()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fan_out", [1, 4])
def test_guesses_from_a_block_wait_with_a_deadline(load_blocks: Load, fan_out: int) -> None:
    with fake_cuda(values=True) as gpus:
        drafter = BlockDrafter(load_blocks("cuda:0"))
        drafter.open(PROMPT[:10], 60, fan_out)
        drafter.take_features(0, random(9, drafter._model.feature_width, seed=1))
        root = Node(None, PROMPT[9], 9, 1.0, 1.0)
        with gpus.recorded() as part:
            assert drafter.expand(root, [root], room=2)
    assert stops(part) == (1 + 2 // fan_out + fan_out // 4, 0)


@pytest.mark.parametrize("sort", ["prefill", "wipe", "measure", "extend"])
def test_nothing_that_is_asked_beside_passes_waits_without_a_deadline(sort: str) -> None:
    with fake_cuda(values=True) as gpus:
        model = builders.small("cuda:0", capture=builders.capture_for("cuda:0", cuda_graphs=False))
        model.output_ids = torch.arange(model.vocab_size).to("cuda:0")
        cache = model.new_cache(60)
        model.prefill(PROMPT, cache)
        forward(model, [1, 2, 3], cache, parents=[0, 0])
        model.keep([0, 2], cache)
        model.sampling_state(cache)  # which is made at the start
        work: dict[str, Callable[[], object]] = {
            "prefill": lambda: model.prefill([4, 5], cache),
            "wipe": lambda: model.wipe(cache),
            "measure": lambda: measure_width_invariance(model, PROMPT, 12),
            "extend": lambda: extend(model, [4], cache, 3),
        }
        with gpus.recorded() as part:
            work[sort]()
    assert part.copies
    assert not part.blocking_copies


def test_a_pass_that_is_not_captured_stops_the_host_once() -> None:
    with fake_cuda(values=True) as gpus:
        model = builders.small("cuda:0", capture=builders.capture_for("cuda:0", cuda_graphs=False))
        target = Target(model)
        target.open(PROMPT)
        target.verify(())
        with gpus.recorded() as part:
            target.verify((1, 2, 3))
    assert sum(stops(part)) == 1


# Other threads run while a worker waits, and the wait has a deadline

PATIENCE_SECONDS = 60.0


@pytest.mark.usefixtures("threads_switch_only_when_one_waits")
def test_other_threads_run_while_the_host_waits_for_the_device() -> None:
    """A query of an event would block them. Here the device is done once another thread has run."""
    gate, has_run, gave_up = threading.Lock(), threading.Lock(), []
    gate.acquire()
    has_run.acquire()

    def other_thread() -> None:
        gate.acquire()
        has_run.release()

    def is_finished() -> bool:
        if gate.locked() and not gave_up:
            gave_up.append(time.monotonic() + PATIENCE_SECONDS)
            gate.release()
        if time.monotonic() > gave_up[0]:
            gave_up.append(0.0)
            return True
        return not has_run.locked()

    with fake_cuda() as gpus:
        target = Target(builders.target("cuda:0", max_model_len=256))
        target.open(PROMPT)
        other = threading.Thread(target=other_thread)
        other.start()
        gpus.is_finished = is_finished
        target.verify(())
    other.join()
    assert len(gave_up) == 1


def test_a_device_that_never_finishes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, skipped = time.monotonic, [0.0]

    def never() -> bool:
        skipped[0] += 10.0  # seconds, as the host sees them
        assert skipped[0] < 3600, "no deadline"
        return False

    with fake_cuda() as gpus:
        target = Target(builders.target("cuda:0", max_model_len=256))
        target.open(PROMPT)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + skipped[0])
        gpus.is_finished = never
        with pytest.raises(DeviceError, match="did not finish"):
            target.verify(())
