"""Seeded defects, each with the tests that must notice it."""

from __future__ import annotations

from mutation.runner import Rule

DEFECTS: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("amusd/answer.py", "tests/runtime/test_batches.py"): {
        "the last reader comes first": ("reference = self._queue.popleft()", "reference = self._queue.pop()"),
    },
    ("amusd/answer.py", "tests/test_turns.py"): {
        "an answer that nobody can read is computed on": (
            "(answer := reference()) is None or answer.is_over:\n                self",
            "(answer := reference()) is not None and answer.is_over:\n                self",
        ),
        "what an interrupted admission has begun goes on": (", *self._worker.sequences]", "]"),
        "nobody hears that an answer is cancelled": (
            "        if not self.is_over:\n            self.is_over = True\n            self.on_news()",
            "        self.is_over = True",
        ),
        "a signal handler may use the worker amid a pass": ("            if self._in_use:", "            if False:"),
        "a fork may ask": ("if os.getpid() != self._pid:\n            raise", "if False:\n            raise"),
    },
    ("amusd/async_engine.py", "tests/test_turns.py"): {
        "an engine is closed amid a pass": (
            "            await asyncio.to_thread(self._thread.join)\n",
            "            pass\n",
        ),
    },
    ("amusd/commands/compare.py", "tests/commands/test_compare.py"): {
        "answers are not in the order of their prompts": (
            "[answer.result() for answer in answers]",
            "[answer.result() for answer in reversed(answers)]",
        ),
        "the answers between turns are not plain decoding's": ("sampling, decoding=self.plain.decoding)", "sampling)"),
    },
    ("amusd/config/capabilities.py", "tests/test_config.py"): {
        "a drafter that cannot run ahead is asked to": (" and not capabilities_of(kind).runs_ahead:", " and False:"),
    },
    ("amusd/config/decoding.py", "tests/test_config.py"): {
        "a temperature is so low that logits overflow": ("not 0 < self.temperature < MIN_FACTOR", "True"),
        "more candidates may be asked for than there may be": ("self.min_candidates <= self.max_lookahead, ", "True, "),
    },
    ("amusd/settings.py", "tests/test_config.py"): {
        "a key that is none is passed over": ("if name not in _hints_of(cls):", "if False:"),
        "a number of NumPy's is none": ('hasattr(value, "item")', "False"),
    },
    ("amusd/drafters/chain.py", "tests/drafters/test_together.py"): {
        "a sequence without numbers keeps others from proposing": (
            "            say_not_finite(error)\n",
            "            raise\n",
        ),
    },
    ("amusd/drafters/chain.py", "tests/drafters/test_cascade.py"): {
        "rows of choices that are dropped are sent": ("            del self._drawn[num_drawn:]\n", ""),
    },
    ("amusd/drafters/chain.py", "tests/runtime/test_rollback.py"): {
        "the cache keeps what the text no longer begins with": ("(self._cache.length, same, ", "(self._cache.length, "),
        "a step compares the whole text": (
            "self._base = len(self._committed)\n        return",
            "self._base = 0\n        return",
        ),
    },
    ("amusd/drafters/block.py", "tests/drafters/test_formulas.py"): {
        "a computed node that becomes the root is not scored": ("root is not self._scored", "nodes[0] is root"),
        "guesses are those of the place before": ("place = len(path)", "place = len(path) + 1"),
        "guesses under penalties do not depend on the path": ("not self._ranking.needs_context and place", "place"),
    },
    ("amusd/drafters/block.py", "tests/fake_cuda/test_waits.py"): {
        "guesses are waited for without a deadline": ("model.device, fetch=self._fetch)", "model.device)"),
        "a block's largest scores are waited for without a deadline": (
            "self._fetch(self._scores.float().amax(1))",
            "self._scores.float().amax(1).cpu()",
        ),
    },
    ("amusd/models/kv_cache.py", "tests/fake_cuda/test_waits.py"): {
        "slots are copied while the host waits": ("return send(slots, ", "return Tensor.to(slots, "),
    },
    ("amusd/drafters/eagle.py", "tests/drafters/test_formulas.py"): {
        "features of another text are kept": ("num_common(self.committed, token_ids[:-1])", "len(token_ids)"),
        "rows start from the drafter's own states alone": ("before >= 0 and self._known[before]", "False"),
        "late features change no row": ("first <= self._num_computed:", "False:"),
        "the states of the rows before are forgotten": (
            "continue  # computed earlier: its own state is there",
            "states.append(torch.zeros_like(self._features[0]))",
        ),
        "it drafts before it knows the prompt": ("self.is_ready = len(token_ids) == 1", "self.is_ready = True"),
        "under the ratio test EAGLE draws as the target does": ("draws = False", "draws = True"),
    },
    ("amusd/drafters/eagle.py", "tests/drafters/test_contract.py"): {
        "a row reads what another node left in its parent's slot": ("needs_parent = True", "needs_parent = False"),
        "the row of a lone first token is seen for ever": ("if not self._first_position:", "if False:"),
    },
    ("amusd/drafters/ngram.py", "tests/drafters/test_ngram_cache.py"): {
        "the first occurrence is looked up": ("index, end = matches[0]", "index, end = matches[-1]"),
        "a loop ends at the end of the context": ("[offset % len(following)]", "[min(offset, len(following) - 1)]"),
    },
    ("amusd/drafters/synthetic.py", "tests/runtime/test_synthetic.py"): {
        "the next step takes the model's own tokens back": ("self.text.token_ids[start:] = tokens", "pass"),
    },
    ("amusd/drafters/tree.py", "tests/drafters/test_tree.py"): {
        "slots of nodes that are gone are not freed": ("._free.append(self._paths.pop(node)[-1])", "._paths.pop(node)"),
    },
    ("amusd/checkpoints/transformers_models.py", "tests/models/test_quantization.py"): {
        "kernels from a hub run": ("    is_kernels_available.cache_clear()\n", ""),
    },
    ("amusd/checkpoints/draft_networks.py", "tests/models/test_block_models.py"): {
        "an older state is taken for the latest": ("score(self._feature, late)", "score(self._feature, 0)"),
        "the root's own row is one of the guesses": ("else 1\n", "else 0\n"),
        "features that are not there are seen": ("self._known[:position], self", "self._known[:position] | True, self"),
        "a block keeps old features after its end": ("] = False  # overwritten", "] &= True  # overwritten"),
    },
    ("amusd/checkpoints/draft_layouts.py", "tests/models/test_block_models.py tests/models/test_eagle.py"): {
        "a block reads the layers below its own": ('"target_layer_ids" else 1)', '"target_layer_ids" else 0)'),
        "two places for one setting may differ": (
            "found.setdefault(name, value) != value",
            "found.setdefault(name, value) is None",
        ),
        "weights without a place are dropped": ("len(layers)), all_given=True)", "len(layers)))"),
    },
    ("amusd/checkpoints/checkpoint.py", "tests/models/test_loading.py"): {
        "a bias that nobody reads is dropped": ("if name not in read and ", "if False and name not in read and "),
        "files of an index may be missing": ("names[0] not in (_WEIGHTS, *others) or ", ""),
    },
    ("amusd/checkpoints/tokenizer.py", "tests/models/test_loading.py"): {
        "an end token may be text": ("if any(type(each) is not int for each in ids):", "if False:"),
    },
    ("amusd/checkpoints/building.py", "tests/models/test_loading.py"): {
        "tied weights are compared with themselves": (
            "len(ends) == 1 or torch.equal(*ends)",
            "torch.equal(ends[0], ends[-1])",
        ),
    },
    ("amusd/models/recurrent.py", "tests/models/test_recurrent.py"): {
        "a state at the end of a prompt is changed in place": (
            "if num_final == 0 or is_far or start in self.kept:",
            "if False:",
        ),
        "candidates change the state after the final rows": (
            "= copied(self.state[layer])",
            "= self.state[layer]",
        ),
        "states outlive the tokens that they have taken in": (
            "for place, state in self.states.items() if place <= length}",
            "for place, state in self.states.items()}",
        ),
    },
    ("amusd/checkpoints/recurrent_layers.py", "tests/models/test_recurrent.py"): {
        "layers compute several tokens at once where that is wrong": ("(number, self.most_rows)", "(number, None)"),
    },
    ("amusd/checkpoints/settled.py", "tests/checkpoints/test_settled.py"): {
        "a later timing may change what was chosen": ("    dtype = _kept_in(file)\n", "    dtype = None\n"),
        "the last writer of a choice wins": ("return _kept_in(file) or dtype", "return dtype"),
        "mixtures of experts are padded": ('"fixed" if reason is None else "bucketed"', '"fixed"'),
    },
    ("amusd/runner/eager.py", "tests/runner/test_batch.py"): {
        "passes with a fixed width have as many rows as there are tokens": (
            "self._row_counts.quickest(num_rows) if is_padded else num_rows",
            "num_rows",
        ),
    },
    ("amusd/checkpoints/draft_networks.py", "tests/models/test_eagle.py"): {
        "the first layer never adds to the normed feature": ("= feature if self.norm_before_residual else ", "= "),
        "rows always write their state as it is": ("(normed if self.norm_output else hidden)", "(hidden)"),
    },
    ("amusd/models/fused.py", "tests/runner/test_process_group.py"): {
        "parts are added in the order of their arrival": ("first, *others = parts", "*others, first = parts"),
    },
    ("amusd/models/attention.py", "tests/models/test_decoder.py"): {
        "a window is a position too wide": ("else self.size - 1)", "else self.size)"),
        "a chunk is taken for a window": ('is_chunk=local_size != getattr(config, "sliding_window", None)', ""),
    },
    ("amusd/models/row_attention.py", "tests/models/test_decoder.py"): {
        "rows see before their windows": ("if firsts is not None:\n        seen", "if False:\n        seen"),
    },
    ("amusd/models/decoder.py", "tests/models/test_sharding.py"): {
        "features of rows that other ranks add up": (
            "self.ranks.whole(hidden[own].clone(), len(hidden))",
            "hidden.clone()",
        ),
    },
    ("amusd/models/linear.py", "tests/models/test_linear.py"): {
        "int8 products overflow on CPUs without VNNI": (" if has_vnni else _LARGEST_WITHOUT_VNNI", ""),
        "float16 is taken for weights that it rounds": (" and fits_fp16(weights.matrix))", ")"),
    },
    ("amusd/models/numerics.py", "tests/models/test_numerics.py"): {
        "a track reaches beyond the border of keys": ("1 + num_free", "2 + num_free"),
    },
    ("amusd/models/passes.py", "tests/drafters/test_tree.py"): {
        "rows of a tree see each other": ("row[list(branch)] = np", "seen[:, list(branch)] = np"),
    },
    ("amusd/runner/row_counts.py", "tests/runner/test_batch.py"): {
        "of the numbers of rows that agree the least is taken, however slow": ("if rows <= self._width ", "if False "),
    },
    ("amusd/runner/captured.py", "tests/fake_cuda/test_start.py"): {
        "a prompt's rows have no token before them": (
            ", slots, (positions - 1).clamp_(min=0) + cache.first)",
            ", slots)",
        ),
    },
    ("amusd/runner/captured.py", "tests/fake_cuda/test_late.py"): {
        "tokens are read before they are on the host": (
            "        self._model.wait()\n        outputs = []",
            "        outputs = []",
        ),
        "inputs are written again while they are sent": (
            "        buffer = None",
            "        self._inputs._write_padding(count, 1)\n        buffer = None",
        ),
    },
    ("amusd/runner/model_runner.py", "tests/runner/test_ranks.py"): {
        "ranks may compute in different dtypes": ("if dtype != (own := self.options.dtype):", "if False:"),
        "what is left of an interrupted pass meets the next one": (
            "                self.ranks.abort()  # pending exchanges would mix with the next pass\n",
            "                pass\n",
        ),
    },
    ("amusd/runner/pass_buffer.py", "tests/runner/test_contract.py"): {
        "what an interrupted pass has written to the table is not sent": ("self._unsent += [", "self._unsent = ["),
    },
    ("amusd/runner/fallback.py", "tests/fake_cuda/test_fallback.py"): {
        "passes that differ from plain ones are used": ("if difference <= limit:", "if True:"),
        "damaged weights count as a wrong kernel": ("if not expected.isfinite().all() or", "if"),
    },
    ("amusd/runner/graphs.py", "tests/fake_cuda/test_late.py"): {
        "an event is not waited for": ("while not event.query():", "while False:"),
        "a copy is read before it is on the host": ("    wait()\n    return on_host", "    return on_host"),
    },
    ("amusd/runner/graphs.py", "tests/fake_cuda/test_fallback.py"): {
        "a capture that fails hides its cause": ("error.__context__ or error", "error"),
        "a capture that fails leaves its stream current": ("device), torch.cuda.stream(stream):", "device):"),
    },
    ("amusd/runner/self_test.py", "tests/models/test_quantization.py"): {
        "a model is tried with one number of rows": ("(_in_batches, _in_paths)), (several, (_in_batches,))", "()),"),
    },
    ("amusd/checkpoints/tokenizer.py", "tests/checkpoints/test_text_of_tokens.py"): {
        "a prompt ends in tokens without text, and those before them are forgotten": ("size *= 2\n", "break\n"),
        "the end of a prompt is given again": (
            "tokenizer.decode(self._window)[self._num_given :] if self._is_holding",
            '"" if self._is_holding',
        ),
        "a token without text is the context of the next one": ("or len(self._window) >= _MAX_WINDOW", "is not None"),
    },
    ("amusd/policies/estimates.py", "tests/policies/test_estimates.py"): {
        "a step that was held up makes rows dear": ("if num >= 1 and ns", "if num < 0 and ns"),
        "passes that stay slow are stalls for ever": ("tuple(ROW_MEMORY * past for", "tuple(1.0 * past for"),
        "a row may cost more than a pass": ("= min(max(0.0, slope), most_ns)", "= max(0.0, slope)"),
        "uneven passes are waited for as even ones": ("due_ns + DEVIATIONS * self._deviation_ns", "due_ns"),
        "a pass begins with the first candidates only": ("if self._pass_start_ns is None:", "if False:"),
    },
    ("amusd/policies/estimates.py", "tests/policies/test_policies.py"): {
        "waits in vain are never forgotten": ("        self._seconds *= FORGETTING\n", ""),
        "a stall counts in full": ("seconds = min(seconds, self.longest_seconds)", "seconds = seconds * 1"),
        "a stalled step is taken for the usual one": ("min(self._step_seconds or math.inf, step_", "max(0.0, step_"),
        "candidates after a rejected one count as tested": (
            "(outcome.num_accepted < outcome.num_judged)",
            "(outcome.num_judged - outcome.num_accepted)",
        ),
        "a draft that is too modest is corrected upwards": ("min(1.0, self._corr", "max(0.0, self._corr"),
    },
    ("amusd/policies/factory.py", "tests/test_engine.py"): {
        "a reference of no model's tokens is sent": ("<= token_id < vocab_size for", "<= vocab_size for"),
    },
    ("amusd/policies/factory.py", "tests/policies/test_own_policy.py"): {
        "a decision that is no number reaches other answers": ("getattr(decision, name), Real)", "0, Real)"),
    },
    ("amusd/policies/observer.py", "tests/policies/test_estimates.py"): {
        "a pause that pays does not grow": ("min(4 * self._pause_passes, LONGEST)", "self._pause_passes"),
        "a pause that does not pay is soon tried again": (
            "min(2 * max(self._drafting_passes, FIRST_DRAFTING), LONGEST)",
            "FIRST_DRAFTING",
        ),
    },
    ("amusd/policies/observer.py", "tests/policies/test_observer.py"): {
        "a stopped process seems to draft slowly": (
            "without_stall((times.end_ns - last_end_ns) / 1e9, self._seconds)",
            "(times.end_ns - last_end_ns) / 1e9",
        ),
        "a stopped process seems to need long passes": ("without_stall(times.duration_ns", "max(times.duration_ns"),
        "a draft is silent into the next answer": (
            "self._vain_at: int | None = None",
            'self._vain_at = vars(self).get("_vain_at")',
        ),
        "a wait is judged by the usual one": ("NEARLY * allowed_seconds", "NEARLY * waits.longest_seconds"),
        "a draft that is silent stays so when it brings more": (" and num_candidates <= self._vain_at", ""),
        "passes without a draft count as its own": ("        if has_draft:\n", "        if True:\n"),
        "the time between two answers is the pass's": (
            "self._last_end_ns: int | None = None",
            'self._last_end_ns = vars(self).get("_last_end_ns")',
        ),
    },
    ("amusd/policies/schedules.py", "tests/policies/test_policies.py"): {
        "auto waits for a draft that is silent": ("not view.can_grow or view.waited_in_vain", "not view.can_grow"),
        "a row costs what is committed with the draft, though alone it is more": (
            ", view.plain_tokens_per_second)",
            ", 0.0)",
        ),
        "a wait costs a sequence more than its time": ("max(view.gain - loss, -delay)", "view.gain - loss"),
        "the synchronous target has no deadline": ("not is_whole and seconds_left > 0", "not is_whole"),
    },
    ("amusd/policies/schedules.py", "tests/runtime/test_batches.py"): {
        "blocks are verified before all have come": ("Wait(seconds_left, worth=math.inf)  #", "Wait(seconds_left)  #"),
    },
    ("amusd/protocol/draft_session.py", "tests/protocol/test_fuzz.py tests/protocol/test_sessions.py"): {
        "an opening with too many tokens is taken": ("not 1 <= len(opening.token_ids) <= opening.max_length", "False"),
        "a verdict may change what was committed": ("tuple(self._prefix.token_ids[verdict.start :]) !", "() and () !"),
        "a verdict for an earlier incarnation is taken in": ("and verdict.incarnation == self.opening.incarnation", ""),
        "a chain says that it has ended, again and again": ("(self._said_no_more and not", "(not"),
    },
    ("amusd/protocol/draft_session.py", "tests/model_checking/test_transitions.py"): {
        "every node claims to follow the root": ("node.parent.number if node.parent else 0", "0"),
        "numbers are given twice": ("= verdict.epoch\n", "= verdict.epoch\n            self._next_number = 1\n"),
        "the draft does not notice that something was lost": ("if verdict.epoch > self.epoch:", "if False:"),
        "an old verdict is applied again": (" > (self.base, self.epoch)", " > (0, 0)"),
    },
    ("amusd/protocol/draft_session.py", "tests/runtime/test_draft_worker.py"): {
        "a message of any length is made": ("self.tree.unsent[:MAX_OFFERED]", "self.tree.unsent[:]"),
    },
    ("amusd/protocol/draft_tree.py", "tests/protocol/test_sessions.py"): {
        "the draft runs no further ahead after a verdict": (
            "self._limit = min(",
            'self._limit = vars(self).get("_limit") or min(',
        ),
    },
    ("amusd/protocol/draft_tree.py", "tests/protocol/test_trees.py"): {
        "what was looked up is guessed again": ("            if token_id in known:\n                continue\n", ""),
        "an unlikely guess is forgotten for good": ("unmade.append((token_id, weight))", "pass"),
        "probabilities stay relative to the old root": ("            node.probability /= root.probability\n", ""),
        "a tree that has much ready is as needy as one that has nothing": (" / (1.0 + self._num_ready)", ""),
        "what is ready is not counted again after a verdict": ("self._num_ready += node.probability\n            ", ""),
        "nodes may stand at the last position": ("min(opening.max_length - 1,", "min(opening.max_length,"),
    },
    ("amusd/protocol/draft_tree.py", "tests/model_checking/test_transitions.py"): {
        "the tree is kept after a token that was not in it": (
            "node if is_foreseen else _root(",
            "node if True else _root(",
        ),
        "what was lost is not offered again": ("self.unsent = offered + self.unsent", "pass"),
    },
    ("amusd/protocol/draft_tree.py", "tests/runtime/test_branching.py"): {
        "a synchronous tree has no end": ("self._num_steps - self._num_steps_before >= max_steps", "False"),
    },
    ("amusd/protocol/target_session.py", "tests/protocol/test_sessions.py tests/protocol/test_fuzz.py"): {
        "candidates of an earlier incarnation are taken": ("and candidate.incarnation == self._incarnation", ""),
        "the draft still restarts when a verification has begun": (")\n        self._contradicted = False\n", ")\n"),
        "the end of the answer is not told": ("if ends or not self.remaining", "if not self.remaining"),
        "a block may fill the text": ("min(max_candidates, self.remaining - 1)", "min(max_candidates, self.remaining)"),
        "an incarnation may come again": ("if incarnation <= self._incarnation", "if incarnation < self._incarnation"),
        "a draft that is done is waited for": ("(self._draft_more or self._draft_base < self._prefix.length)", "True"),
        "a parent may follow its child": ("not 0 <= parent < candidate.first + index", "parent < 0"),
    },
    ("amusd/protocol/target_session.py", "tests/model_checking/test_transitions.py"): {
        "the tree is kept over a restart of the draft": ("        self.detach()\n", ""),
        "a loss is not noticed": ("self.epoch += candidate.first > self._next_number", "pass"),
    },
    ("amusd/protocol/candidate_tree.py", "tests/model_checking/test_transitions.py"): {
        "what follows a token that was not committed stays": (
            "is_contradicted, self.children = bool(self.children), {}",
            "is_contradicted = bool(self.children)",
        ),
        "what was committed is forgotten": ("nodes[node.number] = node\n            self.children", "self.children"),
        "the draft's own token is not compared with the committed one": ("] != node.token_id", "] is None"),
        "a node without a parent is placed after the committed text": ("node.position = base ", "node.position = end "),
        "an orphan is placed after the base": ("(above is None and parent) or", ""),
    },
    ("amusd/protocol/candidate_tree.py", "tests/protocol/test_trees.py"): {
        "a node at the base of the draft is forgotten": ("if node.position >= base}", "if node.position > base}"),
        "the number of a node that is offered again is the old one": ("max(known.number, node.number)", "known.number"),
        "the least likely child makes the path": ("path.append(max(", "path.append(min("),
        "unlikely alternatives are verified": (" and -guesses[0][0] >= min_chance", ""),
    },
    ("amusd/protocol/wire.py", "tests/test_layering.py"): {
        "bytes may become code": ("import zlib\n", "import pickle\nimport zlib\n"),
        "the protocol needs torch": ("import zlib\n", "import torch\nimport zlib\n"),
        "the protocol knows of links": ("import zlib\n", "import zlib\nfrom amusd import transport\n"),
    },
    ("amusd/protocol/wire.py", "tests/protocol/test_wire.py"): {
        "a message may come in other bytes than its own": ("if _ENCODER.encode(message) != body", "if False"),
        "a sender may send what nobody takes": ("        _DECODER.decode(body)  # the ", "        # the "),
        "damage is not noticed": ("[0] != zlib.crc32(sealed)", "[0] is None"),
        "endless nesting ends the reader": (" RecursionError,", ""),
    },
    ("amusd/protocol/verification.py", "tests/protocol/test_trees.py"): {
        "the path of a verification ends at its second row": (
            "            rows.append(row)\n        return tuple(rows)",
            "            return (*rows, row)\n        return tuple(rows)",
        ),
        "a late candidate is not counted": ("and not self.num_accepted_alternatives", "and False"),
        "rows of one position share a track": ("                taken.add(track)\n", ""),
        "a rejected candidate counts as said by the draft": ('["target"] * (len(', '["candidate"] * (len('),
    },
    ("amusd/runtime/draft_client.py", "tests/runtime/test_batches.py tests/runtime/test_draft_client.py"): {
        "a draft that serves others is waited for in each pass": ("sequence.at_draft.waited_ns += waited_ns", "pass"),
        "an absent draft is silent": (" or self.connection.link is None", ""),
        "a draft that is lost amid its openings is back": ("is None:  # lost again", "is False:  # lost again"),
        "what the link takes counts as silence": ("default=0.0) + self.round_trip_seconds", "default=0.0)"),
        "a silent draft is told of each pass": ("if is_due or self.has_draft(sequence):", "if True:"),
        "a draft that never answered is not told its opening again": (
            "if is_due and not state.is_answered",
            "if False",
        ),
        "the draft is silent although it spoke": (
            "        else:\n            self.connection.silence.end()\n\n    def _receive_counts",
            "\n    def _receive_counts",
        ),
        "a sign of work has the final counts": (
            "            if silence.on_sign(",
            "            self._sequences[number].receive_counts(message)\n            if silence.on_sign(",
        ),
        "the draft's counts are given to no sequence": ("closed.receive_counts(message)", "pass"),
        "the target names a sequence that it closes": ("        self._sequences.pop(number, None)\n", ""),
    },
    ("amusd/runtime/connection.py", "tests/runtime/test_draft_client.py"): {
        "a draft that talks nonsense is kept": ("if self.silence.num_nonsense >= MAX_NONSENSE:", "if False:"),
        "the silence and nonsense of a draft are held against the next one": ("        self.silence.end()\n", ""),
        "the link of a lost draft stays open": ("self.link.drop()\n        self.link = None", "self.link = None"),
        "an absent draft is lost again": ("        if self.link is None:  # the next", "        if False:  # the next"),
    },
    ("amusd/runner/process_group.py", "tests/runner/test_process_group.py"): {
        "an exchange begins though a rank is lost": (
            "        self.check()\n        try:\n            work",
            "        try:\n            work",
        ),
    },
    ("amusd/transport/zeromq.py", "tests/transport/test_zeromq.py"): {
        "a second peer is left waiting": ("if self.answer_to_others is not None:", "if False:"),
        "a connection that says nothing is the peer's": ("self._peer_fds &= {", "{"),
    },
    ("amusd/transport/factory.py", "tests/transport/test_contract.py"): {
        "the delay of the settings is passed over": ("link.delay_seconds = config.delay_ms / 1e3", "pass"),
    },
    ("amusd/transport/torch_distributed.py", "tests/transport/test_torch_distributed.py"): {
        "a lost peer ends the process": ("    os.environ.update(NCCL_SETTINGS)\n", ""),
    },
    ("amusd/runtime/target_sequence.py", "tests/runtime/test_features.py tests/runtime/test_draft_client.py"): {
        "features that the draft has are sent again": ("max(0, min(followed.at_draft.num_features, shared))", "0"),
    },
    ("amusd/runtime/client_sequence.py", "tests/runtime/test_features.py tests/runtime/test_draft_client.py"): {
        "a lost draft stays attached": ("        self.session.detach()\n", ""),
        "a new draft is taken to have the features of the one before": (" and state.incarnation == incarnation", ""),
        "a draft that joins late is told the whole reference": (
            "[session.committed_length - session.prompt_length :]",
            "",
        ),
    },
    ("amusd/runtime/draft_client.py", "tests/runtime/test_features.py tests/runtime/test_draft_client.py"): {
        "features leave no room for other messages": (
            "not link.has_room(2 * len(data))",
            "not link.has_room(len(data))",
        ),
        "features are sent again with every verdict": ("            state.num_features = end\n", ""),
    },
    ("tests/model_checking/protocol_model.py", "tests/model_checking/test_exploration.py"): {
        "I1: a new incarnation takes a token back": ("committed=target.committed,", "committed=target.committed[:-1],"),
        "I2: candidates are committed unjudged": (
            "return (0,) * min(num_accepted + 1, self.room(target))",
            "return (*target.block, 0)[: self.room(target)]",
        ),
        "I4: a verdict is taken for news from its start on": (".values[base - verdict.start :]", ".values"),
        "I5: two tokens of its own end a block": ("min(num_accepted + 1, self.room(target))", "(num_accepted + 2)"),
        "I6: nobody looks at the incarnation": (" and candidate.incarnation == target.incarnation", ""),
        "I6: what follows a rejected candidate is kept": (" and node.path[: len(values)] == values", ""),
        "I6: an orphan is placed after the text": (
            "        else:\n            return target\n",
            "        else:\n            position = len(target.committed)\n",
        ),
        "L1: no pass without a candidate": ("((), *sorted(paths))", "sorted(paths)"),
        "no refusal: a verdict carries the last token alone": (
            "target.draft_base, target.committed[target.draft_base :])",
            "len(target.committed) - 1, target.committed[-1:])",
        ),
    },
    ("amusd/runtime/draft_client.py", "tests/faults/test_simulation.py"): {
        "liveness: a silent draft is never reminded": ("state.take_reminder(self.recorder.now_ns())", "False"),
    },
    ("amusd/runtime/target_sequence.py", "tests/faults/test_simulation.py"): {
        "L1: the target does not go on without a candidate": (
            "        if isinstance(decision, Wait) and not (has_draft and decision.seconds > 0):",
            "        if not (has_draft or view.num_candidates):\n            decision = Wait(0.05)\n        if False:",
        ),
    },
    ("amusd/runtime/verifier.py", "tests/faults/test_simulation.py"): {
        "tracks are counted from the row after the first": (
            "tracks_at(session.committed_length - 1)",
            "tracks_at(session.committed_length)",
        ),
    },
    ("amusd/protocol/wire.py", "tests/faults/test_simulation.py"): {
        "damage is believed": ("!= zlib.crc32(sealed)", "is None"),
    },
    ("amusd/runtime/patience.py", "tests/runtime/test_draft_client.py"): {
        "reminders come at equal intervals": ("self._pause_ns *= 2", "self._pause_ns *= 1"),
        "a draft that was stopped with its target is lost": ("if self.is_too_long and not was_too_long:", "if False:"),
        "the first prompts have no time of their own": ("+ TAKE_IN_SECONDS * num_new_tokens", ""),
    },
    ("amusd/runtime/patience.py", "tests/runtime/test_connection.py"): {
        "the back-off does not double": ("2 ** (number - 2)", "1"),
        "a draft that worked for long is given up": ("if now >= self._steady_at:", "if False:"),
    },
    ("amusd/runtime/hello.py", "tests/runtime/test_connection.py"): {
        "a draft without the drafter that is named is taken": ("sorted({*wanted} - {*draft.drafters})", "sorted(())"),
    },
    ("amusd/runtime/connection.py", "tests/runtime/test_connection.py tests/runtime/test_draft_process.py"): {
        "the last words of a draft are not heard": ("for _ in range(MAX_LAST_WORDS):", "for _ in range(0):"),
        "a next draft that does not fit is started again": (
            'self._gave_up = f"the next draft is refused: {error}"',
            "self._search(str(error), was_met=False)",
        ),
        "the link of a draft that fails leaks": ("            self._arriving.drop()\n", ""),
        "a draft that hangs before its hello is left alone": ("self.clock.now() + FAREWELL_SECONDS", "math.inf"),
        "a hello of another draft is taken": ("if hello.incarnation != self._hello.incarnation:", "if False:"),
        "a first draft that ends by itself is started again": ("end.code >= 0", "end.code > 99"),
        "a server that is away is given up": ("counts = was_met or self.source.process is not None", "counts = True"),
        "a restart without descriptors is fruitless": (
            "self._restarts.not_before = now + START",
            "raise PeerLostError  # START",
        ),
        "a draft of use is not worth a restart": ("            self._restarts.on_accepted()\n", "            pass\n"),
    },
    ("amusd/runtime/devices.py", "tests/runtime/test_devices.py"): {
        "two workers may share a GPU in silence": ("if count > 1 and", "if count > 2 and"),
        "a draft elsewhere shares a GPU of this machine": (" and config.draft_address is None", ""),
        "what a setting asks for is warned of": ("if not config.hardware.devices and (shared", "if (shared"),
    },
    ("amusd/runtime/draft_server.py", "tests/launch/test_draft.py"): {
        "a stranger without a hello keeps the link": ("if link.num_rejected:", "if False:"),
    },
    ("amusd/runtime/draft_server.py", "tests/runtime/test_devices.py"): {
        "caches take more than there is": ("if needed > most:", "if False:"),
    },
    ("amusd/runtime/draft_server.py", "tests/runtime/test_draft_process.py"): {
        "what is wrong with one target ends the draft for all": ("if code != FAILED and not self.is_own:", "if False:"),
    },
    ("amusd/runtime/draft_server.py", "tests/runtime/test_recurrent_pair.py"): {
        "a draft does not say that it drafts chains": ("if not made[0].drafts_trees)", "if False)"),
    },
    ("amusd/runtime/draft_sequence.py", "tests/runtime/test_draft_worker.py"): {
        "work is not counted": ("self.busy_ns += end_ns - start_ns", "pass"),
    },
    ("amusd/runtime/draft_worker.py", "tests/runtime/test_draft_worker.py"): {
        "the rest of a long block is kept": (
            "while (candidate := sequence.offer())",
            "if (candidate := sequence.offer())",
        ),
        "any drafter takes over the next sequence": ("opening.follows if opening.follows in free else", ""),
        "a drafter goes on with any sequence": ("if last != opening.follows:", "if False:"),
        "a sequence whose end was lost keeps its drafter": ("self._is_over(number):", "False:"),
        "a drafter is not given back": (
            "        self._free[sequence.drafter_name][sequence.sequence_id] = sequence.manager.drafter\n",
            "",
        ),
        "a draft at long work says nothing": (">= SIGN_NS", ">= 10**18"),
        "each sequence is charged a whole step": ("step_ns, begin_ns, end_ns", "step_ns, start_ns, end_ns"),
        "what a verdict prepared is not sent at once": ("if is_news:", "if False:"),
        "an impossible verdict is answered by silence": ("\n            self._post(Refused(sequence.sequence_id))", ""),
        "the first of several verdicts is followed": (".verdict = message", ".verdict = sequence.verdict or message"),
        "a step waits as long as any sequence would": ("patience = min(", "patience = max("),
        "a late message ends what began after it": ("in later if number >= begun or number in earlier", "in said"),
        "a late message has what is over begin again": ("in later if number >= begun or number in ", "in later | "),
    },
    ("amusd/runtime/rollback.py", "tests/drafters/test_formulas.py"): {
        "looked-up tokens lack their distributions": ('if self.distribution.rule != "rejection":', "if True:"),
    },
    ("amusd/runtime/draft_worker.py", "tests/runtime/test_features.py"): {
        "what comes together with the end is dropped": ("self._roll_back(sequence)  # a last", "pass  # a last"),
        "features for another incarnation are taken": (
            "sequence is not None and message.incarnation == self.incarnation",
            "sequence is not None",
        ),
    },
    ("amusd/runtime/rollback.py", "tests/runtime/test_features.py tests/runtime/test_rollback.py"): {
        "features that are no numbers are taken": ("if not rows.isfinite().all():", "if False:"),
        "features are given to the drafter before the verdict of their tokens": (
            "if message.end <= self.session.base]",
            "if message.end <= self.session.base + 9]",
        ),
        "a drafter that is opened again is not told its features": ("features in self._taken:", "features in ():"),
        "a drafter that fails is not opened again": ("self._reopen()\n        return", "raise\n        return"),
        "a drafter may disagree with its session": ("if self.drafter.length != self.session.base:", "if False:"),
    },
    ("amusd/runtime/target_worker.py", "tests/runtime/test_batches.py tests/runtime/test_prefix_caching.py"): {
        "a prompt that comes in alone is taken in by chunks": ("if len(self.sequences) > 1:", "if True:"),
        "a prompt is taken in at once whoever waits": ("if len(self.sequences) > 1:", "if False:"),
        "an admission that fails takes a slot": (
            "self.client.open(sequence)  #",
            "self.sequences.append(sequence), self.client.open(sequence), self.sequences.pop()  #",
        ),
        "prompts that come together take more than a chunk of a step": ("if end - start > num_left:", "if False:"),
        "the cache of a slot keeps what it held": ("cache.truncate(num_cached)", "pass"),
        "a part of a chunk is taken over": (" // chunk * chunk", ""),
        "a prompt's last token is not computed": ("prompt[:-1]) //", "prompt) //"),
        "any prompt takes the cache that holds most of it": (" if 2 * shared[cache] >= len(held[cache]) else 0", ""),
        "the most recently used cache is given away": (
            "for cache, before in self._free_caches.items()}",
            "for cache, before in reversed(self._free_caches.items())}",
        ),
    },
    ("amusd/runtime/target_sequence.py", "tests/runtime/test_prefix_caching.py"): {
        "rows of an answer are taken over for those of a prompt": (
            "self.request.prompt if self.model.numerics.fixed else self.session.committed",
            "self.session.committed",
        ),
        "what a cut prompt would have held is taken over": ("known[:-1][: self.cache.length]", "known[:-1]"),
    },
    ("amusd/runner/model_runner.py", "tests/runner/test_contract.py"): {
        "sequences of a memory share their bias": ("self._sampling[memory], cache.number", "self._sampling[memory], 0"),
        "a chunk of a prompt is written beside rows of other positions": ("cache.put_in_order()", "pass"),
    },
    ("amusd/runtime/target_worker.py", "tests/runtime/test_not_finite.py"): {
        "a pass that is not finite ends every answer": (
            "                sequence.error = error\n                self.end(sequence)",
            "                raise",
        ),
    },
    ("amusd/runtime/verifier.py", "tests/runtime/test_not_finite.py"): {
        "the next answer goes on from what is no number": ("cache.truncate(0)  # the prompt's", "pass  # the prompt's"),
    },
    ("amusd/runtime/target_worker.py", "tests/runtime/test_gathering.py"): {
        "a pass waits for each of its sequences": (
            "or sum(decision.worth for decision in decisions.values()) <= 0:",
            "or False:",
        ),
    },
    ("amusd/runtime/target_worker.py", "tests/runtime/test_draft_client.py"): {
        "a wait is not bounded by patience": ("min(seconds, self.client.patience_seconds)", "seconds"),
        "a pause of the reader counts as the pair's time": ("sequence.observer.exclude(pause_ns)", "pass"),
    },
    ("amusd/sampling/processors.py", "tests/sampling/test_sampler.py"): {
        "negative logits are divided by the penalty": ("/ repetition, logits * ", "/ repetition, logits / "),
        "a token is penalized once however often it was written": ("- answer * ", "- xp.clip(answer, 0, 1) * "),
        "top-p leaves one column too many": ("(weights.cumsum() < top_p", "(weights.cumsum() - weights < top_p"),
        "ties with the last of a filter go": ("[row[columns] >= least]", "[row[columns] > least]"),
        "a CPU looks at the likeliest columns only": ("if len(columns) == len(row) or (", "if True or ("),
        "a GPU's top-p leaves one column too many": ("(together < top_p", "(together - weights < top_p"),
    },
    ("amusd/sampling/noise.py", "tests/sampling/test_sampler.py"): {
        "columns whose noise is near its largest are not looked at": ("(logits):", "(logits) or noise_of_others > 20:"),
    },
    ("amusd/sampling/sampler.py", "tests/sampling/test_sampler.py"): {
        "penalties reach the answer only": ("self.count(PROMPT, sequence, prompt, 1)", "pass"),
        "tokens that were cut off stay counted": (
            "self.state.count(ANSWER, self._sequence, counted[same:], -1)",
            "pass",
        ),
        "the last token of the prompt counts as the answer's": ("max(0, self._num_prompt_tokens - length)", "0"),
        "a row without bias has that of its slot": ("sequence if level > Level.FILTERED else None", "sequence"),
        "the least likely are reported first": ("pair: (-pair[1], pair[0])", "pair: (pair[1], pair[0])"),
    },
    ("amusd/sampling/acceptance.py", "tests/sampling/test_rejection.py"): {
        "ids whose differences overflow pass as ascending": (
            "(token_ids[1:] <= token_ids[:-1])",
            "(np.diff(token_ids) <= 0)",
        ),
        "a candidate is judged by the draft's chance alone": (" * q.of(candidate)\n", "\n"),
        "a row is not what was drawn from": ("(weights / weights.sum())", "(np.ones(len(weights)) / len(weights))"),
        "what takes a candidate's place is drawn from the target's whole row": ("=True), left, p)", "=True), p, p)"),
    },
    ("amusd/sampling/acceptance.py", "tests/fake_cuda/test_waits.py"): {
        "verdicts are waited for without a deadline": (
            "self.state.fetch(self._verdicts(*rows))",
            "self._verdicts(*rows)",
        ),
        "draws are waited for without a deadline": ("self.state.fetch(torch.cat", "Tensor.cpu(torch.cat"),
    },
    ("amusd/sampling/ranking.py", "tests/sampling/test_ranking.py"): {
        "penalties see logits relative to the largest": (
            "self.shaped(logits, packed)",
            "self.shaped(logits - logits.amax(1, keepdim=True), packed)",
        ),
        "a known token may lose what the model gives it": ("max(log_q, bias + slope * log_q)", "bias + slope * log_q"),
        "noise of tokens that cannot be proposed is forgotten": ("self._noise_of_token(token_id, key)", "0.0"),
    },
    ("amusd/sampling/stopping.py", "tests/sampling/test_text.py"): {
        "a stop string across tokens is not seen": ("in range(len(text))", "in ()"),
        "half a character at the end is not shown": ("                self._held += self.flush_text()\n", ""),
        "stop wins over end-of-sequence": (
            "        if token_id in self.eos_token_ids:\n",
            "        if token_id in self.eos_token_ids and not any(string in self._held for string in self.stop):\n",
        ),
        "text is cut before the first string of the list": (
            "min((index for string in stop if (index := text.find(string)) >= 0), default=len(text))",
            "next((index for string in stop if (index := text.find(string)) >= 0), len(text))",
        ),
    },
    ("amusd/serving/app.py", "tests/serving/test_api.py tests/serving/test_bad_requests.py"): {
        "a parameter of a body's type counts as the type": ('.partition(";")[0]', ""),
        "hosts differ by the case of their letters": ("{name.lower() for name", "{name for name"),
        "a page of another site may ask": (
            'if not kind.strip().lower().endswith("json"):',
            "if False:",
        ),
        "any key opens the gate": (" or not hmac.compare_digest(given.strip(), key.encode()):", ":"),
        "a body without a length has no limit": ("if len(content) > MAX_BODY_BYTES:", "if False:"),
    },
    ("amusd/serving/metrics.py", "tests/serving/test_api.py"): {
        "a place counts answers instead of candidates": ("inc(number)", "inc()"),
    },
    ("amusd/serving/requests.py", "tests/serving/test_bad_requests.py"): {
        "what is not supported is ignored": ("is_empty = value is None or", "is_empty = value is not None or"),
        "a body of very many values is read": ("if _num_nested(content) > _MAX_NESTED:", "if False:"),
    },
    ("amusd/serving/server.py", "tests/serving/test_leaving.py"): {
        "connections leave no descriptor for anything else": (" - SPARE_DESCRIPTORS", ""),
        "nobody looks whether a client has left": (
            "self.transport.write(self.conn.send(h11.D",
            "(self.conn.send(h11.D",
        ),
        "a hangup ends a server below nohup": ("if before[signal.SIGHUP] is signal.SIG_IGN:", "if False:"),
        "slow clients stay": ("if now - self._awaited_since >= CLIENT_SECONDS:", "if False:"),
        "any number may connect": ("if len(self.connections) > self._most:", "if False:"),
    },
    ("amusd/serving/responses.py", "tests/serving/test_pure.py"): {
        "the last tokens of a stream are lost when they show no text": ("or (waiting and ends_untold)", ""),
        "of alternatives that read alike the last one stands": ("entry in reversed(entries)", "entry in entries"),
    },
    ("amusd/serving/responses.py", "tests/serving/test_api.py"): {
        "a stream without usage tells no acceptance": ('            chunks[-1]["metrics"] =', "            _ ="),
    },
    ("amusd/serving/service.py", "tests/serving/test_api.py tests/serving/test_leaving.py"): {
        "a stream that failed counts as a whole answer": (" and not self._has_failed)", ")"),
        "health waits for a place of its own": ("while self._has_failed and not trial", "while not trial"),
        "nobody is told of an engine that fails": ("        logger.error(", "        str("),
        "all choices have one seed": ("(self._params.seed + choice)", "self._params.seed"),
        "the queue of requests has no end": ("if self.num_in_flight + num_answers > self.room:", "if False:"),
        "a client that goes away keeps its row": ("(working, leaving), return_when", "(working,), return_when"),
        "a reader that is slow keeps its place in the queue": ("request.num_answers - ", "request.num_answers - 0 * "),
        "a server that ends takes new requests": ("self.is_closing:\n            raise", "False:\n            raise"),
    },
    ("amusd/serving/service.py", "tests/serving/test_text.py"): {
        "log-probabilities are those without a prompt": (
            "engine.engine.tokenizer, ids",
            "engine.engine.tokenizer",
        ),
    },
    ("amusd/serving/timeline.py", "tests/serving/test_pure.py"): {
        "stale candidates are told as taken": ('taken=event.reception == "taken"', "taken=True"),
        "a listener that has gone is still told": ("if listener is not keep)", "if listener)"),
        "a rollback is told though candidates are left": (" and not event.num_ready", ""),
    },
    ("amusd/logs.py", "tests/test_console.py"): {
        "a message may have several lines": ("record.getMessage().splitlines()", "[record.getMessage()]"),
    },
    ("amusd/workload.py", "tests/commands/test_generate.py"): {
        "a line of somebody else's is cut off": ("line[: len(_BEGINNING)]", "line[:1]"),
        "a file is begun anew": ("AnswersFile(config).rest(", "list("),
        "a conversation goes on without its answers": ('{"role": "assistant", "content": answer}, ', ""),
    },
    ("amusd/workload.py", "tests/test_workload.py"): {
        "prompts are read from a pipe": ("if path.exists() and not path.is_file():", "if False:"),
        "answers go to a pipe": ("if self.path.exists() and not self.path.is_file():", "if False:"),
        "lines end where text does not": ('.split("\\n"), start=1', ".splitlines(), start=1"),
        "the last answer of a conversation is part of the prompt": ("answers[-1]", "answers[-1] + 1"),
        "lines are counted from 0": ('("\\n"), start=1)', '("\\n"), start=0)'),
        "SPEED-Bench's placeholder is asked": ("if _PLACEHOLDER in line:", "if False:"),
    },
    ("amusd/integrations/vllm.py", "tests/integrations/test_vllm.py"): {
        "sequences without a row stay open": ("            self.client.close(row)\n", "            pass\n"),
        "a row keeps the sequence of another text": ("np.array_equal(self.text, text[:length])", "True"),
        "a pass waits beyond its limit": ("- now_ns) > 0:", "+ 1) > 0:"),
        "candidates of any chance are proposed": ("chance >= self.settings.min_chance", "True"),
        "nothing is prepared but a chain": (
            "1 if drafter.kind in self.connection.chains else self.settings.rows_per_step",
            "1",
        ),
        "a prompt in chunks gets candidates": ("self._candidates(row) if new else []", "self._candidates(row)"),
        "a draft that says nothing is kept": ("        self.client.drain()  # an", "        pass  # an"),
        "each rank has a draft": ("if parallel.rank % parallel.tensor_parallel_size:", "if False:"),
        "a large batch is drafted for": ("is_small = len(texts) <= ", "is_small = 0 <= "),
        "what fills a list up counts as accepted": ("min(new - 1, row.num_proposed)", "new - 1"),
        "a row outgrows its sequence": (" <= len(text) <= self.session.max_length", " <= len(text)"),
        "lists differ in length": (
            " if new else each for each, new in rows",
            " if False else each for each, new in rows",
        ),
    },
    ("amusd/integrations/vllm_settings.py", "tests/integrations/test_vllm.py"): {
        "batches that take turns are served": ("pipeline_parallel_size) > 1:", "pipeline_parallel_size) > 9:"),
        "the draft is on a GPU of vLLM's": (" if name not in taken", ""),
    },
    ("amusd/runtime/ranks.py", "tests/runner/test_ranks.py"): {
        "the rank of another version is not named": ('ConfigError(f"rank {rank} of the target: {error}")', "error"),
    },
    ("amusd/tracing/recorder.py", "tests/tracing/test_metrics.py"): {
        "a refused run has a second line": (" and path.parent.parent.is_dir():", ":"),
    },
    ("amusd/config/engine.py", "tests/test_config.py"): {
        "any text names a factory": ('is_reference(self.factory or "")', "bool(self.factory)"),
    },
    ("amusd/runtime/workers.py", "tests/launch/test_main.py"): {
        "a link that cannot work is found after loading": ("for role in get_args(Role):", "for role in ():"),
    },
    ("launch/compose.py", "tests/launch/test_compose.py"): {
        "an interpolation in a text is resolved": ("    text = re.sub(", "    re.sub("),
        "a long key is taken for a run_dir": ("is_long = error.errno == errno.ENAMETOOLONG", "is_long = False"),
        "a pair's drafter holds over the one chosen": ("] if has_rival else []", "] if False else []"),
    },
    ("launch/jobs.py", "tests/launch/test_sweep.py"): {
        "an engine is made for each job": ("if wanted != self._config:", "if True:"),
    },
    ("launch/ray_serve.py", "tests/launch/test_ray_serve.py"): {
        "an engine that makes no tokens is healthy": ("if status != 200:", "if status == 0:"),
        "all replicas of a machine take the same cores": ("pin_cores=False", "pin_cores=True"),
    },
    ("launch/run_directory.py", "tests/launch/test_sweep.py"): {
        "a refused run deletes answers": ("    clear_run(directory, ())", "    clear_run(directory)"),
        "two sweeps share a folder": (" | fcntl.LOCK_NB", " & fcntl.LOCK_NB"),
        "a job whose draft was lost is done": (' or {"draft_failure", "draft_losses"} & result.keys()', ""),
    },
    ("launch/signals.py", "tests/launch/test_signals.py"): {
        "a process outlives its parent": ("ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ", "print("),
    },
    ("launch/run.py", "tests/launch/test_torchrun.py"): {
        "several machines need no keys": ("beyond=link.insecure or link.keys is not None, ", "beyond=True, "),
        "ranks meet in a folder that others may enter": (" or status.st_mode & 0o077", ""),
        "ranks wait though there is nothing to do": ('    store.set(ADDRESS, "")\n', ""),
    },
}
"""Maps a file and the tests that must notice to the defects: a name, the right text, the wrong text."""
RULES = tuple(
    Rule(what, file, old, new, tests)
    for (file, tests), defects in DEFECTS.items()
    for what, (old, new) in defects.items()
)
