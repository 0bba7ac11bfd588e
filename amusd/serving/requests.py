"""Request bodies of OpenAI's protocol, with vLLM's additions: their fields, and what they ask of the engine. Pure.

A field that a class declares has its effect. `_OTHERS` has the rest of both protocols: what cannot change an answer is
dropped, and what would change it is refused unless its value asks for nothing. Any other name is refused.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from amusd.config import MAX_TOP_LOGPROBS, DecodingConfig, SamplingParams
from amusd.engine import Prompt
from amusd.errors import ConfigError, ContextLengthError
from amusd.settings import nearest, shown
from amusd.types import Mode

MAX_CHOICES = 128
COMPLETION_TOKENS = 16
"""Tokens of a completion that names no number, as in OpenAI's protocol."""
CHARACTERS_PER_TOKEN = 128
"""No vocabulary has longer tokens to speak of: a text with more for each token of the context is too long."""
MAX_STOPS, STOP_CHARACTERS, MAX_BIASES = 64, 1024, 1024
"""Stop strings of a request, characters of each, and entries of its `logit_bias`."""
_RANDOM_SEEDS = 1 << 31
"""A seed that was drawn is below this, so that every JSON reader keeps it exact."""
_SEED_MASK = (1 << 63) - 1
_LEAST_TOP_P = 1e-9
"""The value of `top_p=0`, which leaves the likeliest token alone: no vocabulary is so large that it has less."""
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_OTHERS: Mapping[str, tuple[Any, ...] | None] = {
    name: values
    for values, names in (
        (
            None,
            """
            annotations cache_control cache_salt guided_decoding_backend include_obfuscation include_reasoning
            length_penalty media_io_kwargs metadata mm_processor_kwargs parallel_tool_calls prediction priority
            prompt_cache_key prompt_cache_retention refusal request_id return_mm_kwargs return_token_offsets
            routed_experts_prompt_start safety_identifier service_tier session_id spaces_between_special_tokens store
            stream_interval truncation_side type user
            """,
        ),
        (
            _NOTHING,
            """
            allowed_token_ids audio bad_words chat_template ec_transfer_params echo functions guided_choice
            guided_grammar guided_json guided_regex guided_whitespace_pattern include_stop_str_in_output
            kv_transfer_params logit_processors logits_processors logprob_token_ids prompt_embeds
            repetition_detection return_prompt_text return_token_ids return_tokens_as_token_ids stop_token_ids
            structural_tag structured_outputs suffix use_beam_search verbosity vllm_xargs watermarking
            web_search_options
            """,
        ),
        ((None, 1), "best_of"),
        ((None, "none"), "function_call"),
        ((None, ["text"]), "modalities"),
        ((None, {"type": "text"}), "response_format"),
        ((None, True), "skip_special_tokens"),
        ((None, -1), "thinking_token_budget"),
        ((None,), "prompt_logprobs truncate_prompt_tokens"),
    )
    for name in names.split()
}
"""The values of a field that ask for nothing; None: the field is dropped, whatever its value."""
_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "documents", "reasoning_effort")


class RequestError(Exception):
    """A mistake in a request, for the client: `message` names the field, `param` is its path."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        param = None if self.param is None else _encodable(self.param)
        return {"error": {"message": _encodable(self.message), "type": kind, "param": param, "code": self.code}}


def _encodable(text: str) -> str:
    """Half of a surrogate pair, which a name of the client's may hold, becomes a question mark."""
    return text.encode(errors="replace").decode()


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_others(self) -> _Fields:
        for name, value in (self.model_extra or {}).items():
            if name not in _OTHERS:
                raise PydanticCustomError("extra_forbidden", "is not known", {"field": name})
            values = _OTHERS[name]
            if values is not None and value not in values:
                raise PydanticCustomError("unsupported_parameter", "is not supported by this server", {"field": name})
        return self


class ErrorDetail(BaseModel):
    """One error, as OpenAI's API describes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, as OpenAI has it."""

    error: ErrorDetail


class TextPart(_Fields):
    """One part of a message's content."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "text":
            message = "parts of type '{kind}' are not supported by this server, only 'text'"
            raise PydanticCustomError("unsupported_parameter", message, {"kind": shown(kind)})
        return value


class Message(_Fields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(default=None, description="Left out by an assistant alone.")
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = Field(default=None, description="Another name for `reasoning`.")
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing", "is missing", {"field": "content"})
        return self

    def turn(self) -> dict[str, Any]:
        """Return the turn for the chat template, which knows no developers. A line break separates text parts."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        turn |= {"name": self.name, "reasoning": reasoning, "reasoning_content": reasoning}
        turn |= {"tool_calls": [*map(_called, self.tool_calls or ())] or None, "tool_call_id": self.tool_call_id}
        return {name: value for name, value in turn.items() if value is not None}


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool with its arguments as an object, as templates expect them; the protocol has them as text."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    return call


class StreamOptions(_Fields):
    """The additions to a stream besides its pieces."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(default=None, description="With `include_usage`: in each chunk.")


class _Request(_Fields):
    """The fields that both endpoints have."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0, description="Above 0 only with `ignore_eos` and without `stop`.")
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1, description="0: the likeliest token.")
    top_k: int | None = Field(default=None, ge=-1, description="0 or -1: all tokens.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, description="Biases by token id."
    )
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="Of a prompt true, of a chat false, and no other."
    )
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mode: Mode | None = Field(default=None, strict=False)
    num_speculative_tokens: int | None = Field(default=None, ge=1)
    token_sources: bool | None = Field(default=None, description="Say of each token who proposed it.")


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = Field(default=None, description="For the template, if `tool_choice` is none.")
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: str | None = None


_TokenIds: TypeAlias = list[Annotated[int, Field(ge=0)]]


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[str] | _TokenIds | list[_TokenIds]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of the engine for one request."""

    prompts: tuple[Prompt, ...]
    is_chat: bool
    params: SamplingParams
    """Parameters of the first choice; the next one has the next seed."""
    num_choices: int
    """The number of choices for each prompt."""
    decoding: DecodingConfig
    streams: bool = False
    includes_usage: bool = False
    """A stream ends with one more chunk."""
    counts_on: bool = False
    """Each chunk has the usage so far."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    dropped: frozenset[str] = frozenset()
    """Fields that have no meaning here."""
    top_logprobs: int | None = None
    """Alternatives that are told of each token; None: no log-probabilities either."""
    token_sources: bool = False

    @property
    def num_answers(self) -> int:
        """Places that it takes in the queue, one for each answer."""
        return len(self.prompts) * self.num_choices

    def params_of(self, choice: int) -> SamplingParams:
        """The parameters of a prompt's choice, from 0."""
        return replace(self.params, seed=(self.params.seed + choice) & _SEED_MASK)


def plan_chat(request: ChatRequest, decoding: DecodingConfig, limits: Limits) -> Plan:
    """Return the plan of a chat request. Raises `RequestError`."""
    if request.tools and request.tool_choice != "none":
        raise RequestError("tools: is not supported by this server", param="tools", code="unsupported_parameter")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs: needs logprobs=true", param="top_logprobs")
    template = {name: value for name in _TEMPLATE_FIELDS if (value := getattr(request, name)) is not None}
    if request.tools:
        template["tools"] = request.tools
    template = {**(request.chat_template_kwargs or {}), **template}
    if request.reasoning_effort is not None:
        template.setdefault("enable_thinking", request.reasoning_effort != "none")
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _plan(
        request,
        decoding,
        limits,
        prompts=([message.turn() for message in request.messages],),
        is_chat=True,
        default_tokens=limits.max_length,
        top_logprobs=top_logprobs,
        template=template,
    )


def plan_completion(request: CompletionRequest, decoding: DecodingConfig, limits: Limits) -> Plan:
    """Return the plan of a completion request. Raises `RequestError`."""
    prompts = _prompts(request.prompt)
    return _plan(
        request,
        decoding,
        limits,
        prompts=prompts,
        is_chat=False,
        default_tokens=COMPLETION_TOKENS,
        top_logprobs=request.logprobs,
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the engine."""

    max_length: int
    """Tokens of prompt and answer together."""
    max_speculative_tokens: int
    """Candidates that fit into one verification."""


def _plan(
    request: ChatRequest | CompletionRequest,
    decoding: DecodingConfig,
    limits: Limits,
    *,
    prompts: tuple[Prompt, ...],
    is_chat: bool,
    default_tokens: int,
    top_logprobs: int | None,
    template: Mapping[str, Any] | None = None,
) -> Plan:
    numbers = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(numbers) > 1:
        raise RequestError("max_tokens: differs from max_completion_tokens, its other name", param="max_tokens")
    max_tokens = numbers.pop() if numbers else default_tokens
    assert max_tokens is not None
    if (request.min_tokens or 0) > (max_tokens if request.ignore_eos and not request.stop else 0):
        message = "min_tokens: needs ignore_eos=true, no stop, and max_tokens that are not fewer"
        raise RequestError(message, param="min_tokens", code="unsupported_parameter")
    if request.add_special_tokens not in (None, not is_chat):
        message = f"add_special_tokens: is always {str(not is_chat).lower()} here"
        raise RequestError(message, param="add_special_tokens", code="unsupported_parameter")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options: needs stream=true", param="stream_options")
    options = request.stream_options or StreamOptions()
    _check_sizes(request, prompts, limits.max_length, "messages" if is_chat else "prompt")
    given: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": None if request.top_p is None else max(request.top_p, _LEAST_TOP_P),
        "top_k": None if request.top_k is None else max(request.top_k, 0),
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": _biases(request.logit_bias),
        "seed": secrets.randbelow(_RANDOM_SEEDS) if request.seed is None else request.seed & _SEED_MASK,
        "stop": (request.stop,) if isinstance(request.stop, str) else request.stop,
        "ignore_eos": request.ignore_eos,
        "logprobs": top_logprobs is not None,
        "top_logprobs": top_logprobs,
    }
    try:
        params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
        decoding = _decoding(request, decoding, limits)
    except ConfigError as error:
        raise config_error(error) from None
    return Plan(
        prompts=prompts,
        is_chat=is_chat,
        params=params,
        num_choices=request.n or 1,
        decoding=decoding,
        streams=bool(request.stream),
        includes_usage=bool(options.include_usage),
        counts_on=bool(options.include_usage and options.continuous_usage_stats),
        template=template or {},
        dropped=_dropped(request),
        top_logprobs=top_logprobs,
        token_sources=bool(request.token_sources),
    )


def _dropped(request: ChatRequest | CompletionRequest) -> frozenset[str]:
    """Names of fields that have a value and no meaning here."""
    messages = request.messages if isinstance(request, ChatRequest) else []
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    every = [request, *messages, *parts, request.stream_options]
    given = [pair for one in every if one is not None for pair in (one.model_extra or {}).items()]
    return frozenset(name for name, value in given if value and _OTHERS[name] is None)


def _check_sizes(request: _Request, prompts: Sequence[Prompt], max_length: int, param: str) -> None:
    """Refuse what no answer needs before any work is put into it, for which other requests would have to wait."""
    for prompt in prompts:
        texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt if isinstance(turn, dict)]
        num_items = len(prompt) if param == "messages" or not texts else 1  # turns or token ids
        num_characters = sum(map(len, texts))
        if num_items > max_length or num_characters > max_length * CHARACTERS_PER_TOKEN:
            size = (
                f"{num_items} {'messages' if texts else 'tokens'}" if num_items > 1 else f"{num_characters} characters"
            )
            message = f"{param}: {size} leave no room in a context of {max_length} tokens (max_model_len)"
            raise RequestError(message, param=param, code="context_length_exceeded")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    if len(stops) > MAX_STOPS or any(len(stop) > STOP_CHARACTERS for stop in stops):
        raise RequestError(f"stop: at most {MAX_STOPS} strings of {STOP_CHARACTERS} characters", param="stop")
    if len(request.logit_bias or ()) > MAX_BIASES:
        raise RequestError(f"logit_bias: at most {MAX_BIASES} entries", param="logit_bias")


def _decoding(request: _Request, decoding: DecodingConfig, limits: Limits) -> DecodingConfig:
    if request.mode is not None:
        decoding = replace(decoding, mode=request.mode)
    number = request.num_speculative_tokens
    if number is not None:
        if number > limits.max_speculative_tokens:
            raise ConfigError(f"num_speculative_tokens={number}: this server takes {limits.max_speculative_tokens}")
        decoding = replace(decoding, num_speculative_tokens=number)
    return decoding


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    """Each prompt of a completion request."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError("prompt: is empty", param="prompt")
    return (prompt,) if isinstance(prompt[0], int) else tuple(prompt)


def _biases(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    for token_id in biases or ():
        if re.fullmatch(r"\d{1,9}", token_id, re.ASCII) is None:
            raise RequestError("logit_bias: the keys must be token ids", param="logit_bias")
    return None if biases is None else {int(token_id): bias for token_id, bias in biases.items()}


_FIELD_OF = {"max_new_tokens": "max_tokens"}
"""The protocol's name of what a setting is called here."""


def config_error(error: ConfigError, param: str | None = None) -> RequestError:
    """The client's mistake that the engine has found, which begins its message with the key; `param` if it does not."""
    message = str(error).removeprefix("sampling.")
    is_too_long = isinstance(error, ContextLengthError)
    found = re.match(r"(\w+)(?==|: )", message)
    if found is not None and param is None:
        param = _FIELD_OF.get(found[1], found[1])
    return RequestError(message, param=param, code="context_length_exceeded" if is_too_long else None)


def validation_error(errors: Sequence[Mapping[str, Any]], fields: Callable[[], Sequence[str]]) -> RequestError:
    """The first mistake that pydantic has found in a body, in OpenAI's terms. `fields`: names that the body may have.

    Messages never hold a value of the request.
    """
    first = next((error for error in errors if "field" in error.get("ctx", {})), errors[0])
    param = _param(first)
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {first.get('ctx', {}).get('error', 'it cannot be parsed')}")
    if param is None:
        is_object = first["type"] not in ("missing", "model_attributes_type", "model_type")
        need = "the body must be a JSON object, sent as Content-Type: application/json"
        return RequestError(f"the body: {first['msg']}" if is_object else need)
    if first["type"] == "extra_forbidden":
        name = shown(param)
        message = f"unrecognized request argument: {name}{nearest(name, fields())}"
        return RequestError(message, param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return RequestError(f"missing required parameter: {param}", param=param, code="missing_required_parameter")
    own = [error for error in errors if _param(error) == param]
    refusal = next((error for error in own if error["type"] == "unsupported_parameter"), None)
    if refusal is not None:
        return RequestError(f"{param}: {refusal['msg']}", param=param, code="unsupported_parameter")
    prefix = "Input should be "
    wanted = dict.fromkeys(error["msg"].removeprefix(prefix) for error in own if error["msg"].startswith(prefix))
    reason = f"should be {' or '.join(wanted)}" if wanted else first["msg"]
    return RequestError(f"{param}: {reason}", param=param, code="invalid_value")


def _param(error: Mapping[str, Any]) -> str | None:
    """The field that an error is about."""
    path, field = _path(error["loc"]), error.get("ctx", {}).get("field")
    return field if path is None else path if field is None else f"{path}.{field}"


def _path(location: Sequence[str | int]) -> str | None:
    """The field in a body, dotted; what pydantic adds for the members of a union is left out. None: the body itself."""
    parts: list[str] = []
    for part in location[1:]:
        if isinstance(part, str) and (part in ("str", "int", "float", "bool") or not part.isidentifier()) and parts:
            break
        if isinstance(part, str) and part[:1].isupper() and parts:
            break
        parts.append(str(part))
    return ".".join(parts) or None
