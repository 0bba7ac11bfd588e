"""A draft on two ranks: the tokens of plain decoding, and a draft again after the loss of one. All are threads here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from models import tiny
from runtime.pair import KeepingRecorder

from amusd.config import DecodingConfig, DrafterConfig, HardwareConfig, RunConfig, SamplingParams, TargetConfig
from amusd.engine import Engine
from amusd.errors import PeerError, UnsupportedModelError
from amusd.models import ranks
from amusd.models.cached_model import CachedModel
from amusd.models.huggingface import load_model
from amusd.models.rank_commands import RankCommand
from amusd.models.ranks import Follower
from amusd.runtime.placement import RoleRank, in_role, rank_layout
from amusd.runtime.startup import make_leader, run_follower, serve_draft
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Rendezvous
from amusd.types import Mode, Role

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a shared memory link is Linux's")

DEADLINE_SECONDS = 30.0
PROMPT = tuple(range(40, 60))
CPU = HardwareConfig(devices=("cpu", "cpu"), pin_cores=False)
SCHEDULES = {
    "synchronous": DecodingConfig(mode=Mode.SYNCHRONOUS, num_speculative_tokens=3),
    "branching": DecodingConfig(policy="branching", max_wait_passes=1e4, max_silence_seconds=5.0),
    "chain": DecodingConfig(policy="chain"),
    "auto": DecodingConfig(),
}
PATIENT = ("synchronous", "branching")
"""With these the target waits for the draft, which is slower than this target."""
SAMPLING = {
    "greedy": SamplingParams(max_new_tokens=40, ignore_eos=True),
    "matching": SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0.8, seed=7),
}


@pytest.fixture(scope="module", autouse=True)
def _one_load_at_a_time() -> Iterator[None]:
    """transformers changes torch for the time that it loads a model: in one thread only."""
    loading = threading.Lock()

    def load_alone(*arguments: Any, **options: Any) -> CachedModel:
        with loading:
            return load_model(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amusd.models.loading.load_model", load_alone)
        yield


class ThreadDrafts:
    """A `DraftSource` whose drafts are two threads each."""

    def __init__(self, config: RunConfig, pool: ThreadPoolExecutor) -> None:
        self._config, self._pool = config, pool
        self._leaders: list[Future[None]] = []
        self.followers: list[Future[None]] = []

    def newest(self) -> int:
        return len(self._leaders) + (not self._leaders or self._leaders[-1].done())

    def ending(self, timeout: float, /) -> str | None:
        """Not of interest here."""

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        if rendezvous is not None:
            address: Future[str] = Future()
            self._leaders.append(self._pool.submit(self._lead, rendezvous, incarnation, address))
            arguments = (self._config.engine(), RoleRank(Role.DRAFT, 1), address.result(DEADLINE_SECONDS))
            self.followers.append(self._pool.submit(run_follower, *arguments))

    def met(self) -> None:
        pass

    def dismiss(self) -> None:
        """It ends by itself."""

    def _lead(self, rendezvous: Rendezvous, incarnation: int, address: Future[str]) -> None:
        engine = self._config.engine()
        leader = make_leader(engine, Role.DRAFT)
        assert leader is not None
        address.set_result(leader.address)
        try:
            with suppress(PeerError):  # the target has been told
                serve_draft(engine, rendezvous, Recorder("draft"), incarnation, leader)
        finally:
            leader.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny.byte_tokenizer()
    config = tiny.tiny_config("Qwen3Config", vocab_size=len(tokenizer), max_position_embeddings=512)
    tiny.save_checkpoint(folder, config, tokenizer)
    return folder


@contextmanager
def engine_over(checkpoint: Path) -> Iterator[tuple[Engine, ThreadDrafts]]:
    """A target on one rank, and the same model as its draft on two."""
    config = RunConfig(
        target=TargetConfig(kind="hf", model=str(checkpoint), dtype="float32"),
        drafter=DrafterConfig(kind="hf", model=str(checkpoint), dtype="float32"),
        draft_tensor_parallel_size=2,
        hardware=CPU,
        max_model_len=256,
        startup_timeout_seconds=DEADLINE_SECONDS,
    )
    with ThreadPoolExecutor() as pool:
        drafts = ThreadDrafts(config, pool)
        with Engine.connect(config.engine(), drafts, KeepingRecorder("target")) as engine:
            yield engine, drafts


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Engine]:
    with engine_over(checkpoint) as (engine, drafts):
        yield engine
    assert [follower.exception(DEADLINE_SECONDS) for follower in drafts.followers] == [None], "it ends with its leader"


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_tokens_are_those_of_plain_decoding(pair: Engine, schedule: str, sampling: str) -> None:
    params = SAMPLING[sampling]
    expected = pair.generate(PROMPT, params, decoding=DecodingConfig(mode=Mode.AUTOREGRESSIVE)).token_ids
    assert len(set(expected)) > 10, "this answer is too simple to tell models apart"
    generation = pair.generate(PROMPT, params, decoding=SCHEDULES[schedule])
    assert generation.token_ids == expected
    assert pair.draft_losses == ()
    if schedule in PATIENT:
        assert generation.metrics.num_accepted > 1, "the ranks of the draft compute something else than their model"


def test_a_draft_that_loses_a_rank_is_replaced_as_a_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = threading.Event()

    class Fragile(Follower):
        """The first one leaves without a word at its twelfth command."""

        def commands(self) -> Iterator[RankCommand]:
            for number, command in enumerate(super().commands(), start=1):
                if number == 12 and not lost.is_set():
                    lost.set()
                    return
                yield command

    monkeypatch.setattr("amusd.runtime.startup.Follower", Fragile)
    monkeypatch.setattr(ranks, "_REASON_SECONDS", 0.2)
    params = SAMPLING["greedy"]
    with engine_over(checkpoint) as (engine, drafts):
        expected = engine.generate(PROMPT, params, decoding=DecodingConfig(mode=Mode.AUTOREGRESSIVE)).token_ids
        for _ in range(200):
            generation = engine.generate(PROMPT, params, decoding=SCHEDULES["synchronous"])
            assert generation.token_ids == expected
            if engine.num_draft_restarts and generation.metrics.num_accepted:
                break
        assert engine.num_draft_restarts == 1
        assert len(engine.draft_losses) == 1
        assert engine.draft_losses[0].endswith("RankLostError: rank 1 of the draft is gone")
    assert [follower.exception(DEADLINE_SECONDS) for follower in drafts.followers] == [None, None]


def test_more_ranks_than_key_heads_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    tiny.tiny_config("Qwen3Config").save_pretrained(tmp_path)  # there are no weights at all
    config = RunConfig(
        drafter=DrafterConfig(kind="hf", model=str(tmp_path)), draft_tensor_parallel_size=3, hardware=CPU
    )
    with pytest.raises(UnsupportedModelError, match=r"^draft_tensor_parallel_size=3: .* allowed: 1 to 2$"):
        make_leader(config.engine(), Role.DRAFT)


def test_the_first_rank_of_the_world_leads_the_target_and_the_last_the_draft() -> None:
    config = RunConfig(target_tensor_parallel_size=2, draft_tensor_parallel_size=3).engine()
    assert [str(entry) for entry in rank_layout(config)] == [
        "rank 0 of the target",
        "rank 1 of the target",
        "rank 2 of the draft",
        "rank 1 of the draft",
        "rank 0 of the draft",
    ]
    assert in_role("abcde", config, Role.TARGET) == ["a", "b"]
    assert in_role("abcde", config, Role.DRAFT) == ["e", "d", "c"]
