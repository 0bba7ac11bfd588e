"""Request bodies of OpenAI's protocol, with vLLM's additions. Pure.

A declared field has its effect. Others are dropped if they cannot change an answer (`_WITHOUT_EFFECT`, and values that
ask for nothing), else refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from amusd.config import MAX_TOP_LOGPROBS, SamplingParams
from amusd.errors import ConfigError, ContextLengthError
from amusd.prompts import Prompt
from amusd.settings import nearest, shown
from amusd.types import Mode

COMPLETION_TOKENS = 16
"""Default tokens of a completion, as in OpenAI's protocol."""
_MOST_TOKENS = 1 << 31
MAX_STOPS, STOP_CHARACTERS, MAX_BIASES = 64, 1024, 1024
"""Stop strings of a request, characters of each, and entries of its `logit_bias`."""
_RANDOM_SEEDS = 1 << 31
SEED_MASK = (1 << 63) - 1
_LEAST_TOP_P = 1e-9
_WITHOUT_EFFECT = frozenset(
    """
    annotations cache_control cache_salt continuous_usage_stats include_obfuscation include_reasoning metadata
    mm_processor_kwargs parallel_tool_calls prediction priority prompt_cache_key prompt_cache_retention refusal
    request_id safety_identifier service_tier session_id spaces_between_special_tokens store stream_interval type user
    """.split()  # noqa: SIM905 - a list has a line for each
)
_ASKS_FOR_NOTHING: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "best_of": 1,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
}


@dataclass(eq=False)
class RequestError(Exception):
    """A client's mistake: `message` names the field, `param` is its path."""

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
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and (name in cls.model_fields or not _has_no_effect(name, value))
        }


def _has_no_effect(name: str, value: Any) -> bool:
    is_empty = value is False or value in ("", [], {})
    return is_empty or name in _WITHOUT_EFFECT or value == _ASKS_FOR_NOTHING.get(name)


class ErrorBody(BaseModel):
    """An error, as OpenAI has it."""

    error: dict[Literal["message", "type", "param", "code"], str | None]


class TextPart(_Fields):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = ""
    name: str | None = None

    def turn(self) -> dict[str, str]:
        """The turn for the chat template. The role developer becomes system; a line break separates text parts."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **({"name": self.name} if self.name else {})}


class StreamOptions(_Fields):
    """The additions to a stream besides its pieces."""

    include_usage: bool = False


_TokenId: TypeAlias = Annotated[int, Field(ge=0)]
_Tokens: TypeAlias = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
_Stop: TypeAlias = Annotated[str, Field(max_length=STOP_CHARACTERS)]


class _Request(_Fields):
    """The fields of both endpoints. A null is as if left out."""

    model: str | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = Field(default=None, description="The newer name of `max_tokens`.")
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
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    mode: Mode | None = Field(default=None, strict=False)
    token_sources: bool = Field(default=False, description="Say of each token who proposed it.")


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    is_chat: ClassVar = True
    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS, description="Needs `logprobs`.")
    chat_template_kwargs: dict[str, Any] = {}
    tool_choice: Literal["none", "auto"] = "none"

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The conversation."""
        return [[message.turn() for message in self.messages]]

    @property
    def alternatives(self) -> int | None:
        """Alternatives reported for each token; None: no log-probabilities either."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    is_chat: ClassVar = False
    prompt: (
        str
        | Annotated[list[_TokenId], Field(min_length=1)]
        | Annotated[list[str | list[_TokenId]], Field(min_length=1)]
    )
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: ClassVar[Mapping[str, Any]] = {}

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("Sequence[Prompt]", [self.prompt] if is_one else self.prompt)

    @property
    def alternatives(self) -> int | None:
        """As of a chat."""
        return self.logprobs


Body: TypeAlias = ChatRequest | CompletionRequest


def sampling_params(request: Body, max_length: int) -> SamplingParams:
    """Parameters of a request's first choice; each further one has the next seed. Raises `RequestError`.

    `max_length`: tokens of prompt and answer together.
    """
    default = max_length if request.is_chat else COMPLETION_TOKENS
    max_tokens = request.max_completion_tokens or request.max_tokens or default
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs: needs logprobs=true", "top_logprobs")
    if request.min_tokens > (max_tokens if request.ignore_eos and not request.stop else 0):
        message = "min_tokens: needs ignore_eos=true, no stop, and max_tokens that are not fewer"
        raise RequestError(message, "min_tokens", "unsupported_parameter")
    own = request.model_dump(include={each.name for each in fields(SamplingParams)}) | {
        "max_new_tokens": max_tokens,
        "seed": secrets.randbelow(_RANDOM_SEEDS) if request.seed is None else request.seed & SEED_MASK,
        "top_p": max(request.top_p, _LEAST_TOP_P),
        "top_k": max(request.top_k, 0),
        "logprobs": request.alternatives is not None,
        "top_logprobs": request.alternatives or 0,
    }
    try:
        return SamplingParams(**own)
    except ConfigError as error:
        raise config_error(error) from None


_NAMES = frozenset(
    name for kind in (ChatRequest, CompletionRequest, Message, TextPart, StreamOptions) for name in kind.model_fields
)


def config_error(error: ConfigError, param: str | None = None) -> RequestError:
    """The client's mistake that the engine found, with the key that begins its message; else `param`."""
    message = str(error).removeprefix("sampling.")
    found = re.match(r"(\w+)(?==|: )", message)
    if found is not None and param is None:
        param = "max_tokens" if found[1] == "max_new_tokens" else found[1]
    is_too_long = isinstance(error, ContextLengthError)
    return RequestError(message, param, "context_length_exceeded" if is_too_long else None)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The deepest mistake that pydantic found, in OpenAI's terms, without a value of the request."""
    first = max(errors, key=lambda error: len(_path(error)))  # for a union there is one for each of its members
    path = _path(first)
    param = ".".join(path)
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        name = shown(first["loc"][-1])
        message = f"{name}: is not known or not supported by this server{nearest(name, _NAMES)}"
        return RequestError(message, ".".join([*path, name]), "unsupported_parameter")
    if not param:
        return RequestError("the body must be a JSON object of text, sent as Content-Type: application/json")
    if first["type"] == "missing":
        return RequestError(f"missing required parameter: {param}", param, "missing_required_parameter")
    reasons = [error["msg"].removeprefix("Input should be ") for error in errors if _path(error) == path]
    return RequestError(f"{param}: should be {' or '.join(dict.fromkeys(reasons))}", param, "invalid_value")


def _path(error: Mapping[str, Any]) -> list[str]:
    return [str(part) for part in error["loc"][1:] if isinstance(part, int) or part in _NAMES]
