"""The facade: prompts in, tokens or answers out. One engine holds a target, and a link to its draft.

    with Engine.launch(target="embedded", drafter="ngram") as engine:
        answer = engine.generate("Why is the sky blue?", SamplingParams(max_new_tokens=64))

Each request may choose its own mode and drafter. Any threads may ask. Up to `max_num_seqs` requests are answered at a
time, in the order in which they were submitted or their first tokens are read; each as if it were alone.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_type_hints, overload

import torch
from typing_extensions import Self

from amusd.answer import Answer, Generation, Token, Turns
from amusd.config import (
    DEFAULT_DRAFTERS,
    DecodingConfig,
    DrafterConfig,
    EngineConfig,
    SamplingParams,
    TargetConfig,
    check_runs_ahead,
    runs_ahead,
)
from amusd.config.plugins import DRAFTERS, entry_point_names, is_reference
from amusd.errors import ConfigError, ContextLengthError
from amusd.models.embedded_target import Report
from amusd.models.meeting import Meeting
from amusd.models.ranks import Leader
from amusd.models.tokenizer import Conversation, IncrementalDecoder, Tokenizer, user_turn
from amusd.policies.base import Policy
from amusd.policies.factory import make_policy, policy_name
from amusd.runtime.devices import claim_device, settle_devices
from amusd.runtime.draft_process import DraftProcess
from amusd.runtime.draft_restart import DraftSource
from amusd.runtime.followers import Followers
from amusd.runtime.startup import connect_target, load_with_followers, make_leader, make_recorder
from amusd.runtime.target_sequence import Outcome, Request
from amusd.runtime.target_worker import TargetWorker
from amusd.sampling.stopping import AnswerText, StopChecker
from amusd.settings import from_mapping, nearest, shown
from amusd.tracing.metrics import TargetCounts
from amusd.tracing.recorder import Recorder
from amusd.types import DraftPresence, Mode, Role

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int] | Conversation
"""The user's message, a conversation (turns with `role` and `content`), or token ids taken as they are."""

MAX_PLAIN_ANSWERS = 256
"""Latest answers of plain decoding that are kept for the synthetic drafter."""
SYNTHETIC = "synthetic"
"""The drafter that has to be told the answer in advance."""


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """What an engine does now, and what it has done since it was launched. Each figure is read for itself."""

    num_running: int
    """Answers at work."""
    num_waiting: int
    """Answers that wait for one of `max_num_seqs` places."""
    draft: DraftPresence
    draft_failure: str | None
    """Why no draft is used any more, if `draft` is `FAILED`; else None."""
    num_draft_restarts: int
    """Drafts that took the place of a lost one."""
    counts: TargetCounts


class Engine:
    """A target and its draft, ready to answer. Make one with `launch` or `connect`; close it, or use `with`."""

    def __init__(
        self,
        worker: TargetWorker,
        tokenizer: Tokenizer,
        *,
        drafters: Sequence[str] = (),
        process: DraftProcess | None = None,
        leader: Leader | None = None,
    ) -> None:
        self.worker = worker
        """The target's worker, which decodes."""
        self.tokenizer = tokenizer
        """The target's."""
        self._drafters = tuple(drafters)
        self._process = process
        self._leader = leader
        self.turns = Turns(worker)
        """The order in which answers are computed."""
        self._plain: OrderedDict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]] = OrderedDict()
        """Answers of plain decoding, by prompt and parameters."""

    @classmethod
    def launch(
        cls, *, target: str = "embedded", drafter: str | DrafterConfig | None = "auto", **settings: Any
    ) -> Engine:
        """Load the target in this process, and start the draft in a process of its own, which `close` ends.

        `target` and `drafter` are a kind (`embedded`, `ngram`) or else a folder or hub name of a transformers
        checkpoint; a drafter may also be a factory (as `drafter.factory`), or a `DrafterConfig`; `auto` is the embedded
        draft for the embedded target, else a lookup; `drafter=None` decodes without a draft. `settings` are fields of
        `EngineConfig`. Sets the number of this process's torch threads to `hardware.num_threads`. Raises `ConfigError`
        for what cannot work.
        """
        chosen: Any = drafter
        if drafter is not None and not isinstance(drafter, DrafterConfig):
            chosen = _kind_or_model(DrafterConfig, "drafter", drafter)
        drafters = () if chosen is None else (chosen,)
        models = {"target": _kind_or_model(TargetConfig, "target", target), "drafters": drafters}
        config = from_mapping(EngineConfig, {**models, **settings})
        if drafter == "auto" and config.drafters[0].kind in DEFAULT_DRAFTERS:
            warnings.warn(DEFAULT_DRAFTERS[config.drafters[0].kind], stacklevel=2)
        return cls.start(config)

    @classmethod
    def start(cls, config: EngineConfig) -> Engine:
        """As `launch`, from a whole configuration."""
        _check_type("config", config, EngineConfig)
        torch.set_num_threads(config.hardware.num_threads)
        config = replace(config, hardware=settle_devices(config, warnings.warn))
        meeting = Followers(config).meeting if config.target_tensor_parallel_size > 1 else None
        process = DraftProcess(config) if config.drafters else None
        try:
            return cls.connect(config, process, make_recorder(Role.TARGET), process=process, meeting=meeting)
        except BaseException:
            if process is not None:
                process.stop()
            raise

    @classmethod
    def connect(
        cls,
        config: EngineConfig,
        drafts: DraftSource | None,
        recorder: Recorder,
        *,
        report: Report | None = None,
        process: DraftProcess | None = None,
        meeting: Meeting | None = None,
    ) -> Engine:
        """Load the target here; `drafts` starts drafts, now and where one is lost, and tells them where to connect.

        `report` is told what takes long. `process`, if given, is the draft to end with the engine; `meeting` is where
        the target's other ranks come to, which end with it, too.
        """
        claim_device(config, Role.TARGET)
        leader: Leader | None = None
        try:
            leader = make_leader(config, meeting)
            worker, tokenizer = connect_target(
                config, lambda: load_with_followers(config, leader, report), drafts, recorder
            )
        except BaseException:
            if leader is not None:
                leader.close()
            elif meeting is not None:
                meeting.stop()
            raise
        names = [drafter.kind for drafter in config.drafters]
        return cls(worker, tokenizer, drafters=names, process=process, leader=leader)

    @property
    def draft_failure(self) -> str | None:
        """Why no draft is used any more; None while there is one, or the next one is looked for."""
        return self.worker.client.failure

    @property
    def draft_losses(self) -> tuple[str, ...]:
        """Why drafts were lost, each in one line."""
        return tuple(self.worker.client.losses)

    @property
    def num_draft_restarts(self) -> int:
        """How many drafts took the place of a lost one."""
        return self.worker.client.num_restarts

    @property
    def status(self) -> EngineStatus:
        """Figures for a monitor; for any thread, and without waiting for a pass."""
        client = self.worker.client
        if not self._drafters:
            draft = DraftPresence.NONE
        elif client.failure is not None:
            draft = DraftPresence.FAILED
        else:
            present = DraftPresence.SILENT if client.is_silent else DraftPresence.PRESENT
            draft = present if client.has_draft else DraftPresence.AWAY
        return EngineStatus(
            num_running=self.turns.num_running,
            num_waiting=self.turns.num_waiting,
            draft=draft,
            draft_failure=client.failure,
            num_draft_restarts=client.num_restarts,
            counts=replace(self.worker.counts),
        )

    @property
    def draft_pid(self) -> int | None:
        """Process id of a draft that this engine has started."""
        return None if self._process is None else self._process.pid

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        decoding: DecodingConfig | None = None,
        drafter: str | None = None,
        raw: bool = False,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        decoding: DecodingConfig | None = None,
        drafter: str | None = None,
        raw: bool = False,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        decoding: DecodingConfig | None = None,
        drafter: str | None = None,
        raw: bool = False,
    ) -> Generation | list[Generation]:
        """The whole answer; the same arguments as `stream`.

        To a list of prompts the list of their answers, in order, as many at a time as the engine takes. `params` may
        then be a list, too.
        """
        if not _is_list_of_prompts(prompt):
            one = self.submit(
                cast("Prompt", prompt), cast("SamplingParams", params), decoding=decoding, drafter=drafter, raw=raw
            )
            return one.result()
        prompts = self._encode_all(cast("Sequence[Prompt]", prompt), raw=raw)
        given = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(given) != len(prompts):
            raise ConfigError(f"params: {len(given)} for {len(prompts)} prompts; give one for all, or one for each")
        each = [_checked_params(own) for own in given]
        decoding = self._checked_decoding(decoding, drafter)
        if self._tells_answer(self._drafter_name(decoding, drafter)):
            self._answer_plainly(prompts, each, decoding)
        answers = [
            self.stream(one, own, decoding=decoding, drafter=drafter) for one, own in zip(prompts, each, strict=True)
        ]
        try:
            for answer in answers:
                self.turns.enqueue(answer)
            return [answer.result() for answer in answers]
        finally:
            for answer in answers:
                answer.close()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        decoding: DecodingConfig | None = None,
        drafter: str | None = None,
        raw: bool = False,
    ) -> Answer:
        """As `stream`; the answer is computed from now on, whenever any answer of this engine is read."""
        answer = self.stream(prompt, params, decoding=decoding, drafter=drafter, raw=raw)
        self.turns.enqueue(answer)
        return answer

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        decoding: DecodingConfig | None = None,
        drafter: str | None = None,
        raw: bool = False,
    ) -> Answer:
        """The answer token by token.

        `prompt` is the user's message or a conversation, put through the chat template unless `raw`, or token ids taken
        as they are.
        `drafter` is one of those the engine was made with, the first by default; without any, `decoding` is plain by
        default. Raises `ConfigError` when the prompt leaves no room for an answer, or the engine has no such drafter,
        and `StateError` when it is closed. A request to the synthetic drafter is first answered by plain decoding,
        outside all figures.
        """
        self.turns.check()
        params = _checked_params(params)
        decoding = self._checked_decoding(decoding, drafter)
        prompt_ids = self.encode(prompt, raw=raw)
        name = self._drafter_name(decoding, drafter)
        check_runs_ahead(name, decoding)
        self._check_sampling(params, name)
        max_length = min(len(prompt_ids) + params.max_new_tokens, self.worker.model.max_length)
        request = Request(
            prompt=prompt_ids,
            max_length=max_length,
            policy=self._policy_of(params, name, decoding),
            drafter=name,
            distribution=params.distribution,
            logprobs=params.logprobs,
            top_logprobs=params.top_logprobs,
            max_silence_seconds=decoding.max_silence_seconds,
            reference=self._plain_answer(prompt_ids, params, decoding) if self._tells_answer(name) else (),
        )
        stop = StopChecker(
            eos_token_ids=() if params.ignore_eos else self.tokenizer.eos_token_ids,
            stop=params.stop,
            max_new_tokens=max_length - len(prompt_ids),
            push_text=IncrementalDecoder(self.tokenizer, prompt_ids).push,
        )
        text = AnswerText(IncrementalDecoder(self.tokenizer, prompt_ids), params.stop)
        return Answer(request, stop, text, partial(self._generation, request, params, decoding), self.turns)

    def encode(
        self, prompt: Prompt, *, raw: bool = False, template: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a prompt, as `stream` takes them. `template`: arguments of the chat template.

        Raises `ConfigError` when they leave no room for an answer.
        """
        token_ids = self._token_ids(prompt, raw=raw, template=template or {})
        limit = self.worker.model.max_length
        if not token_ids:
            raise ConfigError("prompt: has no tokens")
        if len(token_ids) >= limit:
            message = f"prompt: {len(token_ids)} tokens leave no room in a context of {limit} (max_model_len)"
            raise ContextLengthError(message)
        vocab_size = self.worker.model.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ConfigError(f"prompt: token ids must be in [0, {vocab_size})")
        return token_ids

    def logit_gap(self, prefix: Sequence[int], token_id: int, other_id: int) -> float:
        """Return how much the target prefers `token_id` to `other_id` behind `prefix`, or how near to a tie it was."""
        model = self.worker.model
        with self.turns.alone():
            cache = model.new_cache(len(prefix))
            model.prefill(prefix[:-1], cache)
            logits = model.forward(prefix[-1:], cache).logits[0]
        return float(logits[token_id]) - float(logits[other_id])

    def begin_run(self, number: int) -> None:
        """Count requests from now on to this run, of those that the recorder keeps apart."""
        self.worker.begin_run(number)

    def close(self) -> None:
        """End the draft and the target's other ranks, and release the link; for any thread. Idempotent.

        Unfinished answers are ended. A pass that is being computed is waited for (see `Turns.close`).
        """
        self.turns.close(self._release)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _release(self) -> None:
        with ExitStack() as stack:  # all of it, whatever a part of it raises
            if self._process is not None:
                stack.callback(self._process.stop)
            if self._leader is not None:
                stack.callback(self._leader.close)
            stack.callback(self.worker.shut_down)

    def _generation(
        self,
        request: Request,
        params: SamplingParams,
        decoding: DecodingConfig,
        text: str,
        tokens: Sequence[Token],
        outcome: Outcome,
    ) -> Generation:
        """The finished answer to a request. That of plain decoding is kept."""
        token_ids = tuple(token.token_id for token in tokens)
        if decoding.mode is Mode.AUTOREGRESSIVE:
            self._keep_plain(request.prompt, params, token_ids)
        return Generation(
            text=text,
            token_ids=token_ids,
            finish_reason=outcome.finish_reason,
            mode=decoding.mode,
            policy=policy_name(decoding),
            drafter=request.drafter,
            seed=params.seed,
            metrics=outcome.metrics,
            sequence_id=outcome.sequence_id,
            logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
            top_logprobs=tuple(token.top_logprobs for token in tokens) if params.top_logprobs else (),
        )

    def _check_sampling(self, params: SamplingParams, drafter: str | None) -> None:
        if drafter == SYNTHETIC and params.rule == "rejection":
            raise ConfigError(
                "sampling.acceptance=rejection: not with drafter=synthetic, which is told the answer; allowed: matching"
            )
        vocab_size = self.worker.model.vocab_size
        for token_id, bias in params.logit_bias:
            if token_id >= vocab_size:
                raise ConfigError(
                    f"sampling.logit_bias={[token_id, bias]}: the model has no such token; its ids are 0 to "
                    f"{vocab_size - 1}"
                )

    def _policy_of(self, params: SamplingParams, drafter: str | None, decoding: DecodingConfig) -> Policy:
        """The policy of a request. Raises `ConfigError` for trees or chains that drafter or acceptance rule forbid."""
        peer = self.worker.client.peer
        trees = () if peer is None else peer.tree_drafters
        policy = make_policy(decoding, can_branch=drafter in trees and params.rule != "rejection")
        if decoding.mode is Mode.SYNCHRONOUS:
            asked, allowed, wants_tree = "tree=true", "tree=false", decoding.tree
        else:
            asked, allowed = f"policy={decoding.policy}", "chain"
            wants_tree = policy.fan_out > 1 or policy_name(decoding) == "branching"
        if wants_tree and params.rule == "rejection":
            raise ConfigError(
                f"{asked}: not with sampling.acceptance=rejection, whose draws no draft can foresee; allowed: {allowed}"
            )
        if peer is None or drafter is None:
            return policy
        if wants_tree and drafter not in trees:
            others = ", ".join(trees) or "none of this engine's"
            raise ConfigError(f"{asked}: drafter={drafter} drafts no trees; allowed: {others}")
        if policy.fan_out == 1 and drafter not in peer.drafters:
            if drafter in trees:
                raise ConfigError(
                    f"drafter={drafter}: drafts trees only: use policy=branching, or mode=synchronous tree=true"
                )
            raise ConfigError(f"drafter={drafter}: the draft has {', '.join(peer.drafters) or 'none'}")
        return policy

    def _tells_answer(self, drafter: str | None) -> bool:
        return drafter == SYNTHETIC and self.worker.client.has_draft

    def _checked_decoding(self, decoding: DecodingConfig | None, drafter: object) -> DecodingConfig:
        """The schedule that is asked for, or the default for `drafter`. Raises `ConfigError` for what is none."""
        if decoding is None and not self._drafters:
            return DecodingConfig(mode=Mode.AUTOREGRESSIVE)
        if decoding is None:
            name = drafter if isinstance(drafter, str) else self._drafters[0]
            return DecodingConfig(mode=Mode.ASYNCHRONOUS if runs_ahead(name) else Mode.SYNCHRONOUS)
        return _check_type("decoding", decoding, DecodingConfig)

    def _plain_answer(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, decoding: DecodingConfig
    ) -> tuple[int, ...]:
        """The answer of plain decoding: computed now, unless it is one of the latest answers."""
        self._answer_plainly([prompt_ids], [params], decoding)
        return self._plain[prompt_ids, params]

    def _answer_plainly(
        self, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], decoding: DecodingConfig
    ) -> None:
        """Have plain decoding answer those prompts that it has not answered lately."""
        missing = [pair for pair in zip(prompts, params, strict=True) if pair not in self._plain]
        plain = replace(decoding, mode=Mode.AUTOREGRESSIVE)
        self.generate([one for one, _ in missing], [own for _, own in missing], decoding=plain)

    def _keep_plain(self, prompt_ids: tuple[int, ...], params: SamplingParams, token_ids: tuple[int, ...]) -> None:
        self._plain[prompt_ids, params] = token_ids
        self._plain.move_to_end((prompt_ids, params))
        while len(self._plain) > MAX_PLAIN_ANSWERS:
            self._plain.popitem(last=False)

    def _encode_all(self, prompts: Sequence[Prompt], *, raw: bool) -> list[tuple[int, ...]]:
        """Token ids of each prompt. Raises `ConfigError` with the number of the first that cannot be answered."""
        encoded: list[tuple[int, ...]] = []
        try:
            encoded.extend(self.encode(prompt, raw=raw) for prompt in prompts)
        except ConfigError as error:
            raise ConfigError(f"prompts[{len(encoded)}]: {error}") from None
        return encoded

    def _token_ids(self, prompt: object, *, raw: bool, template: Mapping[str, Any]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            _check_text("prompt", prompt)
            if raw:
                return tuple(self.tokenizer.encode(prompt))
            return tuple(self.tokenizer.encode_chat(user_turn(prompt), **template))
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
            raise ConfigError(
                f"prompt: expected text, a list of token ids, or a conversation, not {type(prompt).__name__}"
            )
        if prompt and isinstance(prompt[0], Mapping):
            turns = cast("Conversation", prompt)
            for number, turn in enumerate(turns):
                _check_turn(f"prompt: turn {number}", turn)
            if raw:
                return tuple(self.tokenizer.encode("\n\n".join(turn["content"] for turn in turns)))
            return tuple(self.tokenizer.encode_chat(turns, **template))
        try:
            return tuple(operator.index(cast("int", token_id)) for token_id in prompt)
        except TypeError:
            raise ConfigError(f"prompt={shown(prompt)}: token ids are whole numbers") from None

    def _drafter_name(self, decoding: DecodingConfig, drafter: str | None) -> str | None:
        if decoding.mode is Mode.AUTOREGRESSIVE:
            return None
        if not self._drafters:
            raise ConfigError(f"mode={decoding.mode.value}: this engine has no drafter; allowed: autoregressive")
        name = self._drafters[0] if drafter is None else _check_type("drafter", drafter, str)
        if name not in self._drafters:
            raise ConfigError(
                f"drafter={name}: this engine has {', '.join(self._drafters)}{nearest(name, self._drafters)}"
            )
        return name


def _kind_or_model(config: type, key: str, name: str | os.PathLike[str]) -> dict[str, Any]:
    """`embedded` and the like name a kind; a factory or its entry point makes a drafter; else it is a checkpoint."""
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    _check_type(key, name, str)
    kinds = get_args(get_type_hints(config)["kind"])
    if name in kinds and name != "hf":
        return {"kind": name}
    if config is DrafterConfig and (is_reference(name) or name in entry_point_names(DRAFTERS)):
        return {"kind": "custom", "factory": name}
    return {"kind": "hf", "model": name}


def _check_type(key: str, value: T, expected: type) -> T:
    """Return `value`. Raises `ConfigError` unless it is `expected`."""
    if not isinstance(value, expected):
        raise ConfigError(f"{key}={shown(value)}: expected {expected.__name__}, not {type(value).__name__}")
    return value


def _checked_params(params: object) -> SamplingParams:
    """The parameters that are asked for, or the default. Raises `ConfigError` for what is none."""
    return SamplingParams() if params is None else _check_type("params", cast("SamplingParams", params), SamplingParams)


def _check_text(key: str, text: object) -> None:
    """Raise `ConfigError` unless it is text that has an encoding."""
    if not isinstance(text, str):
        raise ConfigError(f"{key}: expected text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key}: character {error.start} is half of a surrogate pair, which is no text") from None


def _check_turn(key: str, turn: object) -> None:
    """Raise `ConfigError` unless it has a role and a content that are text."""
    if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
        raise ConfigError(f"{key}: expected a mapping with `role` and `content`")
    for name in ("role", "content"):
        _check_text(f"{key}: {name}", turn[name])


def _is_list_of_prompts(prompt: object) -> bool:
    """Whether this is several prompts: a list of texts, of conversations, or of lists of token ids; or of nothing."""
    if not isinstance(prompt, (list, tuple)):
        return False
    return not prompt or isinstance(prompt[0], (str, list, tuple))
