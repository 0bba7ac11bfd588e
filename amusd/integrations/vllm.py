"""A draft on a device of its own for vLLM: `AsyncProposer`, for `speculative_config={"method": "custom_class"}`.

After each pass vLLM shows the proposer the tokens of every row of its batch. The proposer sends new tokens to the draft
process and returns the candidates that have arrived; the draft continues while vLLM verifies them.

Rules
    V1  vLLM decides every token, by its own acceptance rule. The proposer cannot change a text.
    V2  A row has no name: it belongs to the sequence whose tokens it begins with. Sequences without a row are closed
        before new sequences are opened.
    V3  A draft that is slow, silent or lost costs candidates, never a pass: a pass waits for `wait_ms` at most, and a
        lost draft is replaced.
    V4  The draft makes a tree if the drafter can, so that candidates are at hand after most of vLLM's choices. Each row
        gets a chain: the tree's likeliest path.
    V5  While the batch has more than `draft_up_to_rows` rows, no verdicts are sent. Once the batch has shrunk, the next
        verdicts hold all tokens committed meanwhile.

This module does not import vLLM; it reads the objects that vLLM passes (checked with vLLM 0.32, model runner V1).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from amusd.checkpoints.tokenizer import load_tokenizer
from amusd.integrations.vllm_settings import ProposerConfig, settings_of
from amusd.logs import warn_once
from amusd.protocol.messages import Open
from amusd.runtime.client_sequence import ClientSequence
from amusd.runtime.connection import Connection
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_process import DraftSource
from amusd.runtime.remote_drafter import LOOKAHEAD
from amusd.tracing.recorder import Recorder

FAN_OUT = 8
"""Most candidates after a token."""
QUIET_SECONDS = 1.0
"""A draft that owes an answer for longer gets only reminders, so that its link does not fill.

After `SILENCES` times as long it counts as lost.
"""
PAD = 0
"""Token id that fills up a list of candidates; every vocabulary has it."""

Ids = npt.NDArray[np.int32]


@dataclass
class Counts:
    """Counts of rows for which vLLM asked for candidates, and of the candidates."""

    rows: int = 0
    """Rows for which vLLM asked for candidates, summed over passes of up to `draft_up_to_rows` rows."""
    rows_without: int = 0
    """Rows for which vLLM asked for candidates and got none."""
    proposed: int = 0
    """Candidates for vLLM, without padding."""
    accepted: int = 0
    """Candidates that vLLM accepted."""
    waited_seconds: float = 0.0
    losses: int = 0
    """Number of lost drafts."""


class _Row(ClientSequence):
    """A row of vLLM's batch that the draft works on."""

    text: Ids
    """The committed text that the draft was told."""
    num_proposed = 0
    """Candidates in the last pass."""

    def begins(self, text: Ids) -> bool:
        length = len(self.text)
        fits = length <= len(text) <= self.session.max_length
        return fits and self.text[-1] == text[length - 1] and np.array_equal(self.text, text[:length])


@dataclass
class Batch:
    """The rows of vLLM's batch and their sequences at the draft, pass by pass."""

    client: DraftClient
    settings: ProposerConfig
    vocab_size: int
    capacity: int
    """Longest sequence in tokens."""
    num_candidates: int
    """Most candidates of a row in a pass."""
    counts: Counts = field(default_factory=Counts)
    _rows: list[_Row | None] = field(default_factory=list)
    """By index in the last pass; None: a row without a sequence."""

    @property
    def connection(self) -> Connection:
        """The connection to the draft."""
        return self.client.connection

    def propose(self, texts: Sequence[Ids], num_new: Sequence[int]) -> list[list[int]]:
        """Candidates after each row's text, a list for each row.

        `num_new`: tokens that the last pass added to each row; 0: the prompt is not complete, so the row gets none.
        """
        self._rows = self._matched(texts)
        self._count_accepted(num_new)
        is_small = len(texts) <= self.settings.draft_up_to_rows
        found = self._drafted(texts, num_new) if is_small else [[] for _ in texts]
        for row, candidates in zip(self._rows, found, strict=True):
            if row is not None:
                row.num_proposed = len(candidates)
        return found

    def _count_accepted(self, num_new: Sequence[int]) -> None:
        rows = zip(self._rows, num_new, strict=True)
        number = sum(max(0, min(new - 1, row.num_proposed)) for row, new in rows if row is not None)
        self.counts.accepted += number
        if number:
            self.connection.on_accepted()

    def _drafted(self, texts: Sequence[Ids], num_new: Sequence[int]) -> list[list[int]]:
        if not self.client.look_for_next() and self.connection.failure is not None:
            warn_once(f"vLLM goes on without a draft: {self.connection.failure}")
        self.client.drain()  # an answer may have come during the pass: else the draft would seem silent
        self._follow(texts)
        self._await_candidates(num_new)
        self.client.end_closed(waits=False)
        found = [self._candidates(row) if new else [] for row, new in zip(self._rows, num_new, strict=True)]
        self.counts.rows += sum(map(bool, num_new))
        self.counts.rows_without += sum(not each for each, new in zip(found, num_new, strict=True) if new)
        self.counts.proposed += sum(map(len, found))
        self.counts.losses = len(self.connection.losses)
        return found

    def _candidates(self, row: _Row | None) -> list[int]:
        """The likeliest path, cut where its chance falls below `min_chance`. A chain, without weights, is not cut."""
        if row is None:
            return []
        candidates, weights = row.session.candidates, row.session.weights
        if weights:
            number = sum(chance >= self.settings.min_chance for chance in accumulate(weights, operator.mul))
            candidates = candidates[:number]
        return [*candidates[: self.num_candidates]]

    def _follow(self, texts: Sequence[Ids]) -> None:
        """Open a sequence for each new row if there is room, and send the draft the new tokens of other rows (V2)."""
        num_open = sum(row is not None for row in self._rows)
        for index, text in enumerate(texts):
            row, has_room = self._rows[index], num_open < self.settings.max_num_seqs and len(text) < self.capacity
            if row is not None and (new := text[len(row.text) :].tolist()):
                row.append(new)
                row.text = text.copy()
                self.client.send_verdict(row)
            elif row is None and has_room:
                self._rows[index] = row = self._new(text)
                self.client.open(row)
                num_open += 1

    def _new(self, text: Ids) -> _Row:
        drafter, number = self.settings.drafter, self.client.next_sequence_id
        num_rows = 1 if drafter.kind in self.connection.chains else self.settings.rows_per_step
        width = min(num_rows, FAN_OUT)
        wish = Open(
            sequence_id=number,
            incarnation=0,
            token_ids=(),
            max_length=self.capacity,
            drafter=drafter.kind,
            max_lookahead=LOOKAHEAD,
            tokens_per_message=1,
            fan_out=width,
            rows_per_step=num_rows,
        )
        row = _Row(text.tolist(), wish, self.vocab_size, QUIET_SECONDS)
        row.text = text.copy()
        return row

    def _matched(self, texts: Sequence[Ids]) -> list[_Row | None]:
        """Each row's sequence: the one at its index if it fits, else the longest fitting one. Closes all others."""
        rows: list[_Row | None] = [None] * len(texts)
        left = {index: row for index, row in enumerate(self._rows) if row is not None}
        for index, text in enumerate(texts):
            if index in left and left[index].begins(text):
                rows[index] = left.pop(index)
        for index, text in enumerate(texts):
            fitting = [key for key, row in left.items() if rows[index] is None and row.begins(text)]
            if fitting:
                rows[index] = left.pop(max(fitting, key=lambda key: len(left[key].text)))
        for row in left.values():
            self.client.close(row)
        return rows

    def _await_candidates(self, num_new: Sequence[int]) -> None:
        """Wait until each row has `min_candidates`, for `wait_ms` at most."""
        clock, number = self.client.recorder.now_ns, min(self.settings.min_candidates, self.num_candidates)
        asking = [row for row, new in zip(self._rows, num_new, strict=True) if row is not None and new]
        start_ns = now_ns = clock()
        while (left_ns := start_ns + round(self.settings.wait_ms * 1e6) - now_ns) > 0:
            wanting = [row for row in asking if row.session.num_candidates < number and row.session.may_get_more]
            if not (waiting := [row for row in wanting if self.client.has_draft(row)]):
                break
            self.client.take(left_ns / 1e9, waiting)
            now_ns = clock()
        self.counts.waited_seconds += (now_ns - start_ns) / 1e9


class AsyncProposer:
    """A proposer for vLLM: it returns the candidates that a draft process has made since the last pass.

    Settings: `ProposerConfig`, in vLLM's `additional_config` under `amusd`.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Start the draft, and wait until it has loaded. Raises `ConfigError`, and `PeerError` if the draft fails."""
        self._running = ExitStack()
        self.batch: Batch | None = None
        self.compilation = vllm_config.compilation_config  # vLLM sets its mode later
        parallel = vllm_config.parallel_config
        if parallel.rank % parallel.tensor_parallel_size:
            return  # vLLM takes the candidates of the first rank only
        settings = settings_of(vllm_config)
        engine = settings.engine(vllm_config)
        fingerprint = load_tokenizer(vllm_config.model_config.model).fingerprint
        with ExitStack() as running:
            source = DraftSource(engine, engine.draft_address, settings.cores)
            connection = Connection.to(source, engine, running)
            connection.await_first(fingerprint, [settings.drafter.kind])
            self.batch = Batch(
                DraftClient(Recorder("target"), connection, hello_seconds=0.0),
                settings,
                vllm_config.model_config.get_vocab_size(),
                engine.max_model_len,
                vllm_config.speculative_config.num_speculative_tokens,
            )
            self._running = running.pop_all()

    def load_model(self, model: Any) -> None:
        """Do nothing: the draft's process has loaded its model. vLLM calls this on CPUs."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Ids,
        token_ids_cpu: Ids,
        slot_mappings: object = None,  # noqa: ARG002 - what vLLM passes
    ) -> list[list[int]]:
        """Candidates for the next pass, a list for each row.

        `sampled_token_ids`: tokens that the last pass added to each row. `token_ids_cpu`: [rows, columns]; the first
        `num_tokens_no_spec` columns of each row are tokens.
        """
        if self.batch is None:
            return [[] for _ in sampled_token_ids]
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))]
        found = self.batch.propose(texts, [len(new) for new in sampled_token_ids])
        if len(texts) > self.batch.settings.draft_up_to_rows or not self.compilation.cudagraph_mode.separate_routine():
            return found
        # A full graph of a decoding pass needs rows of one length.
        rows = zip(found, sampled_token_ids, strict=True)
        return [[*each, *repeat(PAD, self.batch.num_candidates - len(each))] if new else each for each, new in rows]

    @property
    def counts(self) -> dict[str, Any]:
        """The fields of `Counts` so far."""
        return {} if self.batch is None else asdict(self.batch.counts)

    def close(self) -> None:
        """End the draft, as the end of vLLM's process does. Idempotent."""
        self._running.close()
