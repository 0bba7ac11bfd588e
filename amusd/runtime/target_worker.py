"""The target's loop over its sequences: gather, decide, verify, commit, send verdicts.

The draft is reached through a `DraftClient`, and the target can always go on alone. The three modes are this loop under
three policies (`amusd/policies`). A pass serves all sequences at once (docs/batching.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from amusd.errors import NotFiniteError
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput
from amusd.policies.base import Wait
from amusd.policies.observer import Observer, PassTimes, Switches
from amusd.protocol.prefix_hash import num_common
from amusd.protocol.verification import PassOutcome
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.target_sequence import TargetSequence
from amusd.runtime.verifier import Request, prepare_to_verify
from amusd.sampling.stopping import StopChecker
from amusd.tracing.metrics import TargetCounts
from amusd.tracing.recorder import SEQUENCES_PER_RUN, Recorder


@dataclass
class TargetWorker:
    """Decodes up to `max_num_seqs` sequences: `prepare`, then `admit`, `step` until they are over, and `end`.

    For one thread.
    """

    model: ModelRunner
    recorder: Recorder
    client: DraftClient
    max_num_seqs: int = 1
    prefix_caching: bool = True
    counts: TargetCounts = field(default_factory=TargetCounts)
    sequences: list[TargetSequence] = field(default_factory=list)
    """Open sequences, in the order of admission."""
    _free_caches: dict[KVCache, TargetSequence | None] = field(init=False)
    """Free caches, least recently used first, each with the ended sequence whose keys and values it holds."""
    _free_observers: list[Observer] = field(init=False)
    """Free observers, most recently used last."""
    _last_step_ns: tuple[int, int] = (0, 0)
    """When the last step began and ended."""

    def __post_init__(self) -> None:
        caches = self.model.new_caches(self.max_num_seqs, self.model.max_length)
        switches: Switches = {}
        self._free_caches = dict.fromkeys(caches)
        self._free_observers = [Observer(switches) for _ in caches]

    def prepare(self) -> None:
        """Prepare every pass before the first sequence is admitted; a GPU takes seconds."""
        prepare_to_verify(self.model, next(iter(self._free_caches)))

    @property
    def has_room(self) -> bool:
        """Whether a sequence can be admitted."""
        return bool(self._free_caches)

    def admit(self, request: Request, stop: StopChecker) -> TargetSequence:
        """Begin a sequence. Call it only if `has_room`."""
        cache, num_cached = self._find_cache(request.prompt)
        number, start_ns, observer = self.client.next_sequence_id, self.recorder.now_ns(), self._free_observers[-1]
        sequence = TargetSequence(request, stop, self.model, cache, observer, sequence_id=number, start_ns=start_ns)
        cache.truncate(num_cached)
        sequence.metrics.num_cached_tokens = num_cached
        self.sequences.append(sequence)  # first, so that `end` frees the rest after an interrupt
        sequence.before = self._free_caches.pop(cache)
        self._free_observers.pop()
        self.client.open(sequence)  # at once, so that the draft prefills while the target does
        self.counts.num_prompt_tokens += len(request.prompt)
        self.counts.num_cached_tokens += num_cached
        self._send_features([sequence])
        return sequence

    def _find_cache(self, prompt: Sequence[int]) -> tuple[KVCache, int]:
        """Find a free cache for `prompt`; return it, and how many of the prompt's tokens it holds, the last excepted.

        The cache with most of these tokens is taken if they are at least half of its own; else the least recently used.
        With `fixed` only whole chunks are reused, since the bits of a partial chunk depend on its length.
        """
        chunk = self.model.numerics.prefill_chunk if self.model.numerics.fixed else 1
        held = {cache: () if before is None else before.kept for cache, before in self._free_caches.items()}
        alike = {cache: num_common(tokens, prompt[:-1]) // chunk * chunk for cache, tokens in held.items()}
        shared = {each: each.history.newest(number) if each.history else number for each, number in alike.items()}
        found = max(held, key=lambda cache: shared[cache] if 2 * shared[cache] >= len(held[cache]) else 0)
        return found, shared[found]

    def step(self) -> None:
        """Compute a chunk of the waiting prompts, then one pass over all sequences whose prompt is complete."""
        start_ns = self.recorder.now_ns()
        self._exclude_pause(start_ns)
        working = self._gather()
        if working:
            self._decide(working)
            outputs, times = self._verify(working)
            outcomes = self._commit(working, outputs)
            self._send_verdicts(outcomes)
            self._count(outcomes, times)
        self._close_ended()
        self._last_step_ns = start_ns, self.recorder.now_ns()

    def end(self, sequence: TargetSequence) -> None:
        """End a sequence at once, finished or not. Idempotent."""
        if sequence in self.sequences:
            self._close(sequence)
        self.client.forget(sequence)

    def begin_run(self, number: int) -> None:
        """Number sequences from `number` * `SEQUENCES_PER_RUN` + 1 on. Numbers must rise: the draft ignores others."""
        self.client.next_sequence_id = number * SEQUENCES_PER_RUN + 1

    def shut_down(self) -> None:
        """End the draft's session, and free the CUDA graphs: an NCCL group cannot end while they exist."""
        self.client.connection.shut_down()
        for cache in (*self._free_caches, *(sequence.cache for sequence in self.sequences)):
            cache.captured = None
        self.recorder.flush()

    # The steps, in their order

    def _exclude_pause(self, now_ns: int) -> None:
        """Exclude a reader's pause, beyond the duration of the last step, from the measured times."""
        start_ns, end_ns = self._last_step_ns
        pause_ns = now_ns - end_ns - (end_ns - start_ns)
        for sequence in self.sequences if pause_ns > 0 else ():
            sequence.observer.exclude(pause_ns)

    def _gather(self) -> list[TargetSequence]:
        """Compute one chunk of the waiting prompts, or the whole prompt of a lone sequence.

        Returns the sequences whose prompt is complete.
        """
        num_left = chunk = self.model.numerics.prefill_chunk
        for sequence in [sequence for sequence in self.sequences if not sequence.is_prefilled]:
            start, end = sequence.cache.length, len(sequence.request.prompt) - 1
            if len(self.sequences) > 1:
                end = min(end, start - start % chunk + chunk)
                if end - start > num_left:
                    break
            num_left -= end - start
            self._prefill(sequence, start, end)
        return self._prefilled()

    def _prefill(self, sequence: TargetSequence, start: int, end: int) -> None:
        """Compute the tokens `[start, end)` of a prompt."""
        start_ns = self.recorder.now_ns()
        self.model.prefill(sequence.request.prompt[start:end], sequence.cache)
        end_ns = self.recorder.now_ns()
        sequence.metrics.on_prefill(end_ns - start_ns)
        for other in self._prefilled():
            other.observer.exclude(end_ns - start_ns)
        self.recorder.span("target_prefill", start_ns, end_ns, sequence.sequence_id)
        if sequence.is_prefilled:
            self._send_features([sequence])

    def _prefilled(self) -> list[TargetSequence]:
        return [sequence for sequence in self.sequences if sequence.is_prefilled]

    def _decide(self, working: Sequence[TargetSequence]) -> None:
        """Take in messages and ask each policy, until the summed worth of waiting is not positive."""
        ready_ns = self.recorder.now_ns()
        if self.client.look_for_next():
            self._send_features(working)
        while True:
            self.client.drain()
            waited_ns = self.recorder.now_ns() - ready_ns
            decisions = {each: each.decide(waited_ns, has_draft=self.client.has_draft(each)) for each in working}
            waits = {sequence: decision for sequence, decision in decisions.items() if isinstance(decision, Wait)}
            if not waits or sum(decision.worth for decision in decisions.values()) <= 0:
                return
            self._wait(waits)

    def _wait(self, waits: dict[TargetSequence, Wait]) -> None:
        start_ns, num_before = self.recorder.now_ns(), [sequence.session.num_candidates for sequence in waits]
        seconds = min(decision.seconds for decision in waits.values())
        self.client.take(min(seconds, self.client.patience_seconds), waits)
        end_ns = self.recorder.now_ns()
        for (sequence, decision), before in zip(waits.items(), num_before, strict=True):
            sequence.metrics.wait_ns += end_ns - start_ns
            num_after = sequence.session.num_candidates
            sequence.observer.on_wait(end_ns - start_ns, decision.seconds, num_before=before, num_after=num_after)
            self.recorder.span("target_wait", start_ns, end_ns, sequence.sequence_id, reason=decision.reason)

    def _verify(self, working: Sequence[TargetSequence]) -> tuple[Sequence[ModelOutput], PassTimes]:
        """Run one pass over the last token and the candidates of each sequence; return an output for each."""
        start_ns = self.recorder.now_ns()
        outputs = self.model.run([sequence.begin() for sequence in working])
        num_rows = sum(len(sequence.block.token_ids) for sequence in working)
        return outputs, PassTimes(start_ns, self.recorder.now_ns(), num_rows, len(working))

    def _commit(
        self, working: Sequence[TargetSequence], outputs: Sequence[ModelOutput]
    ) -> dict[TargetSequence, PassOutcome]:
        """Judge the candidates of each sequence, and commit tokens.

        A sequence with logits that are not finite gets a pass of its own; if that fails, it ends without an outcome.
        """
        self.client.drain()  # a candidate that came meanwhile is judged in the place of the bonus token
        outcomes: dict[TargetSequence, PassOutcome] = {}
        failed: list[TargetSequence] = []
        for sequence, output in zip(working, outputs, strict=True):
            try:
                outcomes[sequence] = sequence.commit(output)
            except NotFiniteError:  # noqa: PERF203 - the others go on
                failed.append(sequence)
        for sequence in failed:  # last: another pass overwrites the logits of this one
            try:
                outcomes[sequence] = sequence.commit_again()
            except NotFiniteError as error:  # noqa: PERF203 - the others go on
                sequence.error = error
                self.end(sequence)
        return outcomes

    def _send_verdicts(self, outcomes: dict[TargetSequence, PassOutcome]) -> None:
        """Send all verdicts at once, so that the draft's next step is for all sequences."""
        going_on = [each for each in outcomes if each.finish_reason is None and each.decision.sends_verdict]
        self._send_features(going_on)
        for sequence in going_on:
            self.client.send_verdict(sequence)

    def _send_features(self, sequences: Sequence[TargetSequence]) -> None:
        """Send the draft the features of committed tokens, with one copy from the GPU for all sequences."""
        columns_of = self.model.feature_columns
        reading = [sequence for sequence in sequences if sequence.request.drafter in columns_of]
        lacking = {each: self.client.features_due(each, each.cache.length) for each in reading}
        due = {sequence: positions for sequence, positions in lacking.items() if positions}
        if due:
            found = self.model.read_features([(sequence.cache, positions) for sequence, positions in due.items()])
            for (sequence, positions), features in zip(due.items(), found, strict=True):
                columns = columns_of[sequence.request.drafter or ""]
                self.client.send_features(sequence, positions.start, features[:, columns])

    def _close(self, sequence: TargetSequence) -> None:
        self.sequences.remove(sequence)
        sequence.before = None
        self._free_caches[sequence.cache] = sequence if self.prefix_caching else None
        self._free_observers.append(sequence.observer)
        end_ns = sequence.start_ns + sequence.metrics.total_ns
        self.recorder.span("sequence", sequence.start_ns, end_ns, sequence.sequence_id, **sequence.summary())
        self.client.close(sequence)
        self.recorder.flush()

    def _close_ended(self) -> None:
        """Close ended sequences. Wait for the draft's counts only if no other sequence is at work."""
        for sequence in [each for each in self.sequences if each.finish_reason is not None or each.error is not None]:
            self._close(sequence)
        self.client.end_closed(waits=not self.sequences)

    def _count(self, outcomes: dict[TargetSequence, PassOutcome], times: PassTimes) -> None:
        """Count and record a pass, whose tokens are committed by now."""
        committed_ns = self.recorder.now_ns()
        self.counts.num_passes += 1
        for sequence, outcome in outcomes.items():
            if outcome.num_accepted:
                self.client.connection.on_accepted()
            session, decision, has_draft = sequence.session, sequence.decision, self.client.has_draft(sequence)
            is_alone = sequence.request.drafter is not None and not has_draft
            self.counts.add(outcome, is_alone=is_alone)
            sequence.metrics.on_pass(committed_ns - sequence.start_ns, times.duration_ns, outcome, is_alone=is_alone)
            sequence.observer.on_pass(sequence.view, decision, times, outcome, has_draft=has_draft)
            sizes = {"committed_length": session.committed_length, "num_ready": session.num_candidates}
            fields = {**sizes, **asdict(outcome), "reason": decision.reason}
            self.recorder.span("target_pass", times.start_ns, times.end_ns, sequence.sequence_id, **fields)
