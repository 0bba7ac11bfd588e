"""Request bodies of OpenAI's protocol, with vLLM's additions. No I/O.

Declared fields take effect. Fields that cannot change an answer are dropped (`_WITHOUT_EFFECT`, and values that ask for
nothing), and so are unknown fields of messages and their parts. All others are refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct

from amusd.checkpoints.tokenizer import Prompt
from amusd.config import MAX_TOP_LOGPROBS, SamplingParams
from amusd.errors import ConfigError, ContextLengthError
from amusd.settings import Share, nearest, shown
from amusd.types import Mode

COMPLETION_TOKENS = 16
"""Default tokens of a completion, as in OpenAI's protocol."""
MAX_STOPS, STOP_CHARACTERS, MAX_BIASES = 64, 1024, 1024
"""Most stop strings of a request, characters of a string, entries of `logit_bias`."""
_RANDOM_SEEDS = 1 << 31
SEED_MASK = (1 << 63) - 1
_LEAST_TOP_P = 1e-9
_MAX_NESTED = 1 << 14
"""Most arrays and objects in a body. Reading more would hold up all other requests."""
_HALF_A_PAIR = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F]..)")
_WITHOUT_EFFECT = frozenset(
    """
    cache_salt include_reasoning metadata mm_processor_kwargs parallel_tool_calls prediction priority prompt_cache_key
    prompt_cache_retention request_id safety_identifier service_tier session_id spaces_between_special_tokens store
    stream_interval user
    """.split()  # noqa: SIM905 - a list has a line for each
)
_ASKS_FOR_NOTHING: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "function_call": "none",
    "length_penalty": 1,
    "modalities": ["text"],
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "verbosity": "medium",
}


@dataclass(eq=False)
class RequestError(Exception):
    """An error for the client: `message` names the field, `param` is its path."""

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


class TextPart(Struct):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Struct):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def turn(self) -> dict[str, str]:
        """The turn for the chat template. The role developer becomes system; a line break separates text parts."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **({"name": self.name} if self.name else {})}


_TokenId: TypeAlias = Annotated[int, Meta(ge=0)]
_Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 31)]
_Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
_Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
_Alternatives: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
_Stop: TypeAlias = Annotated[str, Meta(max_length=STOP_CHARACTERS)]


class _Request(Struct, kw_only=True):
    """The fields of both endpoints. A null counts as absent."""

    model: str | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    """The newer name of `max_tokens`."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Above 0 only with `ignore_eos` and without `stop`."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Share = 1.0
    """0: the most likely token alone."""
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """0 or -1: all tokens."""
    min_p: Share = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    logit_bias: Annotated[dict[_TokenId, _Bias], Meta(max_length=MAX_BIASES)] = {}
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    n: Annotated[int, Meta(ge=1)] = 1
    stream: bool = False
    stream_options: dict[str, bool | None] = {}
    """`include_usage`: a last chunk with the usage. Other options have no effect."""
    mode: Mode | None = None
    token_sources: bool = False
    """Report each token's `source`: target, candidate or alternative."""


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    is_chat: ClassVar = True
    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool = False
    top_logprobs: _Alternatives = 0
    """Needs `logprobs`."""
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
    prompt: str | Annotated[list[str | _TokenId | list[_TokenId]], Meta(min_length=1)]
    logprobs: _Alternatives | None = None
    chat_template_kwargs: ClassVar[Mapping[str, Any]] = {}

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts. Raises `RequestError` for a list of both texts and ids."""
        kinds = {*map(type, self.prompt)}
        if int in kinds and len(kinds) > 1:
            raise RequestError("prompt: is a list of both token ids and prompts", "prompt", "invalid_value")
        return cast("Sequence[Prompt]", [self.prompt] if isinstance(self.prompt, str) or int in kinds else self.prompt)

    @property
    def alternatives(self) -> int | None:
        """See `ChatRequest`."""
        return self.logprobs


Body: TypeAlias = ChatRequest | CompletionRequest


def read(kind: type[Body], content: bytes) -> Body:
    """The request that a body asks for. Raises `RequestError`."""
    if _num_nested(content) > _MAX_NESTED:  # brackets in strings count, too
        bare = content.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
        if _num_nested(b"".join(bare)) > _MAX_NESTED:
            raise RequestError("the body has too many values", status=413)
    try:
        given = msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        half = _HALF_A_PAIR.search(content)  # msgspec calls it truncated
        reason = f"{half[0][:6].decode('latin-1')} is half of a surrogate pair" if half else error
        raise RequestError(f"the body is not JSON: {reason}") from None
    if not isinstance(given, dict):
        raise RequestError("the body must be a JSON object")
    known = kind.__struct_fields__
    for choice, tools in (("tool_choice", "tools"), ("function_call", "functions")):
        if given.get(choice) == "none":
            given.pop(tools, None)
    for name, value in given.items():
        if name not in known and not _has_no_effect(kind, name, value):
            message = f"{shown(name)}: is not known or not supported by this server{nearest(shown(name), known)}"
            raise RequestError(message, shown(name), "unsupported_parameter")
    own = {name: _whole(value) for name, value in given.items() if name in known and value is not None}
    try:
        return msgspec.convert(own, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _mistake(str(error)) from None


def _num_nested(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{")


def _whole(value: Any) -> Any:
    """The value, as an integer if it is a whole float."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < SEED_MASK else value


def _has_no_effect(kind: type[Body], name: str, value: Any) -> bool:
    default = not kind.is_chat if name == "add_special_tokens" else _ASKS_FOR_NOTHING.get(name)
    is_empty = value is None or value in ("", [], {}) or (value is False and default is not True)
    return is_empty or name in _WITHOUT_EFFECT or value == default


def _mistake(told: str) -> RequestError:
    """The error for msgspec's message `REASON - at $.messages[0].role`."""
    reason, _, place = told.partition(" - at ")
    path = re.findall(r"\.(\w+)|\[(\d+)\]", place)
    missing = re.search("missing required field `(.*)`", reason)
    names = [name or number for name, number in path] + ([missing[1]] if missing else [])
    param = ".".join(names)
    if missing:
        return RequestError(f"missing required parameter: {param}", param, "missing_required_parameter")
    return RequestError(f"{param}: {reason}", param, "invalid_value")


def sampling_params(request: Body, max_length: int) -> SamplingParams:
    """Sampling parameters of a request's first choice. `max_length`: of prompt and answer. Raises `RequestError`."""
    default = max_length if request.is_chat else COMPLETION_TOKENS
    max_tokens = request.max_completion_tokens or request.max_tokens or default
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs: needs logprobs=true", "top_logprobs")
    if request.min_tokens > (max_tokens if request.ignore_eos and not request.stop else 0):
        message = "min_tokens: needs ignore_eos=true, no stop, and at least as many max_tokens"
        raise RequestError(message, "min_tokens", "unsupported_parameter")
    names = {each.name for each in fields(SamplingParams)} & {*request.__struct_fields__}
    own = {name: getattr(request, name) for name in names} | {
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


def config_error(error: ConfigError, param: str | None = None) -> RequestError:
    """The error for a mistake that the engine found. `param`: the field; by default the key that begins the error."""
    message = str(error).removeprefix("sampling.")
    found = re.match(r"(\w+)(?==|: )", message)
    if found is not None and param is None:
        param = "max_tokens" if found[1] == "max_new_tokens" else found[1]
    is_too_long = isinstance(error, ContextLengthError)
    return RequestError(message, param, "context_length_exceeded" if is_too_long else None)
