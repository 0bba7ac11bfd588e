"""Request bodies of OpenAI's protocol, with vLLM's additions: their fields, and what they ask of the engine. Pure.

A field that a class declares has its effect. Other fields are dropped if they cannot change an answer: those in
`_WITHOUT_EFFECT`, and any whose value asks for nothing. The rest is refused.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from amusd.config import MAX_TOP_LOGPROBS, DecodingConfig, SamplingParams
from amusd.errors import ConfigError, ContextLengthError
from amusd.prompts import Prompt
from amusd.settings import nearest, shown
from amusd.types import Mode

MAX_CHOICES = 128
COMPLETION_TOKENS = 16
"""Tokens of a completion that names no number, as in OpenAI's protocol."""
_MOST_TOKENS = 1 << 31
"""More than any context has; what an engine has no room for is refused by it."""
MAX_STOPS, STOP_CHARACTERS, MAX_BIASES = 64, 1024, 1024
"""Stop strings of a request, characters of each, and entries of its `logit_bias`."""
_RANDOM_SEEDS = 1 << 31
"""A seed that was drawn is below this, so that every JSON reader keeps it exact."""
_SEED_MASK = (1 << 63) - 1
_LEAST_TOP_P = 1e-9
"""The value of `top_p=0`, which leaves the likeliest token alone: no vocabulary is so large that it has less."""
_WITHOUT_EFFECT = frozenset(
    """
    annotations cache_control cache_salt include_obfuscation include_reasoning metadata mm_processor_kwargs
    parallel_tool_calls prediction priority prompt_cache_key prompt_cache_retention refusal request_id
    safety_identifier service_tier session_id spaces_between_special_tokens store stream_interval type user
    """.split()  # noqa: SIM905 - a list has a line for each
)
_TEMPLATE_FIELDS = {"add_generation_prompt", "continue_final_message", "documents", "reasoning_effort", "tools"}


@dataclass(eq=False)
class RequestError(Exception):
    """A mistake in a request, for the client: `message` names the field, `param` is its path."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    headers: Mapping[str, str] | None = None

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
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, given: Any) -> Any:
        """Drop what is null, and what has no effect here."""
        if not isinstance(given, dict):
            return given
        own = cls.model_fields
        return {
            name: value
            for name, value in given.items()
            if value is not None and (name in own or not (name in _WITHOUT_EFFECT or _asks_for_nothing(value)))
        }


def _asks_for_nothing(value: Any) -> bool:
    return value is False or value in ("", [], {})


class ErrorBody(BaseModel):
    """An error, as OpenAI has it."""

    error: dict[Literal["message", "type", "param", "code"], str | None]


class TextPart(_Fields):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> Any:
    is_ids = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    return [value] if is_ids else _as_list(value)


class Message(_Fields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None)
    ] = []
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = Field(default=None, description="Another name for `reasoning`.")
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str | None = None

    def turn(self) -> dict[str, Any]:
        """Return the turn for the chat template, which knows no developers. A line break separates text parts."""
        content = "\n".join(part.text for part in self.content)
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        turn |= {"name": self.name, "reasoning": reasoning, "reasoning_content": reasoning}
        turn |= {"tool_calls": [*map(_called, self.tool_calls)] or None, "tool_call_id": self.tool_call_id}
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

    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="With `include_usage`: in each chunk.")


_TokenId: TypeAlias = Annotated[int, Field(ge=0)]
_Stop: TypeAlias = Annotated[str, Field(max_length=STOP_CHARACTERS)]


class _Request(_Fields):
    """The fields that both endpoints have. A value of null is as if the field were left out."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=_MOST_TOKENS, description="The newer name of `max_tokens`."
    )
    min_tokens: int = Field(default=0, ge=0, description="Above 0 only with `ignore_eos` and without `stop`.")
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, ge=0, le=1, description="0: the likeliest token.")
    top_k: int = Field(default=0, ge=-1, description="0 or -1: all tokens.")
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0)
    logit_bias: dict[Annotated[_TokenId, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] = Field(
        default={}, max_length=MAX_BIASES, description="Biases by token id."
    )
    seed: int | None = None
    stop: Annotated[
        list[_Stop], BeforeValidator(_as_list, json_schema_input_type=str | list[_Stop]), Field(max_length=MAX_STOPS)
    ] = []
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    mode: Mode | None = Field(default=None, strict=False)
    num_speculative_tokens: int | None = Field(default=None, ge=1)
    token_sources: bool = Field(default=False, description="Say of each token who proposed it.")
    skip_special_tokens: Literal[True] = True


class TextFormat(_Fields):
    """The one format that is not constrained."""

    type: Literal["text"]


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS, description="Needs `logprobs`.")
    tools: list[dict[str, Any]] = Field(default=[], description="For the template, if `tool_choice` is none.")
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, str]] = []
    reasoning_effort: str | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] = []

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The conversation."""
        return ([message.turn() for message in self.messages],)

    @property
    def alternatives(self) -> int | None:
        """Alternatives that are told of each token; None: no log-probabilities either."""
        return self.top_logprobs if self.logprobs else None

    @property
    def template(self) -> dict[str, Any]:
        """The arguments of the chat template that differ from its defaults."""
        found = self.chat_template_kwargs | self.model_dump(include=_TEMPLATE_FIELDS, exclude_defaults=True)
        if self.reasoning_effort is not None:
            found.setdefault("enable_thinking", self.reasoning_effort != "none")
        return found


_Prompts: TypeAlias = Annotated[list[str | list[_TokenId]], Field(min_length=1)]


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: Annotated[_Prompts, BeforeValidator(_as_prompts, json_schema_input_type=str | list[_TokenId] | _Prompts)]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Literal[1] = 1
    add_special_tokens: Literal[True] = True
    template: ClassVar[Mapping[str, Any]] = {}

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts."""
        return tuple(self.prompt)

    @property
    def alternatives(self) -> int | None:
        """As of a chat."""
        return self.logprobs


@dataclass(frozen=True)
class Plan:
    """The work of the engine for one request."""

    request: ChatRequest | CompletionRequest
    params: SamplingParams
    """Parameters of the first choice; the next one has the next seed."""
    decoding: DecodingConfig

    @property
    def is_chat(self) -> bool:
        """The prompt is a conversation."""
        return isinstance(self.request, ChatRequest)

    def params_of(self, choice: int) -> SamplingParams:
        """The parameters of a prompt's choice, from 0."""
        return replace(self.params, seed=(self.params.seed + choice) & _SEED_MASK)


def plan(
    request: ChatRequest | CompletionRequest, decoding: DecodingConfig, max_length: int, max_speculative_tokens: int
) -> Plan:
    """Return the plan of a request; `decoding` is the default. Raises `RequestError`.

    `max_length`: tokens of prompt and answer together. `max_speculative_tokens`: candidates that fit into one pass.
    """
    max_tokens = request.max_completion_tokens or request.max_tokens or COMPLETION_TOKENS
    if isinstance(request, ChatRequest):
        max_tokens = request.max_completion_tokens or request.max_tokens or max_length
        if request.tools and request.tool_choice != "none":
            raise RequestError("tools: is not supported by this server", "tools", "unsupported_parameter")
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs: needs logprobs=true", "top_logprobs")
    if request.min_tokens > (max_tokens if request.ignore_eos and not request.stop else 0):
        message = "min_tokens: needs ignore_eos=true, no stop, and max_tokens that are not fewer"
        raise RequestError(message, "min_tokens", "unsupported_parameter")
    seed = secrets.randbelow(_RANDOM_SEEDS) if request.seed is None else request.seed & _SEED_MASK
    own = request.model_dump(include={each.name for each in fields(SamplingParams)})
    own |= {"max_new_tokens": max_tokens, "seed": seed}
    own |= {"top_p": max(request.top_p, _LEAST_TOP_P), "top_k": max(request.top_k, 0)}
    own |= {"logprobs": request.alternatives is not None, "top_logprobs": request.alternatives or 0}
    schedule = request.model_dump(include={"mode", "num_speculative_tokens"}, exclude_none=True)
    if schedule.get("num_speculative_tokens", 0) > max_speculative_tokens:
        message = f"num_speculative_tokens: this server takes {max_speculative_tokens}"
        raise RequestError(message, "num_speculative_tokens")
    try:
        return Plan(request, SamplingParams(**own), replace(decoding, **schedule))
    except ConfigError as error:
        raise config_error(error) from None


_NAMES = frozenset(
    name
    for kind in (ChatRequest, CompletionRequest, Message, TextPart, StreamOptions, TextFormat)
    for name in kind.model_fields
)


def config_error(error: ConfigError, param: str | None = None) -> RequestError:
    """The client's mistake that the engine has found, which begins its message with the key; `param` if it does not."""
    message = str(error).removeprefix("sampling.")
    found = re.match(r"(\w+)(?==|: )", message)
    if found is not None and param is None:
        param = "max_tokens" if found[1] == "max_new_tokens" else found[1]
    is_too_long = isinstance(error, ContextLengthError)
    return RequestError(message, param, "context_length_exceeded" if is_too_long else None)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The first mistake that pydantic has found in a body, in OpenAI's terms. Messages hold no value of the request."""
    first = errors[0]
    *place, name = first["loc"]
    param = _param(first["loc"])
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        message = f"{shown(name)}: is not known or not supported by this server{nearest(shown(name), _NAMES)}"
        param = ".".join(filter(None, (_param(place), shown(name))))
        return RequestError(message, param, "unsupported_parameter")
    if not param:
        return RequestError("the body must be a JSON object of text, sent as Content-Type: application/json")
    if first["type"] == "missing":
        return RequestError(f"missing required parameter: {param}", param, "missing_required_parameter")
    own = [error["msg"] for error in errors if _param(error["loc"]) == param]
    reasons = dict.fromkeys(message.removeprefix("Input should be ") for message in own)
    return RequestError(f"{param}: should be {' or '.join(reasons)}", param, "invalid_value")


def _param(location: Sequence[str | int]) -> str:
    """The dotted path of a field in the body, without what pydantic adds for members of a union."""
    return ".".join(str(part) for part in takewhile(lambda part: isinstance(part, int) or part in _NAMES, location[1:]))
