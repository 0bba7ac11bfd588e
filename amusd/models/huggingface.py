"""Any causal language model of transformers behind the `LanguageModel` interface.

Knows shapes, dtypes and devices; knows nothing of candidates, sampling or messages. Refuses at load time, before any
weight is read, what it could not roll back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError, UnsupportedModelError
from amusd.models.attention import CausalMask, register_attention
from amusd.models.compatibility import check_supported, position_limit
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import KVCache, ModelOutput
from amusd.models.numerics import Numerics

_PADDING_ID = 0  # any id will do: rows of padding are never read


class HuggingFaceModel:
    """A transformers causal language model whose attention is `amusd.models.attention.attend`."""

    def __init__(
        self,
        model: Any,
        numerics: Numerics,
        *,
        max_length: int,
        output_ids: Tensor | None = None,
    ) -> None:
        """Wrap a loaded model; `load_model` and `load_embedded_draft` make one."""
        text = model.config.get_text_config(decoder=True)
        self._model = model
        self._numerics = numerics
        self._device: torch.device = model.device
        on_cpu = self._device.type == "cpu"
        # On a CPU padding a bucketed pass buys nothing: no kernel is chosen or captured per shape.
        self._pads = numerics.fixed or not on_cpu
        self._cache_dtype: torch.dtype = torch.float32 if on_cpu else model.dtype
        self._max_length = max_length
        self._num_ids = int(model.get_input_embeddings().weight.shape[0])
        self._output_ids = output_ids
        self._vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self._mask = CausalMask(
            max_rows=max(numerics.width, numerics.prefill_chunk),
            size=numerics.allocation(max_length),
            groups=_query_groups(text),
            dtype=self._cache_dtype,
            device=self._device,
        )
        # Rows of padding may stand beyond the last position the model knows.
        positions = torch.arange(numerics.allocation(max_length), device=self._device)
        self._positions = positions.clamp_(max=max_length - 1).unsqueeze(0)  # [1, allocated]

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._vocab_size

    @property
    def output_ids(self) -> Tensor | None:
        """[vocab_size] int64: column `j` of the logits scores token `output_ids[j]`; None: token `j`."""
        return self._output_ids

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""
        return self._max_length

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters; tied ones count once."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def new_cache(self, capacity: int) -> PreallocatedCache:
        """An empty cache for at most `capacity` tokens. Raises `ValueError` beyond `max_length`."""
        if not 1 <= capacity <= self._max_length:
            raise ValueError(f"a cache of {capacity} tokens: must be between 1 and {self._max_length}")
        allocated = self._numerics.allocation(capacity)
        return PreallocatedCache(capacity=capacity, allocated=allocated, dtype=self._cache_dtype)

    def max_rows(self, start: int) -> int:
        """How many tokens one `forward` may carry at position `start`."""
        return self._numerics.max_rows(start)

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens whose logits nobody needs. Raises `ValueError` as `forward` does, before any change."""
        cache = self._checked(token_ids, cache)
        end = cache.length + len(token_ids)
        done = 0
        while cache.length < end:
            start = cache.length
            rows = self._numerics.prefill_end(start, end) - start
            num_keys = self._numerics.prefill_keys(start + rows)
            self._run(self._model.base_model, token_ids[done : done + rows], rows, num_keys, cache)
            done += rows

    def forward(self, token_ids: Sequence[int], cache: KVCache) -> ModelOutput:
        """One pass over 1 to `max_rows(cache.length)` tokens; see `LanguageModel.forward`."""
        cache = self._checked(token_ids, cache)
        rows, start = len(token_ids), cache.length
        if not 1 <= rows <= self._numerics.max_rows(start):
            raise ValueError(f"{rows} tokens at {start}: allowed are 1 to {self._numerics.max_rows(start)}")
        computed = self._numerics.padded_rows(rows) if self._pads else rows
        output = self._run(self._model, token_ids, computed, self._numerics.num_keys(start, computed), cache)
        return ModelOutput(logits=output.logits[0, :rows])

    def _run(
        self, module: Any, token_ids: Sequence[int], computed: int, num_keys: int, cache: PreallocatedCache
    ) -> Any:
        """Run `module` over the tokens padded to `computed` rows, and move the cache by the real ones."""
        start, rows = cache.length, len(token_ids)
        ids = list(token_ids) + [_PADDING_ID] * (computed - rows)
        cache.begin(computed, num_keys)
        with torch.inference_mode():
            output = module(
                input_ids=torch.tensor([ids], device=self._device),  # [1, computed]
                attention_mask=self._mask.at(start, computed, num_keys),  # [1, groups, computed, num_keys]
                position_ids=self._positions[:, start : start + computed],
                past_key_values=cache,
                use_cache=True,
            )
        cache.advance(rows)
        return output

    def _checked(self, token_ids: Sequence[int], cache: KVCache) -> PreallocatedCache:
        if not isinstance(cache, PreallocatedCache):
            raise TypeError(f"a cache of new_cache() is needed, not a {type(cache).__name__}")
        if cache.length + len(token_ids) > cache.capacity:
            raise ValueError(f"{len(token_ids)} tokens do not fit: {cache.length} of {cache.capacity} are used")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._num_ids:
            raise ValueError(f"token ids must be in [0, {self._num_ids}), not {min(token_ids)} to {max(token_ids)}")
        return cache


def load_model(
    path: str | Path,
    *,
    numerics: Numerics,
    max_model_len: int,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> HuggingFaceModel:
    """Load a checkpoint: a folder, or a hub name if no such folder exists.

    Raises `UnsupportedModelError` for a model that cannot be rolled back (no weight has been read then), and
    `ConfigError` for one that is missing, incomplete or not in the safetensors format.
    """
    config = load_config(path)
    model_class = causal_class(config)
    check_supported(config, model_class, max_model_len)
    assert model_class is not None  # refused above
    with quiet_transformers(), _one_line_errors(path):
        model, info = model_class.from_pretrained(
            str(path),
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=register_attention(),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=Path(path).exists(),
            output_loading_info=True,
        )
    if info["missing_keys"]:
        raise ConfigError(f"model {path}: the checkpoint lacks weights, {min(info['missing_keys'])} among them")
    return wrap_model(model, numerics=numerics, max_model_len=max_model_len, device=device)


def wrap_model(
    model: Any,
    *,
    numerics: Numerics,
    max_model_len: int,
    device: str = "cpu",
    output_ids: Tensor | None = None,
) -> HuggingFaceModel:
    """Put a loaded transformers model on `device`, ready for inference. Raises `ConfigError` without that device."""
    try:
        model = model.to(device).eval().requires_grad_(requires_grad=False)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device}: {_first_line(error)}") from error
    max_length = min(max_model_len, position_limit(model.config) or max_model_len)
    return HuggingFaceModel(model, numerics, max_length=max_length, output_ids=output_ids)


def load_config(path: str | Path) -> Any:
    """The transformers configuration of a checkpoint. Raises `ConfigError` if there is none."""
    from transformers import AutoConfig

    if not Path(path).exists() and _looks_local(str(path)):
        raise ConfigError(f"model {path}: no such folder")
    with quiet_transformers(), _one_line_errors(path):
        return AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=Path(path).exists())


def causal_class(config: Any) -> Any | None:
    """The causal language model class of transformers for a configuration, or None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings, and put its settings back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _one_line_errors(path: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a missing or foreign checkpoint into a `ConfigError` of one line."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise UnsupportedModelError(f"model {path}: it needs code of its own, which is never run") from error
        raise ConfigError(f"model {path}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _looks_local(path: str) -> bool:
    """Whether a name cannot be one of the hub, which are `name` or `owner/name`."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or "\\" in path


def _query_groups(text_config: Any) -> int:
    """Query heads per key head."""
    heads = getattr(text_config, "num_attention_heads", 1)
    return int(heads // (getattr(text_config, "num_key_value_heads", None) or heads))
