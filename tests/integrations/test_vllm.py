"""vLLM's proposer with a runner that keeps rows as vLLM does, and a draft that steps when a test says so."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from chains import propose
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import refusal
from memory_link import MemoryTransport, memory_pair
from runtime.gpu_doubles import pretend_gpus
from runtime.table_tree import TableTreeDrafter
from table_model import TableModel

from amusd.config import DrafterConfig
from amusd.drafters.model import ModelDrafter
from amusd.errors import ConfigError
from amusd.integrations import vllm
from amusd.integrations.vllm import QUIET_SECONDS, AsyncProposer, Batch, ProposerConfig
from amusd.protocol.messages import DraftHello
from amusd.runtime.connection import Connection
from amusd.runtime.cores import allowed_cores
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.patience import SILENCES
from amusd.simulation.clock import WorkerClock
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from tests.launch.test_draft import Server
from tests.warm import Popen

CAPACITY, VOCAB_SIZE, NUM_CANDIDATES, MAX_NUM_SEQS = 40, 6, 4, 3
SILENT_SECONDS = SILENCES * QUIET_SECONDS
MODEL = TableModel(VOCAB_SIZE, seed=3, max_length=CAPACITY)
STRANGER = TableModel(VOCAB_SIZE, seed=5, max_length=CAPACITY)
PROMPTS = ((1, 2, 3), (1, 2, 3, 4), (5,), (1, 2, 3), (0, 5, 5, 5, 5), (4, 0, 3))


def continuation(prompt: Sequence[int]) -> list[int]:
    alone = ModelDrafter(MODEL)
    alone.open(prompt, CAPACITY)
    return [*prompt, *propose(alone, CAPACITY - len(prompt))]


TEXTS = {prompt: continuation(prompt) for prompt in PROMPTS}


class Drafts:
    """Incarnations of a draft in this thread, over a link of real frames; `let(n)` runs up to n steps of the draft."""

    process = is_here = can_repeat = True
    chains: tuple[str, ...] = ()

    def __init__(self, model: TableModel = MODEL) -> None:
        self._model = model
        self._incarnation = 0
        self.is_there = True
        self.worker: DraftWorker | None = None
        self.its: MemoryTransport | None = None

    def start(self) -> bool:
        self.worker = self.its = None
        return True

    def connect(self) -> Transport | None:
        if not self.is_there:
            return None
        self._incarnation += 1
        own, self.its = memory_pair()
        drafters = {"hf": [TableTreeDrafter(self._model) for _ in range(MAX_NUM_SEQS)]}
        self.worker = DraftWorker(self.its, drafters, self._incarnation, Recorder("draft"))
        self.its.send(DraftHello(self._incarnation, "", ("hf",), self.chains, 7))
        return own

    def ended(self, _timeout: float, /) -> None:
        return None

    def drop(self) -> None:
        pass

    def stop(self) -> None:
        self.is_there = False

    def let(self, number: int) -> None:
        for _ in range(number):
            if self.worker is not None and (self.worker.working or self.num_unread):
                self.worker.step()

    @property
    def num_unread(self) -> int:
        return 0 if self.its is None else len(self.its._incoming.frames)

    @property
    def num_open(self) -> int:
        assert self.worker is not None
        return len(self.worker._sequences)

    def kill(self) -> None:
        if self.its is not None:
            self.its.kill()
            self.worker = None


class Runner:
    """Rows of tokens as vLLM's model runner has them, verified greedily against the target's own text."""

    def __init__(
        self, *prompts: tuple[int, ...], drafts: Drafts | None = None, capacity: int = CAPACITY, **settings: Any
    ) -> None:
        self.drafts = drafts = drafts or Drafts()
        self.seconds = 0.0
        settings = {"max_num_seqs": MAX_NUM_SEQS, **settings}
        config = ProposerConfig(drafter=DrafterConfig(kind="hf", model="."), **settings)
        recorder = Recorder("target", clock=WorkerClock(lambda: round(self.seconds * 1e9)))
        client = DraftClient(recorder, Connection(source=drafts), hello_seconds=0.0)
        self.batch = Batch(client, config, VOCAB_SIZE, capacity, NUM_CANDIDATES)
        self.ids = np.zeros((8, CAPACITY), np.int32)
        self.rows: list[tuple[int, ...]] = []
        self.lengths: list[int] = []
        self.proposed: list[list[int]] = []
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: tuple[int, ...]) -> None:
        self._write(len(self.rows), prompt)
        self.rows.append(prompt)
        self.lengths.append(len(prompt))
        self.proposed.append([])

    def remove(self, index: int) -> tuple[tuple[int, ...], int]:
        """Take a row out; the last one moves to its place, as vLLM condenses a batch."""
        gone, last = (self.rows[index], self.lengths[index]), len(self.rows) - 1
        self.ids[index] = self.ids[last]
        for values in (self.rows, self.lengths, self.proposed):
            values[index] = values[last]  # type: ignore[index,call-overload]
            values.pop()
        return gone

    def swap(self, one: int, other: int) -> None:
        self.ids[[one, other]] = self.ids[[other, one]]
        for values in (self.rows, self.lengths, self.proposed):
            values[one], values[other] = values[other], values[one]  # type: ignore[index,call-overload]

    def run(self, prefilling: frozenset[int] = frozenset()) -> list[int]:
        """A pass; returns how many candidates of each row were right. Rows at their end leave before it."""
        for index in reversed(range(len(self.rows))):
            if self.lengths[index] >= CAPACITY:
                self.remove(index)
        num_right, num_new = [], []
        for index, prompt in enumerate(self.rows):
            left = TEXTS[prompt][self.lengths[index] :]
            agree = [one == other for one, other in zip(self.proposed[index], left[:-1], strict=False)]
            right = [*agree, False].index(False)
            new = [] if index in prefilling and self.lengths[index] == len(prompt) else left[: right + 1]
            self._write(index, new, self.lengths[index])
            self.lengths[index] += len(new)
            num_right.append(right)
            num_new.append(len(new))
        texts = [self.ids[index, :length] for index, length in enumerate(self.lengths)]
        self.proposed = self.batch.propose(texts, num_new)
        assert len(self.proposed) == len(self.rows)
        for candidates, new in zip(self.proposed, num_new, strict=True):
            assert len(candidates) <= (NUM_CANDIDATES if new else 0)
        return num_right

    def rounds(self, number: int = 1, steps: int = 9) -> None:
        """Run `number` passes, each followed by steps of the draft, then one more pass."""
        for _ in range(number):
            self.run()
            self.drafts.let(steps)
        self.run()

    def _write(self, index: int, token_ids: Sequence[int], start: int = 0) -> None:
        self.ids[index, start : start + len(token_ids)] = token_ids


ACTIONS = st.tuples(
    st.sampled_from(["pass", "pass", "pass", "add", "remove", "leave", "return", "swap", "kill", "away", "mute"]),
    st.integers(0, 9),
    st.integers(0, 12),
)


@settings(max_examples=60)
@given(
    st.lists(ACTIONS, max_size=40), st.sampled_from([MODEL, STRANGER]), st.sampled_from([1, 5]), st.sampled_from([2, 9])
)
def test_rows_may_come_move_leave_and_return_while_drafts_die_or_fall_silent(
    actions: list[tuple[str, int, int]], model: TableModel, rows_per_step: int, most: int
) -> None:
    runner = Runner(PROMPTS[0], drafts=Drafts(model), rows_per_step=rows_per_step, draft_up_to_rows=most)
    away = list[Any]()
    for action, number, steps in actions:
        index = number % max(1, len(runner.rows))
        runner.drafts.let(steps)
        if action == "add" and len(runner.rows) < 5:
            runner.add(PROMPTS[number % len(PROMPTS)])
        elif action == "remove" and runner.rows:
            runner.remove(index)
        elif action == "leave" and runner.rows:
            away.append(runner.remove(index))
        elif action == "return" and away and len(runner.rows) < 5:
            prompt, length = away.pop()
            runner.add(prompt)
            runner.lengths[-1] = length
            runner._write(len(runner.rows) - 1, TEXTS[prompt][:length])
        elif action == "swap" and runner.rows:
            runner.swap(index, 0)
        elif action == "kill":
            runner.drafts.kill()
        elif action == "away":
            runner.drafts.is_there = not runner.drafts.is_there
        elif action == "mute":
            runner.seconds += 2 * SILENT_SECONDS
        right = runner.run(frozenset({number}))
        if model is MODEL:  # what arrives and still fits is right
            assert all(
                candidates == TEXTS[prompt][length : length + len(candidates)]
                for candidates, prompt, length in zip(runner.proposed, runner.rows, runner.lengths, strict=True)
            )
        assert len(right) == len(runner.rows)
        if runner.drafts.worker is not None:
            runner.drafts.let(20)
            assert runner.drafts.num_open <= MAX_NUM_SEQS


def test_candidates_that_arrive_during_a_pass_are_proposed_after_it() -> None:
    runner = Runner(PROMPTS[0])
    runner.batch.connection._restarts._num_fruitless = 1
    runner.run()
    assert runner.proposed == [[]]  # the draft has not begun
    runner.drafts.let(9)
    assert runner.run() == [0]
    assert len(runner.proposed[0]) == NUM_CANDIDATES
    assert runner.run() == [NUM_CANDIDATES]  # and while it verified them, the draft was not let
    assert runner.batch.counts.accepted == NUM_CANDIDATES
    assert runner.batch.counts.rows_without == 1
    assert runner.batch.connection._restarts._num_fruitless == 0


@pytest.mark.parametrize(("rows_per_step", "is_ready"), [(1, False), (VOCAB_SIZE, True)])
def test_a_tree_has_a_candidate_ready_after_a_token_that_the_draft_did_not_expect(
    rows_per_step: int, is_ready: bool
) -> None:
    runner = Runner(PROMPTS[0], drafts=Drafts(STRANGER), rows_per_step=rows_per_step)
    runner.rounds()
    assert bool(runner.proposed[0]) == is_ready


def test_candidates_below_the_chance_asked_for_are_not_proposed() -> None:
    for min_chance, most in ((0.0, NUM_CANDIDATES), (1.0, 0)):
        runner = Runner(PROMPTS[0], rows_per_step=VOCAB_SIZE, min_chance=min_chance)
        runner.rounds()
        assert len(runner.proposed[0]) == most


def test_a_row_keeps_its_sequence_wherever_it_moves_and_others_are_closed() -> None:
    runner = Runner(*PROMPTS[:3])
    runner.run()
    runner.drafts.let(40)
    assert runner.drafts.num_open == 3
    runner.remove(0)
    runner.swap(0, 1)
    runner.run()
    runner.drafts.let(2)
    assert runner.drafts.num_open == 2
    assert all(runner.proposed)  # which a sequence that begins anew would not have
    runner.add(PROMPTS[4])
    runner.add(PROMPTS[3])
    runner.run()
    assert len(runner.proposed[0]) == len(runner.proposed[1]) == NUM_CANDIDATES
    runner.drafts.let(40)
    assert runner.drafts.num_open == MAX_NUM_SEQS
    runner.run()
    assert [bool(candidates) for candidates in runner.proposed] == [True, True, True, False]  # there is no room for it


def test_nothing_is_sent_while_the_batch_is_large_and_drafting_goes_on_when_it_has_shrunk() -> None:
    runner = Runner(*PROMPTS[:2], draft_up_to_rows=2)
    runner.run()
    runner.drafts.let(40)
    runner.run()
    assert all(runner.proposed)
    runner.add(PROMPTS[2])
    runner.drafts.let(40)
    num_accepted = sum(runner.run())
    for _ in range(3):
        runner.drafts.let(9)
        assert runner.drafts.num_unread == 0
        assert runner.proposed == [[], [], []]
        runner.run()
    assert runner.batch.counts.accepted == num_accepted  # by the first pass of the large batch
    assert runner.batch.counts.rows == 4
    runner.remove(1)
    for _ in range(2):
        runner.run()
        runner.drafts.let(40)
    assert all(runner.proposed)
    assert runner.drafts.num_open == 2


def test_a_row_beyond_the_longest_is_left_alone_and_makes_room() -> None:
    runner = Runner(PROMPTS[0], PROMPTS[4], capacity=len(PROMPTS[4]), max_num_seqs=1)
    runner.run()
    assert runner.lengths == [4, 6]
    runner.drafts.let(9)
    runner.run()
    assert [bool(candidates) for candidates in runner.proposed] == [False, False]  # the first one is at its end
    runner.run()
    runner.add(PROMPTS[2])
    for _ in range(2):
        runner.run()
        runner.drafts.let(9)
    assert [bool(candidates) for candidates in runner.proposed] == [False, False, True]
    assert runner.drafts.num_open == 1


def test_a_server_that_runs_for_weeks_keeps_no_events() -> None:
    runner = Runner(PROMPTS[0])
    runner.rounds(3)
    assert runner.batch.client.recorder._recorded == []


def test_tokens_that_were_no_candidates_count_as_none() -> None:
    runner = Runner(PROMPTS[0])
    text = np.array(TEXTS[PROMPTS[0]], np.int32)
    for length, num_new in ((4, 1), (8, 4), (10, 2)):
        runner.batch.propose([text[:length]], [num_new])
    assert runner.batch.counts.accepted == 0


def test_a_row_whose_last_token_alone_is_that_of_another_begins_anew() -> None:
    runner = Runner(PROMPTS[0])
    runner.run(frozenset({0}))
    runner.remove(0)
    runner.add(PROMPTS[5])
    runner.rounds(2)
    [candidates], [length] = runner.proposed, runner.lengths
    assert candidates == TEXTS[PROMPTS[5]][length : length + NUM_CANDIDATES]


def test_rows_that_cannot_be_told_apart_share_nothing() -> None:
    runner = Runner(PROMPTS[0], PROMPTS[0])
    for _ in range(8):
        runner.run()
        runner.drafts.let(8)
    assert all(runner.proposed)
    assert runner.drafts.num_open == 2


def test_a_prompt_in_chunks_has_the_draft_begin_but_gets_no_candidates() -> None:
    runner = Runner(PROMPTS[0])
    runner.run(frozenset({0}))
    runner.drafts.let(9)
    runner.run(frozenset({0}))
    assert runner.proposed == [[]]
    runner.run()
    assert len(runner.proposed[0]) == NUM_CANDIDATES


def test_a_killed_draft_costs_candidates_until_the_next_one_has_the_rows() -> None:
    runner = Runner(PROMPTS[0])
    runner.run()
    runner.drafts.let(9)
    runner.drafts.kill()
    runner.drafts.is_there = False
    runner.run()
    assert runner.proposed == [[]]
    assert len(runner.batch.connection.losses) == runner.batch.counts.losses == 1
    runner.run()
    runner.drafts.is_there = True
    runner.rounds()
    assert len(runner.proposed[0]) == NUM_CANDIDATES


@pytest.mark.parametrize("act", ["receive", "send"])
def test_a_draft_whose_link_breaks_in_any_way_is_lost_and_vllm_goes_on(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(PROMPTS[0])
    assert runner.batch.propose([], []) == []
    monkeypatch.setattr(runner.batch.connection.link, act, Mock(side_effect=OSError("no buffer space")))
    for prompt in PROMPTS[2:4]:
        runner.add(prompt)
    runner.drafts.is_there = False
    for _ in range(2):
        runner.run()
    assert runner.batch.connection.losses == ["no buffer space"]
    runner.seconds += 2 * SILENT_SECONDS
    runner.run()
    runner.drafts.is_there = True
    runner.run()
    runner.drafts.let(9)
    assert runner.drafts.num_open == len(runner.batch.client._sequences) == 3  # nothing is left of the lost one
    assert len(runner.batch.connection.losses) == 1


def test_nothing_is_proposed_once_the_draft_is_closed() -> None:
    runner = Runner(*PROMPTS[:2])
    runner.run()
    runner.drafts.let(9)
    runner.batch.connection.shut_down()
    runner.remove(1)
    runner.run()
    assert runner.proposed == [[]]


def test_a_mute_draft_is_told_less_then_replaced() -> None:
    runner = Runner(PROMPTS[0])
    runner.run()
    num_told = [runner.drafts.num_unread]
    for seconds in (QUIET_SECONDS / 2, QUIET_SECONDS, SILENT_SECONDS - 2 * QUIET_SECONDS, 2 * QUIET_SECONDS):
        assert runner.batch.connection.losses == []
        runner.seconds += seconds
        runner.run()
        num_told.append(runner.drafts.num_unread)
    assert num_told[:4] == [2, 3, 5, 7]  # the hello; then its opening and a verdict, after 1 s, 2 s, 4 s and so on
    assert len(runner.batch.connection.losses) == 1
    assert "said nothing" in runner.batch.connection.losses[0]
    runner.rounds()
    assert len(runner.proposed[0]) == NUM_CANDIDATES


def test_a_late_draft_is_kept_and_told_all_at_once() -> None:
    runner = Runner(PROMPTS[0])
    for _ in range(6):
        runner.run()
        runner.seconds += QUIET_SECONDS
    runner.drafts.let(9)
    runner.run()  # receives its hello, and sends it the text
    runner.drafts.let(9)
    runner.run()
    assert len(runner.proposed[0]) == NUM_CANDIDATES
    assert runner.batch.connection.losses == []


class WaitedFor(Drafts):
    """A draft that makes a step each 4 ms while the runner waits for its link."""

    runner: Runner

    def connect(self) -> Transport | None:
        link = super().connect()
        assert link is not None
        receive = link.receive

        def wait(timeout: float) -> Any:
            if timeout > 0:
                self.runner.seconds += min(timeout, 0.004)
                if timeout >= 0.004:
                    self.let(1)
            return receive(0.0)

        link.receive = wait  # type: ignore[method-assign]
        return link


@pytest.mark.parametrize(
    ("wait_ms", "min_candidates", "num_proposed"), [(0, 1, 0), (3, 1, 0), (9, 1, 1), (9, 3, 2), (99, 3, 3), (99, 9, 4)]
)
def test_a_pass_waits_for_candidates_within_its_limit(wait_ms: int, min_candidates: int, num_proposed: int) -> None:
    drafts = WaitedFor()
    drafts.runner = runner = Runner(PROMPTS[0], drafts=drafts, wait_ms=wait_ms, min_candidates=min_candidates)
    runner.run()
    assert len(runner.proposed[0]) == num_proposed
    assert runner.seconds <= wait_ms / 1e3 + 1e-9


# With a draft's process


def parallel(**given: Any) -> Any:
    default = {"rank": 0, "tensor_parallel_size": 1, "local_world_size": 1, "pipeline_parallel_size": 1}
    default |= {"assigned_physical_gpu_ids": None, "elastic_ep_max_dp_size": 1}
    return SimpleNamespace(**default | given)


def config_of(folder: Path, **additional: Any) -> Any:
    model = SimpleNamespace(model=str(folder / "target"), max_model_len=256, get_vocab_size=lambda: 260)
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel(),
        compilation_config=SimpleNamespace(cudagraph_mode=Mock(separate_routine=lambda: False)),
        speculative_config=SimpleNamespace(num_speculative_tokens=NUM_CANDIDATES),
        device_config=SimpleNamespace(device_type="cpu"),
        additional_config={"amusd": additional},
    )


PATIENT = {"wait_ms": 60_000, "min_chance": 0.0}


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the proposer wait long for a draft that gets no processor for a while."""
    monkeypatch.setattr(vllm, "QUIET_SECONDS", 60.0)


@pytest.fixture
def proposer(small_models: Path, monkeypatch: pytest.MonkeyPatch, patience: None) -> Iterator[AsyncProposer]:
    monkeypatch.setattr("amusd.child.subprocess.Popen", Popen)
    drafter = {"kind": "hf", "model": str(small_models / "draft"), "dtype": "float32"}
    found = AsyncProposer(config_of(small_models, drafter=drafter, cores=allowed_cores()[-1:], **PATIENT))
    yield found
    found.close()
    found.close()


def ask(proposer: AsyncProposer, texts: Sequence[Sequence[int]], num_new: int = 1) -> list[list[int]]:
    ids = np.zeros((4, 256), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts] + [0] * (4 - len(texts)), np.int32)
    return proposer.propose([[0] * num_new for _ in texts], lengths, ids, slot_mappings=None)


def test_a_process_drafts_and_a_killed_one_is_replaced(proposer: AsyncProposer) -> None:
    texts = [[7, 8, 9], [9, 9]]
    first = ask(proposer, texts)
    assert all(first)
    assert proposer.batch is not None
    process = psutil.Process(proposer.batch.connection.pid)
    if sys.platform.startswith("linux"):
        assert process.cpu_affinity() == allowed_cores()[-1:]
    process.kill()
    deadline = time.monotonic() + 60
    while not (all(again := ask(proposer, texts)) and proposer.counts["losses"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [one[0] for one in again] == [one[0] for one in first]
    assert proposer.counts["losses"] == 1


def test_lists_are_of_one_length_where_vllm_has_full_graphs_of_decoding_passes(proposer: AsyncProposer) -> None:
    texts, own = [[7, 8, 9], [9, 9]], list[list[list[int]]]()
    assert proposer.batch is not None
    propose = proposer.batch.propose
    proposer.batch.propose = lambda *rows: own.append(propose(*rows)) or own[-1]  # type: ignore[func-returns-value]
    assert ask(proposer, texts) == own[0]
    assert all(own[0])
    proposer.compilation.cudagraph_mode.separate_routine = lambda: True
    padded = ask(proposer, texts)
    assert padded == [[*candidates, *[0] * (NUM_CANDIDATES - len(candidates))] for candidates in own[1]]
    assert ask(proposer, texts, num_new=0) == [[], []]
    assert proposer.counts["proposed"] == sum(len(candidates) for found in own for candidates in found)
    proposer.batch.settings = dataclasses.replace(proposer.batch.settings, draft_up_to_rows=1)
    assert ask(proposer, texts) == [[], []]


def test_a_draft_of_another_place_is_found_with_its_keys_and_refused_with_others(
    small_models: Path, small_pair: list[str], tmp_path: Path, patience: None
) -> None:
    server = Server(tmp_path, small_pair)
    server.await_line("draft: listens at")
    drafter = {"kind": "hf", "address": server.address}
    settings = {"drafter": drafter, **PATIENT}
    with pytest.raises(ConfigError, match=r"both ends need transport\.keys"):
        AsyncProposer(config_of(small_models, **settings, keys=str(tmp_path / "other")))
    proposer = AsyncProposer(config_of(small_models, **settings, keys=str(tmp_path / "keys")))
    assert all(ask(proposer, [[7, 8, 9], [9, 9]]))
    proposer.close()
    server.process.terminate()
    server.process.wait(60)


@pytest.mark.parametrize(
    ("visible", "given", "device"),
    [
        (None, {}, "cuda:1"),
        (None, {"tensor_parallel_size": 2, "local_world_size": 2}, "cuda:2"),
        (None, {"elastic_ep_max_dp_size": 3}, "cuda:3"),  # all that an engine of one data-parallel rank knows
        (None, {"assigned_physical_gpu_ids": [0, 1, 3], "elastic_ep_max_dp_size": 3}, "cuda:2"),
        ("6,2,4", {"assigned_physical_gpu_ids": [6, 4], "local_world_size": 2}, "cuda:1"),
        ("GPU-1,GPU-2", {}, "cuda:1"),
        ("GPU-1,GPU-2", {"assigned_physical_gpu_ids": [0]}, "vLLM has 1 ranks here, and sees 2 GPUs"),
        (None, {"local_world_size": 4}, "vLLM has 4 ranks here, and sees 4 GPUs; let it see another"),
        (None, {"assigned_physical_gpu_ids": [0], "elastic_ep_max_dp_size": 2}, "or name the draft's device"),
    ],
)
def test_the_draft_is_on_the_first_gpu_that_no_rank_of_vllm_has(
    visible: str | None, given: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pretend_gpus(monkeypatch, 4)
    config = config_of(tmp_path)
    config.device_config.device_type, config.parallel_config = "cuda", parallel(**given)
    settings = ProposerConfig(drafter=DrafterConfig(kind="hf", model="."))
    if device.startswith("cuda"):
        assert settings.engine(config).hardware.devices == ("cpu", device)
        return
    assert device in refusal(lambda: settings.engine(config))


@pytest.mark.parametrize(
    ("additional", "said"),
    [
        ({}, "amusd.drafter"),
        ({"drafter": {"kind": "eagle", "model": "somewhere"}}, "hidden states"),
        ({"drafter": {"kind": "ngram"}, "device": "cuda:99"}, "amusd.device=cuda:99"),
        ({"drafter": {"kind": "ngram"}, "device": "gpu"}, "amusd.device=gpu: expected cpu or cuda:NUMBER"),
        ({"drafter": {"kind": "ngram"}, "max_model_len": 1}, "amusd.max_model_len=1"),
        (
            {"drafter": {"kind": "hf", "address": "tcp://10.0.0.2:5"}},
            "amusd.keys=None: required for a drafter on another",
        ),
        (
            {"drafter": {"kind": "ngram"}, "cores": [0, 99_999]},
            "amusd.cores=[0, 99999]: this machine has the cores 0 to",
        ),
        ({"drafter": {"kind": "ngram"}, "wait": 3}, "amusd.wait=3: no such key"),
        ({"drafter": {"kind": "ngram"}, "wait_ms": math.inf}, "amusd.wait_ms"),
    ],
)
def test_wrong_settings_end_in_one_line(small_models: Path, additional: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: AsyncProposer(config_of(small_models, **additional)))


def test_pipeline_ranks_whose_batches_take_turns_are_refused_in_one_line(small_models: Path) -> None:
    config = config_of(small_models, drafter={"kind": "ngram"})
    config.parallel_config = parallel(pipeline_parallel_size=2)
    assert refusal(lambda: AsyncProposer(config)).startswith("pipeline_parallel_size=2: ")


def test_only_the_first_rank_of_vllm_has_a_draft(small_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "DraftSource", lambda *_args, **_options: pytest.fail("a draft was started"))
    config = config_of(small_models)
    config.parallel_config = parallel(rank=1, tensor_parallel_size=2, local_world_size=2)
    proposer = AsyncProposer(config)
    assert ask(proposer, [[1], [2]]) == [[], []]
    proposer.close()
