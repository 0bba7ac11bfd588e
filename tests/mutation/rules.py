"""Seeded defects, each with the tests that must notice it. Sessions with a broken rule: `tests/protocol/mutants.py`."""

from __future__ import annotations

from mutation.runner import Rule

TREES = "tests/protocol/test_trees.py"
SESSIONS = "tests/protocol/test_sessions.py"
FUZZ = "tests/protocol/test_fuzz.py"
TARGET, DRAFT = "amusd/protocol/target_session.py", "amusd/protocol/draft_session.py"
OBSERVER, SEEN = "amusd/policies/observer.py", "tests/policies/test_observer.py"
ESTIMATES, POLICIES = "amusd/policies/estimates.py", "tests/policies/test_policies.py"
SWITCH, PAYS = "amusd/policies/drafting_switch.py", "tests/policies/test_drafting_switch.py"
NGRAM, NGRAM_TESTS = "amusd/drafters/ngram.py", "tests/drafters/test_ngram_cache.py"
CLOCK, CLOCKS = "amusd/policies/verdict_clock.py", "tests/policies/test_verdict_clock.py"
LOGITS, SAMPLER = "amusd/sampling/logits.py", "tests/sampling/test_sampler.py"
STOPPING, TEXT = "amusd/sampling/stopping.py", "tests/sampling/test_text.py"
TOKENIZER, TOKEN_TEXTS = "amusd/models/tokenizer.py", "tests/models/test_text_of_tokens.py"
BATCHES = "tests/runtime/test_batches.py"
TURNS, TURN_TESTS = "amusd/answer.py", "tests/test_turns.py"
WORKLOAD, PROMPTS = "amusd/workload.py", "tests/test_workload.py"
CATEGORIES, CATEGORY_TESTS = "amusd/commands/categories.py", "tests/commands/test_categories.py"
PLAN, SWEEP = "launch/sweep_plan.py", "tests/launch/test_sweep.py"
OVERRIDES, COMPOSE = "launch/overrides.py", "tests/launch/test_compose.py"

WORKER = "amusd/runtime/target_worker.py"
CLIENT, CLIENT_TESTS = "amusd/runtime/draft_client.py", "tests/runtime/test_draft_client.py"
RESTART, RESTART_TESTS = "amusd/runtime/draft_restart.py", "tests/runtime/test_draft_restart.py"
DRAFTER_LOOP, DRAFT_TESTS = "amusd/runtime/draft_worker.py", "tests/runtime/test_draft_worker.py"
TIMELINE, TIMELINE_TESTS = "amusd/serving/timeline.py", "tests/serving/test_timeline.py"
ROLLBACK_TESTS = "tests/runtime/test_rollback.py"
EAGLE, EAGLE_TESTS = "amusd/drafters/eagle.py", "tests/drafters/test_eagle.py"
LAYOUTS, NETWORK, NETWORK_TESTS = "amusd/models/draft_layouts.py", "amusd/models/eagle.py", "tests/models/test_eagle.py"
BLOCKS, BLOCKS_TESTS = "amusd/models/block_models.py", "tests/models/test_block_models.py"
BLOCK, BLOCK_TESTS = "amusd/drafters/block.py", "tests/drafters/test_block.py"
FEATURE_TESTS = "tests/runtime/test_features.py"
REQUESTS, RESPONSES, PURE = "amusd/serving/requests.py", "amusd/serving/responses.py", "tests/serving/test_pure.py"
SERVICE, API, LEAVING = "amusd/serving/service.py", "tests/serving/test_api.py", "tests/serving/test_leaving.py"
GATE, BAD_REQUESTS = "amusd/serving/app.py", "tests/serving/test_bad_requests.py"

NODES, MEMBERS = "launch/nodes.py", "tests/launch/test_members.py"
RANKS, STORE, STORE_TESTS = "launch/ranks.py", "launch/store.py", "tests/launch/test_store.py"
RAY, RAY_TESTS = "launch/ray_serve.py", "tests/launch/test_ray_serve.py"
COMPARE, COMPARE_TESTS = "amusd/commands/compare.py", "tests/commands/test_compare.py"
FILE_TESTS = "tests/commands/test_generate.py"
DEVICES, DEVICE_TESTS = "amusd/commands/simulate/equal_devices.py", "tests/simulation/test_equal_devices.py"
LINEAR, LINEAR_TESTS, INT8_TESTS = "amusd/models/linear.py", "tests/models/test_linear.py", "tests/models/test_int8.py"

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
        FUZZ,
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
        "self._max_length - 1, self._draft_length)",
        "self._max_length, self._draft_length)",
        f"{TREES} {SESSIONS}",
    ),
    Rule(
        "an opening with too many tokens is taken",
        DRAFT,
        "not len(opening.token_ids) <= opening.max_length <= MAX_TOKENS",
        "opening.max_length > MAX_TOKENS",
        FUZZ,
    ),
    Rule(
        "the draft runs no further ahead after a verdict",
        DRAFT,
        "transition.token_ids)\n        self._limit = self._next_limit()\n",
        "transition.token_ids)\n",
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
        "                unmade.append(guess)",
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
        FUZZ,
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
        "amusd/policies/estimates.py",
        "        self.row_ns = min(max(0.0, slope), most_ns)",
        "        self.row_ns = max(0.0, slope)",
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
        "amusd/policies/schedules.py",
        "not view.can_grow or view.draft_is_mute",
        "not view.can_grow",
        POLICIES,
    ),
    Rule(
        "a row costs what is committed with the draft, though alone it is more",
        "amusd/policies/schedules.py",
        "max(view.tokens_per_second, view.plain_tokens_per_second)",
        "view.tokens_per_second",
        POLICIES,
    ),
    Rule(
        "a wait costs a sequence more than its time",
        "amusd/policies/schedules.py",
        "max(view.gain - loss, -delay)",
        "view.gain - loss",
        POLICIES,
    ),
    Rule(
        "the synchronous target has no deadline",
        "amusd/policies/schedules.py",
        "not is_whole and seconds_left > 0",
        "not is_whole",
        POLICIES,
    ),
    Rule(
        "the first occurrence is looked up",
        NGRAM,
        "agreement, text, end = matches[0]",
        "agreement, text, end = matches[-1]",
        NGRAM_TESTS,
    ),
    Rule(
        "a loop ends at the end of the context",
        NGRAM,
        "token_ids[end + offset % period]",
        "token_ids[end + min(offset, period - 1)]",
        NGRAM_TESTS,
    ),
    Rule("what was cut off stays in the index", NGRAM, "                self._ends[suffix].pop()\n", "", NGRAM_TESTS),
    Rule(
        "the oldest places are looked at first",
        NGRAM,
        "return sorted(found, reverse=True)",
        "return sorted(found)",
        NGRAM_TESTS,
    ),
    Rule(
        "a known token may lose what the model gives it",
        "amusd/sampling/ranking.py",
        "max(log_q, bias + slope * log_q)",
        "bias + slope * log_q",
        "tests/sampling/test_ranking.py",
    ),
    Rule(
        "noise of tokens that cannot be proposed is forgotten",
        "amusd/sampling/ranking.py",
        "temperature * gumbel_of(int(self._ids[column]), self._key(position)) if temperature else 0.0",
        "0.0",
        "tests/sampling/test_ranking.py",
    ),
    Rule(
        "what was only drafted is remembered as an answer",
        NGRAM,
        "self._index.token_ids[start:committed_length]",
        "self._index.token_ids[start:]",
        NGRAM_TESTS,
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
        "tests/sampling/test_digest.py::test_a_column_that_was_written_often_enough_wins_from_outside_the_digest",
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
    Rule(
        "a category has the prompts of all",
        CATEGORIES,
        'statistics.median(speedups(prompts, row["contestant"])),',
        'statistics.median(speedups(per_prompt, row["contestant"])),',
        CATEGORY_TESTS,
    ),
    Rule(
        "answers that share a pass count for a category",
        CATEGORIES,
        'row.get("batch_size", 1) == 1',
        "True",
        CATEGORY_TESTS,
    ),
    Rule(
        "a file's drafter holds over the one chosen",
        OVERRIDES,
        "for group in chosen:",
        "for group in ():",
        f"{COMPOSE}::test_a_choice_of_model_holds_over_the_pair_or_experiment_that_names_another",
    ),
    Rule(
        "a model alone changes the kind of a file",
        OVERRIDES,
        "for group in chosen:",
        "for group in {*values} & {*MODEL_GROUPS}:",
        f"{COMPOSE}::test_a_choice_of_model_holds_over_the_pair_or_experiment_that_names_another",
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
        "self.link, self.peer = found\n        self._silent_ns.clear()\n",
        "self.link, self.peer = found\n",
        CLIENT_TESTS,
    ),
    Rule(
        "the nonsense of a draft is held against the next one",
        CLIENT,
        "self.is_silent, self._asked_ns, self._num_nonsense = False, None, 0",
        "self.is_silent, self._asked_ns = False, None",
        CLIENT_TESTS,
    ),
    Rule(
        "the draft is silent although it spoke",
        CLIENT,
        "            self.is_silent, self._asked_ns = False, None\n            self._silent_ns",
        "            self._silent_ns",
        CLIENT_TESTS,
    ),
    Rule(
        "a lost draft stays attached",
        CLIENT,
        "sequence.session.detach()\n            sequence.metrics.lost_draft",
        "sequence.metrics.lost_draft",
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
        "sequence.metrics.reported(message)",
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
        "if len(self._slots_in_use) > 1:",
        "if False:",
        f"{BATCHES}::test_a_prompt_that_comes_in_lets_the_others_have_a_pass_between_two_chunks",
    ),
    Rule(
        "prompts that come together take more than a chunk of a step",
        WORKER,
        "if end - start > num_left:",
        "if False:",
        f"{BATCHES}::test_prompts_that_come_together_are_taken_in_together_as_far_as_a_chunk_goes",
    ),
    Rule(
        "prompts that come together take a step each",
        WORKER,
        "num_left -= end - start",
        "num_left = 0",
        f"{BATCHES}::test_prompts_that_come_together_are_taken_in_together_as_far_as_a_chunk_goes",
    ),
    Rule(
        "a prompt that comes in alone is taken in by chunks",
        WORKER,
        "if len(self._slots_in_use) > 1:",
        "if True:",
        f"{BATCHES}::test_a_prompt_that_comes_in_alone_is_taken_in_at_once",
    ),
    Rule(
        "a pass waits for each of its sequences",
        WORKER,
        "if not waits or worth <= 0:",
        "if not waits:",
        "tests/runtime/test_gathering.py",
    ),
    Rule(
        "blocks are verified before all have come",
        "amusd/policies/schedules.py",
        "return Wait(seconds_left, worth=math.inf)  # blocks",
        "return Wait(seconds_left)  # blocks",
        f"{BATCHES}::test_a_block_is_waited_for_whoever_else_is_ready",
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
        "(EVERY_SEQUENCE, *(sequence.sequence_id for sequence in waiting))",
        "(EVERY_SEQUENCE,)",
        f"{BATCHES}::test_one_that_its_draft_cannot_take_has_another_one_wait_for_it_once",
    ),
    Rule("a draft of any life is taken", RESTART, "if peer.incarnation != self._told:", "if False:", RESTART_TESTS),
    Rule(
        "the link leaks where the handshake fails",
        RESTART,
        "except Exception:\n            link.close()\n",
        "except Exception:\n",
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
        "a sequence whose end was lost keeps its drafter",
        DRAFTER_LOOP,
        "if number != message.sequence_id and self._is_over(number):",
        "if False:",
        DRAFT_TESTS,
    ),
    Rule(
        "the target names a sequence that it closes",
        CLIENT,
        "for number in self._not_over if number != sequence.sequence_id",
        "for number in self._not_over",
        CLIENT_TESTS,
    ),
    Rule("a draft at long work says nothing", DRAFTER_LOOP, ">= SIGN_NS", ">= 10**18", DRAFT_TESTS),
    Rule(
        "what a verdict prepared is not sent at once",
        DRAFTER_LOOP,
        "if is_news:\n                self._send(sequence)",
        "if is_news:\n                pass",
        DRAFT_TESTS,
    ),
    Rule(
        "an impossible verdict is answered by silence",
        DRAFTER_LOOP,
        "sequence.verdict = None\n            self._refuse(sequence.sequence_id)",
        "sequence.verdict = None",
        DRAFT_TESTS,
    ),
    Rule(
        "the first of several verdicts is followed",
        DRAFTER_LOOP,
        "sequence.verdict = message",
        "sequence.verdict = sequence.verdict or message",
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
        "self.forest.free.append(self.drafters)",
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
        "a late message ends what began after it",
        DRAFTER_LOOP,
        "for number in later if number >= begun or number in earlier",
        "for number in said",
        DRAFT_TESTS,
    ),
    Rule(
        "a late message has what is over begin again",
        DRAFTER_LOOP,
        "for number in later if number >= begun or number in earlier",
        "for number in later | earlier",
        DRAFT_TESTS,
    ),
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
    # requests over HTTP
    Rule(
        "a client that goes away keeps its row",
        SERVICE,
        "asyncio.wait((working, leaving), return_when",
        "asyncio.wait((working,), return_when",
        LEAVING,
    ),
    Rule(
        "the queue of requests has no end",
        SERVICE,
        "if self.num_in_flight + number > room:",
        "if False:",
        API,
    ),
    Rule(
        "a reader that is slow keeps its place in the queue",
        SERVICE,
        "sum(not answer.is_over for",
        "sum(bool(answer) for",
        LEAVING,
    ),
    Rule(
        "all choices have one seed",
        REQUESTS,
        "(self.params.seed + choice)",
        "self.params.seed",
        PURE,
    ),
    Rule(
        "what is not supported is ignored",
        REQUESTS,
        "return value is False or value in",
        "return value is not None or value in",
        BAD_REQUESTS,
    ),
    Rule(
        "the last tokens of a stream are lost when they show no text",
        RESPONSES,
        "if choice.waiting and (",
        "if False and (",
        PURE,
    ),
    Rule(
        "a chunk without text is sent",
        RESPONSES,
        "if not any(token.text for token in choice.waiting):",
        "if not choice.waiting:",
        PURE,
    ),
    Rule(
        "of alternatives that read alike the last one stands",
        RESPONSES,
        "top.setdefault(choice.decoder.spell(token_id).label, _finite(logprob))",
        "top[choice.decoder.spell(token_id).label] = _finite(logprob)",
        PURE,
    ),
    Rule(
        "log-probabilities are of tokens behind no prompt",
        SERVICE,
        "IncrementalDecoder(tokenizer, prompts[index // plan.num_choices])",
        "IncrementalDecoder(tokenizer)",
        "tests/serving/test_text.py",
    ),
    Rule(
        "a prompt ends in tokens without text, and those before them are forgotten",
        TOKENIZER,
        "            size *= 2\n",
        "            break\n",
        TOKEN_TEXTS,
    ),
    Rule(
        "a token without text is the context of the next one",
        TOKENIZER,
        "        has_context = piece or len(self._window) >= _MAX_WINDOW\n",
        "        has_context = piece is not None\n",
        TOKEN_TEXTS,
    ),
    Rule(
        "a body without a length has no limit",
        GATE,
        'num_bytes += len(message.get("body", b""))',
        "num_bytes += 0",
        BAD_REQUESTS,
    ),
    Rule(
        "any key opens the gate",
        GATE,
        " or not hmac.compare_digest(key.strip(), self._key):",
        ":",
        API,
    ),
    Rule(
        "a server that ends takes new requests",
        GATE,
        "if self.service.is_closing and scope",
        "if False and scope",
        LEAVING,
    ),
    # passes
    Rule(
        "a track reaches beyond the border of keys",
        "amusd/models/numerics.py",
        "1 + num_free // self.track_stride",
        "2 + num_free // self.track_stride",
        "tests/models/test_numerics.py",
    ),
    Rule(
        "rows of a tree see each other",
        "amusd/models/passes.py",
        "row[list(path)] = True",
        "seen[:, list(path)] = True",
        "tests/models/test_tree_pass.py",
    ),
    Rule(
        "of the numbers of rows that agree the least is taken, however slow",
        "amusd/models/eager.py",
        "min(fitting, key=self._time) if has_choice else fitting[0]",
        "fitting[0]",
        "tests/models/test_batch.py",
    ),
    Rule(
        "passes with a fixed width have as many rows as there are tokens",
        "amusd/models/eager.py",
        "self._row_counts.quickest(rows) if is_padded else rows",
        "rows",
        "tests/models/test_batch.py",
    ),
    # drafters
    Rule(
        "a drafter that cannot run ahead is asked to",
        "amusd/config/capabilities.py",
        "    if decoding.mode is not Mode.ASYNCHRONOUS or runs_ahead(kind):\n",
        "    if True:\n",
        "tests/test_capabilities.py",
    ),
    Rule(
        "a target chooses the code that a draft on another machine runs",
        "launch/draft.py",
        "if drafter.factory not in (None, *own):",
        "if False:",
        "tests/drafters/test_custom.py",
    ),
    # the timeline
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
    # published drafters
    Rule(
        "outputs of layers are counted as their inputs",
        LAYOUTS,
        "own, offset = nested, 1",
        "own, offset = nested, 0",
        NETWORK_TESTS,
    ),
    Rule(
        "a block reads the layers below its own", LAYOUTS, "        offset = 1\n", "        offset = 0\n", BLOCKS_TESTS
    ),
    Rule(
        "weights without a place are dropped",
        LAYOUTS,
        "if extra := sorted(given.keys() - expected.keys()):",
        "if extra := []:",
        NETWORK_TESTS,
    ),
    Rule(
        "the first layer never adds to the normed feature",
        NETWORK,
        "residual = normed if self._norm_before_residual else state",
        "residual = state",
        NETWORK_TESTS,
    ),
    Rule(
        "rows always write their state as it is",
        NETWORK,
        "memory.write_features(normed if self._norm_output else hidden)",
        "memory.write_features(hidden)",
        NETWORK_TESTS,
    ),
    Rule(
        "an older state is taken for the latest",
        BLOCKS,
        "self._latest[last], late)",
        "self._latest[last], 0)",
        BLOCKS_TESTS,
    ),
    Rule("the root's own row is one of the guesses", BLOCKS, "else 1\n", "else 0\n", BLOCKS_TESTS),
    Rule(
        "features that are not there are seen",
        BLOCKS,
        "seen = self._known[:position]",
        "seen = self._known[:position] | True",
        BLOCKS_TESTS,
    ),
    Rule(
        "guesses are those of the place before",
        BLOCK,
        "position - self._first",
        "position - self._first + 1",
        BLOCK_TESTS,
    ),
    Rule(
        "guesses under penalties do not depend on the path",
        BLOCK,
        "if not needs_path and position",
        "if position",
        BLOCK_TESTS,
    ),
    # features
    Rule(
        "features are sent again with every verdict",
        CLIENT,
        "self._num_features[sequence.sequence_id] = start = end",
        "start = end",
        FEATURE_TESTS,
    ),
    Rule(
        "features are given to the drafter before the verdict of their tokens",
        "amusd/runtime/draft_sequence.py",
        "if message.end <= base]",
        "if message.end <= base + 9]",
        FEATURE_TESTS,
    ),
    Rule(
        "a drafter that is opened again is not told its features",
        "amusd/runtime/rollback.py",
        "for start, features in self._features:",
        "for start, features in ():",
        FEATURE_TESTS,
    ),
    Rule(
        "rows start from the drafter's own states alone",
        EAGLE,
        "before >= 0 and self._known[before]",
        "False",
        EAGLE_TESTS,
    ),
    Rule("late features change no row", EAGLE, "first < self._num_computed:", "False:", EAGLE_TESTS),
    Rule(
        "the states of the rows before are forgotten",
        EAGLE,
        "continue  # computed earlier: its own state is there",
        "states.append(torch.zeros_like(self._features[0]))",
        EAGLE_TESTS,
    ),
    Rule("it drafts before it knows the prompt", EAGLE, "return self._is_ready", "return True", EAGLE_TESTS),
    Rule(
        "a synchronous tree has no end",
        DRAFT,
        "self._num_steps - self._num_steps_before >= self._max_steps",
        "False",
        "tests/runtime/test_synchronous_trees.py",
    ),
    # processes by hand, on one machine or two
    Rule(
        "the draft's process looks after ranks of the target", NODES, " if rank < num_hosts else range(0)", "", MEMBERS
    ),
    Rule("ranks that are left over have no process", NODES, "if left_over or not each:", "if not each:", MEMBERS),
    Rule(
        "another machine's processes end well where the target found a mistake",
        NODES,
        'return int(told["exit_code"]) if place.is_away else 0',
        "return 0",
        STORE_TESTS,
    ),
    Rule(
        "those that come late wait for a run that is not",
        NODES,
        'store.put("finished", True)  # those that have come late wait for this',
        "pass",
        STORE_TESTS,
    ),
    Rule(
        "a user's mistake that a further rank finds is a failure",
        RANKS,
        "isinstance(error, ConfigError)",
        "False",
        STORE_TESTS,
    ),
    Rule(
        "a target may have several machines",
        STORE,
        'if apart and int(environment["WORLD_SIZE"]) > _FEWEST:',
        "if False:",
        MEMBERS,
    ),
    Rule(
        "a value may stand under another name",
        STORE,
        'f"{self._namespace}/{name}\\0{text}"',
        'f"{self._namespace}\\0{text}"',
        STORE_TESTS,
    ),
    Rule(
        "a value may be of another run",
        STORE,
        'f"{self._namespace}/{name}\\0{text}"',
        'f"{name}\\0{text}"',
        STORE_TESTS,
    ),
    Rule(
        "torchrun's store needs no keys", STORE, "(self.is_by_itself or self.apart)", "self.is_by_itself", STORE_TESTS
    ),
    Rule(
        "the store listens everywhere",
        STORE,
        "socket.create_server((address, port)",
        'socket.create_server(("", port)',
        STORE_TESTS,
    ),
    # many engines
    Rule("an engine whose rank has ended is healthy", RAY, "self._drafts.followers.failure() or ", "", RAY_TESTS),
    Rule("all replicas of a machine take the same cores", RAY, "pin_cores=False", "pin_cores=True", RAY_TESTS),
    # files of answers
    Rule("a file is begun anew", WORKLOAD, "prompts[AnswersFile(config).num_done(prompts) :]", "prompts", FILE_TESTS),
    Rule(
        "answers come in the order in which they end",
        COMPARE,
        "[answers[number].result() for number in range(len(prompts))]",
        "[answer.result() for answer in answers.values()]",
        COMPARE_TESTS,
    ),
    Rule(
        "a rank makes a pass as many times as fast as there are devices",
        DEVICES,
        "more ** math.log2(rank_speedup)",
        "more",
        DEVICE_TESTS,
    ),
    Rule(
        "replicas compute as if each were alone",
        DEVICES,
        "costs=costs.where_other(works=True) if num_engines > 1 else costs, ",
        "",
        DEVICE_TESTS,
    ),
    Rule(
        "drafting is compared with ranks alone",
        DEVICES,
        'max(best["rank"], best["replica"]) - 1',
        'best["rank"] - 1',
        DEVICE_TESTS,
    ),
    # published drafters, once more
    Rule(
        "under the ratio test EAGLE draws as the target does",
        EAGLE,
        'GREEDY if distribution.rule == "rejection" else distribution',
        "distribution",
        EAGLE_TESTS,
    ),
    Rule(
        "a block leaves the features behind it",
        BLOCKS,
        "        self._known[position : position + self._model.block_size] = False  # overwritten\n",
        "",
        BLOCKS_TESTS,
    ),
    # linear layers
    Rule(
        "int8 products overflow on CPUs without VNNI",
        LINEAR,
        "return _LARGEST_INT8 if has_vnni else _LARGEST_WITHOUT_VNNI",
        "return _LARGEST_INT8",
        INT8_TESTS,
    ),
    Rule(
        "a model is tried with one number of rows",
        "amusd/models/self_test.py",
        "for rows in (1, 3, 8):",
        "for rows in (1,):",
        "tests/models/test_quantization.py",
    ),
    Rule(
        "kernels from a hub run",
        "amusd/models/huggingface.py",
        "    is_kernels_available.cache_clear()\n",
        "",
        "tests/models/test_quantization.py",
    ),
    Rule("float16 is taken for weights that it rounds", LINEAR, " and fits_fp16(matrix):", ":", LINEAR_TESTS),
)
