"""Seeded defects, each with the tests that must notice it. Sessions with a broken rule: `tests/protocol/mutants.py`."""

from __future__ import annotations

from mutation.runner import Rule

TREES = "tests/protocol/test_trees.py"
SESSIONS = "tests/protocol/test_sessions.py"
TARGET, DRAFT = "amusd/protocol/target_session.py", "amusd/protocol/draft_session.py"
OBSERVER, SEEN = "amusd/policies/observer.py", "tests/policies/test_observer.py"
ESTIMATES, POLICIES = "amusd/policies/estimates.py", "tests/policies/test_policies.py"
SWITCH, PAYS = "amusd/policies/drafting_switch.py", "tests/policies/test_drafting_switch.py"
NGRAM, CONTRACT = "amusd/drafters/ngram.py", "tests/drafters/test_contract.py"
CLOCK, CLOCKS = "amusd/policies/verdict_clock.py", "tests/policies/test_verdict_clock.py"
LOGITS, SAMPLER = "amusd/sampling/logits.py", "tests/sampling/test_sampler.py"
STOPPING, TEXT = "amusd/sampling/stopping.py", "tests/sampling/test_text.py"
BATCHES = "tests/runtime/test_batches.py"
TURNS, TURN_TESTS = "amusd/answer.py", "tests/test_turns.py"
WORKLOAD, PROMPTS = "amusd/workload.py", "tests/test_workload.py"
PLAN, SWEEP = "launch/sweep_plan.py", "tests/launch/test_sweep.py"
OVERRIDES, COMPOSE = "launch/overrides.py", "tests/launch/test_compose.py"

WORKER = "amusd/runtime/target_worker.py"
CLIENT, CLIENT_TESTS = "amusd/runtime/draft_client.py", "tests/runtime/test_draft_client.py"
RESTART, RESTART_TESTS = "amusd/runtime/draft_restart.py", "tests/runtime/test_draft_restart.py"
DRAFTER_LOOP, DRAFT_TESTS = "amusd/runtime/draft_worker.py", "tests/runtime/test_draft_worker.py"
TIMELINE, TIMELINE_TESTS = "amusd/serving/timeline.py", "tests/serving/test_timeline.py"
ROLLBACK_TESTS = "tests/runtime/test_rollback.py"

RULES = (
    # protocol
    Rule(
        "a node at the base of the draft is forgotten",
        TARGET,
        "if at >= candidate.base}",
        "if at > candidate.base}",
        TREES,
    ),
    Rule(
        "the draft still restarts when a verification has begun",
        TARGET,
        "if self._wants_rows else ()\n        self._contradicted = False\n",
        "if self._wants_rows else ()\n",
        SESSIONS,
    ),
    Rule(
        "the end of the answer is not told", TARGET, "if ends or not self.remaining", "if not self.remaining", SESSIONS
    ),
    Rule(
        "an incarnation may come again",
        TARGET,
        "if incarnation <= self._incarnation",
        "if incarnation < self._incarnation",
        SESSIONS,
    ),
    Rule(
        "the number of a node that is offered again is the old one",
        TARGET,
        "max(known.number, node.number)",
        "known.number",
        TREES,
    ),
    Rule("the least likely child makes the path", TARGET, "path.append(max(", "path.append(min(", TREES),
    Rule("unlikely alternatives are verified", TARGET, " and -guesses[0][0] >= min_chance", "", TREES),
    Rule(
        "a draft that is done is waited for",
        TARGET,
        "(self._draft_more or self._draft_base < self._prefix.length)",
        "True",
        TREES,
    ),
    Rule(
        "a parent may follow its child",
        TARGET,
        "not 0 <= parent < candidate.first + index",
        "parent < 0",
        f"{TREES} {SESSIONS}",
    ),
    Rule(
        "a chain says that it has ended, again and again",
        DRAFT,
        "(self._said_no_more and not self._unsent)",
        "not self._unsent",
        SESSIONS,
    ),
    Rule(
        "nodes may stand at the last position",
        DRAFT,
        "self._max_length - 1)",
        "self._max_length)",
        f"{TREES} {SESSIONS}",
    ),
    Rule(
        "an opening with too many tokens is taken",
        DRAFT,
        "not len(opening.token_ids) <= opening.max_length <= MAX_TOKENS",
        "opening.max_length > MAX_TOKENS",
        SESSIONS,
    ),
    Rule(
        "what was looked up is guessed again",
        DRAFT,
        "            if token_id in known:\n                continue\n",
        "",
        TREES,
    ),
    Rule(
        "an unlikely guess is forgotten for good",
        DRAFT,
        "                node.unmade.append((token_id, weight, step))",
        "                pass",
        TREES,
    ),
    Rule(
        "probabilities stay relative to the old root",
        DRAFT,
        "            node.probability /= self._root.probability\n",
        "",
        TREES,
    ),
    Rule(
        "a verdict may change what was committed",
        DRAFT,
        "if self._prefix.slice(verdict.start, self.base) != verdict",
        "if False and () != verdict",
        f"{TREES} {SESSIONS}",
    ),
    Rule(
        "the path of a verification ends at its second row",
        "amusd/protocol/verification.py",
        "            rows.append(row)\n        return tuple(rows)",
        "            return (*rows, row)\n        return tuple(rows)",
        TREES,
    ),
    Rule(
        "a late candidate is not counted",
        "amusd/protocol/verification.py",
        "self.num_accepted > self.num_candidates and not self.num_accepted_alternatives",
        "False",
        TREES,
    ),
    # policies
    Rule(
        "a draft is mute into the next answer",
        OBSERVER,
        "        self._draft_knows = True\n        self._mute_at = None\n",
        "        self._draft_knows = True\n",
        SEEN,
    ),
    Rule(
        "a draft that is mute stays so when it brings more", OBSERVER, "num_candidates > self._mute_at:", "False:", SEEN
    ),
    Rule(
        "a pass that was held up makes rows dear",
        OBSERVER,
        "        if not is_outlier:\n            self._row_cost",
        "        if True:\n            self._row_cost",
        SEEN,
    ),
    Rule("passes without a draft count as its own", OBSERVER, "        if not is_alone:\n", "        if True:\n", SEEN),
    Rule(
        "the time between two answers is the pass's",
        OBSERVER,
        "        self._last_end_ns = None\n        self._draft_knows = True\n        self._mute",
        "        self._draft_knows = True\n        self._mute",
        SEEN,
    ),
    Rule("waits in vain are never forgotten", ESTIMATES, "        self._seconds *= FORGETTING\n", "", POLICIES),
    Rule(
        "a stall counts in full", ESTIMATES, "seconds = min(seconds, self.longest)", "seconds = seconds * 1", POLICIES
    ),
    Rule(
        "candidates behind a rejected one count as tested",
        ESTIMATES,
        "num_accepted + (num_accepted < num_judged)",
        "num_judged",
        POLICIES,
    ),
    Rule(
        "a draft that is too modest is corrected upwards",
        ESTIMATES,
        "min(1.0, self._correction.value)",
        "self._correction.value",
        POLICIES,
    ),
    Rule(
        "uneven passes are waited for as even ones", CLOCK, "due_ns + DEVIATIONS * self._deviation_ns", "due_ns", CLOCKS
    ),
    Rule(
        "a pass begins with the first candidates only",
        CLOCK,
        "        if self._pass_start_ns is None:\n            self._pass_start_ns = now_ns",
        "        pass",
        CLOCKS,
    ),
    Rule(
        "a row may cost more than a pass",
        "amusd/policies/row_cost.py",
        "        self._row_ns = min(max(0.0, slope), most_ns)",
        "        self._row_ns = max(0.0, slope)",
        "tests/policies/test_row_cost.py",
    ),
    # drafters
    Rule(
        "rows of one position share a track",
        "amusd/protocol/verification.py",
        "                taken.add(track)\n",
        "",
        TREES,
    ),
    Rule("a rest that pays does not grow", SWITCH, "min(4 * self._rest, LONGEST)", "self._rest", PAYS),
    Rule(
        "a rest that does not pay is soon tried again",
        SWITCH,
        "min(2 * max(self._look, FIRST_LOOK), LONGEST)",
        "FIRST_LOOK",
        PAYS,
    ),
    Rule("a rest may be endless", SWITCH, "min(4 * self._rest, LONGEST)", "4 * self._rest", PAYS),
    Rule(
        "auto waits for a draft that is mute",
        "amusd/policies/auto.py",
        "not view.can_grow or view.draft_is_mute",
        "not view.can_grow",
        POLICIES,
    ),
    Rule(
        "the synchronous target has no deadline",
        "amusd/policies/fixed.py",
        "view.lacks(self.max_lookahead) and seconds_left > 0",
        "view.lacks(self.max_lookahead)",
        POLICIES,
    ),
    Rule("the first occurrence is looked up", NGRAM, "(ends[-2] for ends", "(ends[0] for ends", CONTRACT),
    Rule(
        "a loop ends at the end of the context",
        NGRAM,
        "self._context[end + offset % period]",
        "self._context[end + min(offset, period - 1)]",
        CONTRACT,
    ),
    Rule("what was cut off stays in the index", NGRAM, "                self._ends[ngram].pop()\n", "", CONTRACT),
    Rule(
        "the oldest places are looked at first",
        NGRAM,
        "return sorted(matches, reverse=True)",
        "return sorted(matches)",
        "tests/drafters/test_ngram_cache.py",
    ),
    Rule(
        "slots of nodes that are gone are not freed",
        "amusd/drafters/tree.py",
        "            self._free.append(self._slots.pop(node))",
        "            self._slots.pop(node)",
        "tests/drafters/test_tree.py",
    ),
    # sampling
    Rule(
        "penalties reach the prompt only",
        LOGITS,
        "np.union1d(self._counted(prompt)[0], written)",
        "self._counted(prompt)[0]",
        SAMPLER,
    ),
    Rule(
        "a token is penalized once however often it was written",
        LOGITS,
        "(presence + frequency * counts)",
        "(presence + frequency * (counts > 0))",
        SAMPLER,
    ),
    Rule(
        "a negative frequency penalty raises no logit",
        LOGITS,
        " or self._distribution.frequency_penalty < 0",
        "",
        "tests/sampling/test_digest.py",
    ),
    Rule(
        "of equal tokens the last is reported first",
        "amusd/sampling/known_rows.py",
        "np.lexsort((columns, -logits))",
        "np.lexsort((-columns, -logits))",
        SAMPLER,
    ),
    Rule(
        "a rejected candidate counts as said by the draft",
        "amusd/protocol/verification.py",
        "[TokenSource.CANDIDATE] * num_accepted + [TokenSource.TARGET] * (len(token_ids) - num_accepted)",
        "[TokenSource.CANDIDATE] * len(token_ids)",
        "tests/protocol/test_trees.py",
    ),
    Rule(
        "negative logits are divided by the penalty",
        LOGITS,
        "seen / penalty, seen * penalty)",
        "seen / penalty, seen / penalty)",
        SAMPLER,
    ),
    Rule(
        "top-p leaves one column too few",
        LOGITS,
        "order[before < wanted]",
        "order[before + sorted_weights < wanted]",
        SAMPLER,
    ),
    Rule(
        "ties with the last of top-k go",
        LOGITS,
        "likely[values >= np.partition",
        "likely[values > np.partition",
        SAMPLER,
    ),
    Rule("a stop string across tokens is not seen", STOPPING, "max(len(stop) for stop in self.stop) - 1", "0", TEXT),
    Rule(
        "stop wins over end-of-sequence",
        STOPPING,
        "        if token_id in self.eos_token_ids:\n",
        "        if token_id in self.eos_token_ids and not self._completes_stop(self.push_text(token_id)):\n",
        TEXT,
    ),
    Rule("text is cut before the first string of the list", STOPPING, "text[: min(found)]", "text[: found[0]]", TEXT),
    # answers, workloads, sweeps
    Rule(
        "an answer that nobody can read is computed on",
        TURNS,
        "if answer is None or answer.is_over:\n                del",
        "if answer is not None and answer.is_over:\n                del",
        TURN_TESTS,
    ),
    Rule(
        "the last reader comes first",
        TURNS,
        "self._queue.popleft()",
        "self._queue.pop()",
        f"{BATCHES}::test_more_requests_than_slots_are_admitted_in_the_order_in_which_they_were_submitted",
    ),
    Rule(
        "a signal handler may use the worker amid a pass",
        TURNS,
        "            if self._in_use:\n                raise",
        "            if False:\n                raise",
        TURN_TESTS,
    ),
    Rule(
        "a fork may ask",
        TURNS,
        "        if os.getpid() != self._pid:\n            raise",
        "        if False:\n            raise",
        TURN_TESTS,
    ),
    Rule("lines end where text does not", WORKLOAD, '.split("\\n"), start=1', ".splitlines(), start=1", PROMPTS),
    Rule(
        "the last answer of a conversation is part of the prompt",
        WORKLOAD,
        "turns[: assistant[-1]]",
        "turns[: assistant[-1] + 1]",
        PROMPTS,
    ),
    Rule("lines are counted from 0", WORKLOAD, '("\\n"), start=1):', '("\\n"), start=0):', PROMPTS),
    Rule(
        "another command may go on with a sweep",
        PLAN,
        'earlier["command"] == plan.command and ',
        "",
        f"{SWEEP}::test_the_folder_of_a_sweep_of_another_command_is_refused",
    ),
    Rule(
        "a job whose draft was lost is done",
        PLAN,
        ' or {"draft_failure", "draft_losses"} & result.keys()',
        "",
        f"{SWEEP}::test_a_job_whose_draft_was_lost_is_run_again",
    ),
    Rule(
        "a prompt may be a sweep",
        OVERRIDES,
        '(key == "prompt" or not value.startswith("choice("))',
        'not value.startswith("choice(")',
        COMPOSE,
    ),
    Rule(
        "the first value of a key holds",
        OVERRIDES,
        "    values = dict(split(override) for override in overrides)\n    number",
        "    values = dict(split(override) for override in reversed(overrides))\n    number",
        COMPOSE,
    ),
    Rule(
        "both names of the number of tokens are taken",
        "amusd/config/decoding.py",
        "number is None or number == other,",
        "True,",
        "tests/test_engine_arguments.py",
    ),
    Rule(
        "a number beyond float32 is a temperature",
        "amusd/config/decoding.py",
        "is_off or 1 / _LARGEST <= value <= _LARGEST",
        "True",
        "tests/test_engine_arguments.py",
    ),
    Rule(
        "more candidates may be asked for than there may be",
        "amusd/config/decoding.py",
        "self.min_candidates <= self.max_lookahead,",
        "True,",
        "tests/test_config.py",
    ),
    # runtime
    Rule(
        "what the link takes counts as silence",
        CLIENT,
        "default=0.0) + self.round_trip_seconds",
        "default=0.0)",
        CLIENT_TESTS,
    ),
    Rule(
        "a silent draft is told of each pass", CLIENT, "if is_due or self.may_hear(sequence):", "if True:", CLIENT_TESTS
    ),
    Rule(
        "a draft that never answered is not told its opening again",
        CLIENT,
        "if is_due and not reminder.is_answered and",
        "if False and",
        CLIENT_TESTS,
    ),
    Rule("reminders come at equal intervals", CLIENT, "self._seconds *= 2", "self._seconds *= 1", CLIENT_TESTS),
    Rule(
        "the next draft begins silent",
        CLIENT,
        "self.link, self.peer = found\n        self._silent_ns = 0\n",
        "self.link, self.peer = found\n",
        CLIENT_TESTS,
    ),
    Rule(
        "the nonsense of a draft is held against the next one",
        CLIENT,
        "self._silent_ns = 0\n        self._num_nonsense = 0\n        self.num_restarts",
        "self._silent_ns = 0\n        self.num_restarts",
        CLIENT_TESTS,
    ),
    Rule(
        "the draft is silent although it spoke",
        CLIENT,
        "if makes_sense:\n            self._silent_ns = 0",
        "if makes_sense:\n            pass",
        CLIENT_TESTS,
    ),
    Rule(
        "a lost draft stays attached",
        CLIENT,
        "sequence.session.detach()\n            sequence.tally.num_draft_losses",
        "sequence.tally.num_draft_losses",
        CLIENT_TESTS,
    ),
    Rule(
        "the link of a lost draft stays open",
        CLIENT,
        "self.link.close()\n        self.link = None",
        "self.link = None",
        CLIENT_TESTS,
    ),
    Rule(
        "the draft's counts are given to no sequence",
        CLIENT,
        "sequence.tally.draft = DraftCounts.of(message)",
        "pass",
        CLIENT_TESTS,
    ),
    Rule(
        "a draft that joins late is told the whole reference",
        "amusd/runtime/target_sequence.py",
        "request.reference[len(committed) - len(request.prompt) :]",
        "request.reference",
        CLIENT_TESTS,
    ),
    Rule(
        "a wait is not bounded by patience",
        WORKER,
        "min(seconds, self.client.patience_seconds)",
        "seconds",
        CLIENT_TESTS,
    ),
    Rule(
        "a prompt is scored behind what its slot held",
        WORKER,
        "        scoring.cache.truncate(0)\n",
        "",
        "tests/test_engine.py::test_the_tokens_of_a_prompt_are_scored_by_the_target_alone",
    ),
    Rule(
        "a prompt that is scored keeps its slot",
        WORKER,
        "self._free_slots.append(self._scorings.pop(sequence))",
        "self._scorings.pop(sequence)",
        "tests/test_engine.py::test_the_tokens_of_a_prompt_are_scored_by_the_target_alone",
    ),
    Rule(
        "a slot that is left stays taken",
        WORKER,
        "self._free_slots.append(self._slots_in_use.pop(sequence))",
        "self._slots_in_use.pop(sequence)",
        f"{BATCHES}::test_the_slot_of_a_closed_answer_is_free_at_the_next_step",
    ),
    Rule(
        "an admission that fails takes a slot",
        WORKER,
        "        self.client.open(sequence)  # at once, so that the draft prefills while the target does\n"
        "        self._slots_in_use[sequence] = self._free_slots.pop()\n",
        "        self._slots_in_use[sequence] = self._free_slots.pop()\n        self.client.open(sequence)\n",
        f"{BATCHES}::test_an_admission_that_fails_costs_no_slot",
    ),
    Rule(
        "a prompt is taken in at once whoever waits",
        WORKER,
        "if len(self._slots_in_use) > 1 or self._scorings:",
        "if False:",
        f"{BATCHES}::test_a_prompt_that_comes_in_lets_the_others_have_a_pass_between_two_chunks",
    ),
    Rule(
        "a prompt that comes in alone is taken in by chunks",
        WORKER,
        "if len(self._slots_in_use) > 1 or self._scorings:",
        "if True:",
        f"{BATCHES}::test_a_prompt_that_comes_in_alone_is_taken_in_at_once",
    ),
    Rule(
        "a pass waits for each of its sequences",
        WORKER,
        "else len(sequences) // 2):",
        "else 0):",
        f"{BATCHES}::test_one_whose_draft_is_at_long_work_has_two_others_wait_for_nothing",
    ),
    Rule(
        "blocks are verified before all have come",
        WORKER,
        "(0 if is_waited_for else len(sequences) // 2)",
        "(len(sequences) // 2)",
        f"{BATCHES}::test_blocks_of_eight_requests_are_accepted_as_those_of_each_alone",
    ),
    Rule(
        "a pass that is not finite ends every answer",
        WORKER,
        "                sequence.error = error\n                self.end(sequence)",
        "                raise",
        f"{BATCHES}::test_a_pass_that_is_not_finite_ends_its_own_answer_alone",
    ),
    Rule(
        "the cache of a slot keeps what it held",
        WORKER,
        "slot.cache.truncate(0)",
        "pass",
        f"{BATCHES}::test_the_slot_of_a_closed_answer_is_free_at_the_next_step",
    ),
    Rule(
        "a draft that serves others is waited for in each pass",
        CLIENT,
        "reminder.silent_ns += waited_ns",
        "pass",
        f"{BATCHES}::test_one_that_its_draft_cannot_take_has_another_one_wait_for_it_once",
    ),
    Rule("a draft of any life is taken", RESTART, "if peer.incarnation != self._told:", "if False:", RESTART_TESTS),
    Rule(
        "the link leaks where the handshake fails",
        RESTART,
        "except PeerLostError:\n            link.close()\n",
        "except PeerLostError:\n",
        RESTART_TESTS,
    ),
    Rule("the back-off does not double", RESTART, "2 ** (self._num_fruitless - 2)", "1", RESTART_TESTS),
    Rule(
        "a draft of use is not worth a restart",
        RESTART,
        "self._num_fruitless = 0\n\n    def poll",
        "pass\n\n    def poll",
        RESTART_TESTS,
    ),
    Rule(
        "the sequence that began first gives up its drafter",
        DRAFTER_LOOP,
        "key=lambda each: each.heard_ns",
        "key=lambda each: each.opened_ns",
        "tests/runtime/test_reminders.py::test_a_lost_end_of_a_sequence_costs_no_other_one_its_draft",
    ),
    Rule("a draft at long work says nothing", DRAFTER_LOOP, ">= SIGN_NS", ">= 10**18", DRAFT_TESTS),
    Rule(
        "what a verdict prepared is not sent at once",
        DRAFTER_LOOP,
        "if self._roll_back(sequence):\n                self._send(sequence)",
        "if self._roll_back(sequence):\n                pass",
        DRAFT_TESTS,
    ),
    Rule(
        "an impossible verdict is applied again and again",
        DRAFTER_LOOP,
        "except PeerProtocolError:\n            sequence.verdict = None\n            self.num_ignored += 1",
        "except PeerProtocolError:\n            pass",
        DRAFT_TESTS,
    ),
    Rule(
        "the first of several verdicts is followed",
        DRAFTER_LOOP,
        "sequence.heard_ns = message,",
        "sequence.heard_ns = sequence.verdict or message,",
        DRAFT_TESTS,
    ),
    Rule(
        "waits are not counted",
        "amusd/runtime/draft_sequence.py",
        "self.wait_ns += end_ns - start_ns",
        "pass",
        DRAFT_TESTS,
    ),
    Rule(
        "work is not counted",
        "amusd/runtime/draft_sequence.py",
        "self.busy_ns += end_ns - start_ns",
        "pass",
        DRAFT_TESTS,
    ),
    Rule(
        "a drafter is not given back",
        "amusd/runtime/draft_sequence.py",
        "self.forest.free.append(self.manager.drafter)",
        "pass",
        DRAFT_TESTS,
    ),
    Rule(
        "each sequence is charged a whole step",
        "amusd/runtime/draft_sequence.py",
        "(num_before, num_behind))",
        "(0, num_rows))",
        DRAFT_TESTS,
    ),
    Rule(
        "a step waits as long as any sequence would",
        DRAFTER_LOOP,
        "patience = min(",
        "patience = max(",
        DRAFT_TESTS,
    ),
    Rule(
        "an older sequence takes the drafter of a newer one",
        DRAFTER_LOOP,
        "if opening.sequence_id < min(each.sequence_id for each in having):",
        "if False:",
        DRAFT_TESTS,
    ),
    Rule("numbers are remembered for ever", DRAFTER_LOOP, "len(self._known) > MAX_KNOWN", "False", DRAFT_TESTS),
    Rule(
        "a tree that has much ready is as needy as one that has nothing",
        "amusd/protocol/draft_session.py",
        "return probability / (1.0 + self._num_ready)",
        "return probability",
        "tests/protocol/test_trees.py",
    ),
    Rule(
        "what is ready is not counted again after a verdict",
        "amusd/protocol/draft_session.py",
        "            self._num_ready += node.probability\n            if not node.computed:",
        "            if not node.computed:",
        "tests/protocol/test_trees.py",
    ),
    Rule(
        "a sequence without numbers keeps others from proposing",
        "amusd/drafters/autoregressive.py",
        "if len(drafters) > 1:",
        "if False:",
        "tests/drafters/test_together.py::test_one_without_numbers_keeps_no_other_from_proposing",
    ),
    Rule(
        "the session changes before the drafter",
        "amusd/runtime/rollback.py",
        "        try:\n            self.drafter.follow(transition)",
        "        self.session.apply(transition)\n        try:\n            self.drafter.follow(transition)",
        ROLLBACK_TESTS,
    ),
    Rule(
        "a drafter that fails is not opened again",
        "amusd/runtime/rollback.py",
        "transition = self._reopened(transition)",
        "raise",
        ROLLBACK_TESTS,
    ),
    Rule(
        "a drafter may disagree with its session",
        "amusd/runtime/rollback.py",
        "if self.drafter.length != expected:",
        "if False:",
        ROLLBACK_TESTS,
    ),
    # serving
    Rule(
        "a slow listener is not told that it missed something",
        TIMELINE,
        "if number > expected:",
        "if False:",
        TIMELINE_TESTS,
    ),
    Rule(
        "a listener that has gone is still told", TIMELINE, "if listener is not keep)", "if listener)", TIMELINE_TESTS
    ),
    Rule("listening goes on when the server ends", TIMELINE, "while not is_over():", "while True:", TIMELINE_TESTS),
    Rule(
        "the watch over an answer that has ended is kept",
        TIMELINE,
        "            self._rollbacks.pop(event.sequence_id, None)\n",
        "",
        TIMELINE_TESTS,
    ),
    Rule(
        "a rollback is told with every message behind it",
        "amusd/tracing/drafted.py",
        "            self._missed = None\n        return knows",
        "            pass\n        return knows",
        TIMELINE_TESTS,
    ),
)
