"""The facade: prompts in, answers out. An engine has a target, and a connection to its draft.

    with Engine.launch(target="embedded", drafter="ngram") as engine:
        answer = engine.generate("Why is the sky blue?", SamplingParams(max_new_tokens=64))

Each request may choose its own mode and drafter. Any thread may use it. Up to `max_num_seqs` are answered at a time.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict, get_args, get_type_hints, overload

import torch
from typing_extensions import Self, Unpack

from amusd.answer import Answer, Generation, Scheduler
from amusd.checkpoints.settled import settle
from amusd.checkpoints.tokenizer import IncrementalDecoder, Prompt, Tokenizer, user_turn
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, SamplingParams, TargetConfig
from amusd.config.engine import DEFAULT_DRAFTERS
from amusd.config.plugins import is_reference
from amusd.errors import ConfigError, ContextLengthError
from amusd.logs import logger
from amusd.policies.factory import check_sampling, choose_policy, choose_schedule, policy_name
from amusd.runtime.devices import device_of
from amusd.runtime.draft_process import DraftSource
from amusd.runtime.startup import connect_target
from amusd.runtime.target_worker import TargetWorker
from amusd.runtime.verifier import Request
from amusd.runtime.workers import Rendezvous, start_workers
from amusd.sampling.stopping import StopChecker
from amusd.settings import Settings, check_kind, from_mapping, shown
from amusd.tracing.recorder import Recorder


class Options(TypedDict, total=False):
    """How one prompt is answered; see `Engine.stream`."""

    decoding: DecodingConfig | None
    drafter: str | None
    raw: bool
    reference: Sequence[int]


@dataclass(eq=False, repr=False)
class Engine:
    """A target and its draft. Make one with `launch` or `connect`; close it, or use `with`."""

    worker: TargetWorker
    tokenizer: Tokenizer
    drafters: Sequence[str] = ()
    """Names for a request's drafter; the first is the default."""
    rendezvous: Rendezvous | None = None
    """Where the target's ranks connect, if several."""
    others: ExitStack = field(default_factory=ExitStack)
    """Ends the worker, the draft and the target's other ranks."""

    def __post_init__(self) -> None:
        self.others.callback(self.worker.shut_down)  # first
        self.scheduler = Scheduler(self.worker)
        self.draft = self.worker.client.connection

    @classmethod
    def launch(cls, *, target: str = "embedded", drafter: str | DrafterConfig | None = "auto", **settings: Any) -> Self:
        """Load the target in this process, and start the draft in another, which `close` ends.

        `target` and `drafter` are a kind (`embedded`, `ngram`), or the folder or hub name of a transformers checkpoint.
        A drafter may also be a factory (as `drafter.factory`) or a `DrafterConfig`; None decodes without a draft.
        `settings` are fields of `EngineConfig`; `hardware.num_threads` sets the torch threads of this process. Raises
        `ConfigError` for settings that cannot work.
        """
        drafters = () if drafter is None else (_kind_or_model(DrafterConfig, drafter),)
        models = {"target": _kind_or_model(TargetConfig, target), "drafters": drafters}
        config = from_mapping(EngineConfig, {**models, **settings})
        is_named = drafter != "auto" or "drafters" in settings
        if not is_named and config.drafters[0].kind in DEFAULT_DRAFTERS:
            logger.warning("%s", DEFAULT_DRAFTERS[config.drafters[0].kind])
        return cls.start(config)

    @classmethod
    def start(cls, config: EngineConfig) -> Self:
        """As `launch`, from a whole configuration."""
        config, drafts, rendezvous = start_workers(config)
        torch.set_num_threads(config.hardware.num_threads)
        return cls.connect(config, drafts, Recorder("target"), rendezvous)

    @classmethod
    def connect(
        cls, config: EngineConfig, drafts: DraftSource | None, recorder: Recorder, rendezvous: Rendezvous | None = None
    ) -> Self:
        """Load the target here; `drafts`: the source of its drafts; `rendezvous`: where the other ranks connect.

        Draft and ranks stop with the engine, also if this call fails.
        """
        with ExitStack() as others:
            if drafts is not None:
                others.callback(drafts.stop)
            if rendezvous is not None:
                others.callback(rendezvous.stop)
            config = settle(config, device_of(config, "target"))
            worker, tokenizer = connect_target(config, drafts, recorder, others, rendezvous=rendezvous)
            drafters = [drafter.kind for drafter in config.drafters]
            return cls(worker, tokenizer, drafters, rendezvous, others.pop_all())

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(self, prompt: Any, params: Any = None, **options: Unpack[Options]) -> Generation | list[Generation]:
        """Return the whole answer; for a list of prompts, a list of answers.

        The arguments are those of `stream`; with a list of prompts, `params` may be a list.
        """
        # a list of prompts holds texts, conversations or lists of ids, or nothing
        if not isinstance(prompt, (list, tuple)) or (prompt and not isinstance(prompt[0], (str, list, tuple))):
            return self.submit(prompt, params, **options).result()
        raw, prompts = options.pop("raw", False), list[tuple[int, ...]]()
        try:
            prompts.extend(self.encode(one, raw=raw) for one in prompt)
        except ConfigError as error:
            raise type(error)(f"prompts[{len(prompts)}]: {error}") from None
        each = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ConfigError(f"params: {len(each)} for {len(prompts)} prompts; give one for all, or one for each")
        answers = [self.submit(one, own, **options) for one, own in zip(prompts, each, strict=True)]
        try:
            return [answer.result() for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]) -> Answer:
        """As `stream`, but queue the answer at once: it is computed while any answer of this engine is read."""
        answer = self.stream(prompt, params, **options)
        self.scheduler.enqueue(answer)
        return answer

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        decoding: DecodingConfig | None = None,
        drafter: str | None = None,
        raw: bool = False,
        reference: Sequence[int] = (),
    ) -> Answer:
        """The answer, an iterator over tokens.

        With `raw` or token ids no chat template is applied. `drafter` is one of `drafters`, by default the
        first. `reference`: plain decoding's answer, for the synthetic drafter. Raises `ConfigError` for a bad request,
        and `StateError` when the engine is closed.
        """
        self.scheduler.check()
        check_kind("params", params, SamplingParams)
        params = params or SamplingParams()
        name, decoding = choose_schedule(self.drafters, decoding, drafter)
        prompt_ids = self.encode(prompt, raw=raw)
        reference = token_ids_of("reference", reference)
        check_sampling(params, name, reference, self.worker.model.vocab_size)
        request = Request(
            prompt=prompt_ids,
            max_length=min(len(prompt_ids) + params.max_new_tokens, self.worker.model.max_length),
            policy=choose_policy(params, name, decoding, is_chain=name in self.draft.chains),
            drafter=name,
            distribution=params.distribution,
            logprobs=params.logprobs or params.top_logprobs > 0,
            top_logprobs=params.top_logprobs,
            max_silence_seconds=decoding.max_silence_seconds,
            reference=reference,
        )
        kind = partial(Generation, mode=decoding.mode, policy=policy_name(decoding), drafter=name, seed=params.seed)
        eos_token_ids = () if params.ignore_eos else self.tokenizer.eos_token_ids
        max_new_tokens, decoder = request.max_length - len(prompt_ids), IncrementalDecoder(self.tokenizer, prompt_ids)
        stop = StopChecker(eos_token_ids, params.stop, max_new_tokens, decoder.push, decoder.flush)
        return Answer(request, stop, kind, self.scheduler)

    def encode(
        self, prompt: Prompt, *, raw: bool = False, template: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a prompt, as in `stream`. `template`: arguments of the chat template.

        Raises `ConfigError` for unknown ids, or if no room is left for an answer.
        """
        model = self.worker.model
        turns: Any = user_turn(prompt) if isinstance(prompt, str) else prompt
        encoded: Sequence[int]
        if isinstance(turns, Sequence) and turns and isinstance(turns[0], Mapping):
            check_turns(turns)
            try:
                if raw:
                    encoded = self.tokenizer.encode("\n\n".join(turn["content"] for turn in turns), model.max_length)
                else:
                    encoded = self.tokenizer.encode_chat(turns, template, model.max_length)
            except UnicodeEncodeError:
                raise ConfigError("prompt: half of a surrogate pair is no text") from None
        else:
            is_long = isinstance(turns, Sequence) and len(turns) >= model.max_length  # refused below, uncopied
            encoded = turns if is_long else token_ids_of("prompt", turns)
        if (length := len(encoded)) >= model.max_length:
            room = f"a context of {model.max_length} (max_model_len)"
            raise ContextLengthError(f"prompt: {length} tokens leave no room in {room}")
        token_ids = tuple(encoded)
        if not token_ids:
            raise ConfigError("prompt: has no tokens")
        if not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
            if isinstance(prompt[0], (str, Mapping)):
                unknown = self.tokenizer.token_text(max(token_ids))
                raise ConfigError(f"prompt: its text has the tokenizer's token {unknown!r}, which the model lacks")
            raise ConfigError(f"prompt: token ids must be in [0, {model.vocab_size})")
        return token_ids

    def close(self) -> None:
        """End unfinished answers, the draft and the target's other ranks, after the present pass.

        Idempotent; for any thread.
        """
        self.scheduler.close(self.others.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kind_or_model(config: type[Settings], name: Any) -> Any:
    """The setting that a name stands for: a kind (not `hf`), a drafter's factory, else a checkpoint."""
    if isinstance(name, config):
        return name
    try:
        name = os.fspath(name)
    except TypeError:
        raise ConfigError(f"{config.section}={shown(name)}: expected a kind, a folder or a hub name") from None
    if name in get_args(get_type_hints(config)["kind"]) and name != "hf":
        return {"kind": name}
    if config is DrafterConfig and is_reference(name):
        return {"kind": "custom", "factory": name}
    return {"kind": "hf", "model": name}


def check_turns(turns: Iterable[Any]) -> None:
    """Raise `ConfigError` unless each turn of a conversation has a role and a content."""
    for place, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or any(type(turn.get(name)) is not str for name in ("role", "content")):
            raise ConfigError(f"prompt[{place}]={shown(turn)}: expected a mapping with the texts 'role' and 'content'")


def token_ids_of(name: str, values: Any) -> tuple[int, ...]:
    """The token ids of the argument `name`. Raises `ConfigError` for anything else."""
    try:
        return tuple(map(operator.index, [values] if isinstance(values, bytes) else values))
    except TypeError:
        expected = "a text, turns of a conversation, or token ids" if name == "prompt" else "token ids"
        raise ConfigError(f"{name}={shown(values)}: expected {expected}") from None
