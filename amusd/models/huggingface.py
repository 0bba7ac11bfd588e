"""Loads causal language models of transformers, and runs those that `Decoder` does not cover.

Refuses at load time, before any weight is read, what could not be rolled back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError, UnsupportedModelError
from amusd.models.attention import Attention, register_attention
from amusd.models.cached_model import CachedModel
from amusd.models.checkpoint import CONFIG, find_checkpoint, first_line, one_line_errors, open_checkpoint
from amusd.models.compatibility import check_supported, position_limit
from amusd.models.decoder import Decoder, why_not_covered
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.linear import FP8_ROW_DTYPES, INT8, why_not_int8
from amusd.models.load_options import LoadOptions
from amusd.models.mapped_model import check_dtypes, mapped_model, wrong_shape
from amusd.models.network import Network
from amusd.models.quantization import check_quantization, is_fp8
from amusd.models.row_attention import require_triton
from amusd.models.sharding import setting_of
from amusd.types import Role


class HuggingFaceNetwork:
    """A `Network` around a causal language model of transformers whose attention is `amusd.models.attention.attend`."""

    implementation = "transformers"

    def __init__(self, model: Any) -> None:
        """`model` is on its device and ready for inference."""
        _freeze_frequencies(model)
        self._model = model
        self.device: torch.device = model.device
        self.cache_dtype: torch.dtype = torch.float32 if self.device.type == "cpu" else model.dtype
        self.num_ids = int(model.get_input_embeddings().weight.shape[0])
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a pass reads: all but an embedding that is not the output head as well."""
        embedding, head = self._model.get_input_embeddings().weight, self._model.get_output_embeddings().weight
        return self.parameter_bytes - (0 if head is embedding else int(embedding.nbytes))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights; tied ones count once."""
        return sum(int(parameter.nbytes) for parameter in self._model.parameters())

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, cache: PreallocatedCache, *, with_logits: bool
    ) -> Tensor | None:
        """See `Network`."""
        module = self._model if with_logits else self._model.base_model
        output = module(
            input_ids=token_ids.unsqueeze(0),
            attention_mask=None,
            attention=attention,
            position_ids=positions.unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[0] if with_logits else None


def _freeze_frequencies(model: Any) -> None:
    """Keep rotary embeddings from looking at positions, on the host, for a length where their frequencies would switch.

    No sequence gets there (`position_limit`), and a captured pass cannot look.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _frozen(kinds)
        elif isinstance(kinds, dict):  # by type of layer
            module.rope_type = {layer_type: _frozen(kind) for layer_type, kind in kinds.items()}


def _frozen(rope_type: str) -> str:
    return "default" if rope_type in ("dynamic", "longrope") else rope_type


def load_model(path: str | Path, options: LoadOptions) -> CachedModel:
    """Load a checkpoint: a folder, or a hub name if no such folder exists.

    Raises `UnsupportedModelError` for a model that cannot be rolled back, or that `model_impl=amusd` does not cover (no
    weight has been read then), and `ConfigError` for one that is missing, incomplete or not in the safetensors format.
    """
    config = load_config(path)
    with quiet_transformers(), one_line_errors(path):
        check_supported(config, causal_class(config), options.max_model_len)
        check_options(config, options)  # refuses before any weight is read
        checkpoint = open_checkpoint(path)
        check_dtypes(checkpoint, config)
        if uses_decoder(config, options.model_impl):
            model = mapped_model(checkpoint, config)
        else:
            model = _stock_model(path, config, options)
        return wrap_model(model, options, dtype=loaded_dtype(options.dtype))


def _stock_model(path: str | Path, config: Any, options: LoadOptions) -> Any:
    """The model as transformers loads it, which knows how the weights of every architecture are stored."""
    model_class = causal_class(config)
    assert model_class is not None  # refused before
    model, info = model_class.from_pretrained(
        str(find_checkpoint(path)),
        config=config,
        dtype=loaded_dtype(options.dtype),
        attn_implementation=register_attention(),
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # refused below, by name
        output_loading_info=True,
    )
    for name, stored, expected in info["mismatched_keys"]:
        raise ConfigError(wrong_shape(path, name, stored, expected))
    if info["missing_keys"]:
        raise ConfigError(f"model {path}: the checkpoint lacks weights, {min(info['missing_keys'])} among them")
    return model


def loaded_dtype(dtype: str) -> torch.dtype:
    """As which weights are read for a model in `dtype`: int8 ones are made of float32."""
    result: torch.dtype = torch.float32 if dtype == INT8 else getattr(torch, dtype)
    return result


def wrap_model(
    model: Any, options: LoadOptions, output_ids: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> CachedModel:
    """Put a loaded transformers model on its device, ready for inference; the caller must not use it any more.

    `model` has weights in `dtype`, or in whatever they are if that is None; the lean decoder converts them on the way.
    For `int8` they are float32. `output_ids`: see `LanguageModel`.
    Raises `ConfigError` without that device, `UnsupportedModelError` if the lean decoder is asked for and does not
    cover the model, the ranks cannot share it, or there are no int8 products.
    """
    check_options(model.config, options)
    max_length = min(options.max_model_len, position_limit(model.config) or options.max_model_len)
    model = model.eval().requires_grad_(requires_grad=False)
    network: Network
    with device_errors(options.device):
        if options.device.startswith("cuda"):
            require_triton()
            torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # it builds a plan for each length of a prompt: 0.4 s
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # of sums that are split
        if uses_decoder(model.config, options.model_impl):
            network = Decoder(
                model,
                device=torch.device(options.device),
                max_positions=max_length,
                dtype=dtype,
                int8=options.is_int8,
                ranks=options.ranks,
            )
        else:
            network = HuggingFaceNetwork(model.to(options.device))
        return CachedModel(
            network,
            options.numerics,
            max_length=max_length,
            output_ids=output_ids,
            capture=options.capture,
            tokens_per_step=options.tokens_per_step,
            ranks=options.ranks,
        )


def check_options(config: Any, options: LoadOptions) -> None:
    """Raise `UnsupportedModelError` if the model of a configuration cannot be had like that."""
    uses_decoder(config, options.model_impl)
    check_fp8(config, options.model_impl, options.dtype)
    check_int8(config, options.model_impl, options.device, int8=options.is_int8)
    check_shares(config, options.model_impl, options.ranks.role, options.ranks.size)


def uses_decoder(config: Any, model_impl: str) -> bool:
    """Whether `Decoder` computes the model of a configuration; if not, `HuggingFaceNetwork` does.

    Raises `UnsupportedModelError` if `model_impl` is `amusd` and the decoder does not cover the model.
    """
    reason = why_not_covered(config)
    if model_impl == "amusd" and reason is not None:
        raise UnsupportedModelError(f"model_impl=amusd: model type '{config.model_type}': {reason}")
    return reason is None and model_impl != "transformers"


def why_adapter(config: Any, model_impl: str) -> str | None:
    """Why `HuggingFaceNetwork` computes a configuration's model; None: `Decoder` does. Raises as `uses_decoder`."""
    if uses_decoder(config, model_impl):
        return None
    return "model_impl=transformers" if model_impl == "transformers" else why_not_covered(config)


def check_fp8(config: Any, model_impl: str, dtype: str) -> None:
    """Raise `UnsupportedModelError` if the checkpoint is in FP8 and cannot run so."""
    if not is_fp8(config):
        return
    if (reason := why_adapter(config, model_impl)) is not None:
        raise UnsupportedModelError(f"the checkpoint is in FP8, which only the lean decoder multiplies: {reason}")
    if dtype not in FP8_ROW_DTYPES:
        raise UnsupportedModelError(f"dtype={dtype}: the checkpoint is in FP8, allowed: {' or '.join(FP8_ROW_DTYPES)}")


def check_int8(config: Any, model_impl: str, device: str, *, int8: bool) -> None:
    """Raise `UnsupportedModelError` if `int8` is wanted and cannot be had."""
    if not int8:
        return
    if (reason := why_adapter(config, model_impl)) is not None:
        raise UnsupportedModelError(f"dtype=int8: only the lean decoder multiplies in int8: {reason}")
    if (reason := why_not_int8(torch.device(device))) is not None:
        raise UnsupportedModelError(f"dtype=int8: there are no fast int8 products: {reason}")


def check_shares(config: Any, model_impl: str, role: Role, num_ranks: int) -> None:
    """Raise `UnsupportedModelError` if this many ranks of a role cannot share the model of a configuration."""
    if num_ranks == 1:
        return
    if (reason := why_adapter(config, model_impl)) is not None:
        raise UnsupportedModelError(
            f"{setting_of(role)}={num_ranks}: ranks share the lean decoder only: {reason}; allowed: 1"
        )
    if num_ranks > config.num_key_value_heads:
        raise UnsupportedModelError(
            f"{setting_of(role)}={num_ranks}: each rank needs a key head, and this model has "
            f"{config.num_key_value_heads}; allowed: 1 to {config.num_key_value_heads}"
        )


def load_config(path: str | Path) -> Any:
    """The transformers configuration of a checkpoint.

    Raises `ConfigError` if there is none, `UnsupportedModelError` if it is quantized in a way that cannot run exactly.
    """
    from transformers import AutoConfig

    folder = find_checkpoint(path)
    with quiet_transformers(), one_line_errors(path, CONFIG):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        check_quantization(path, config)
    return config


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
def device_errors(device: str) -> Iterator[None]:
    """Turn what torch raises for a device that is not there, or is full, into a `ConfigError` of one line."""
    try:
        yield
    except (RuntimeError, AssertionError, MemoryError) as error:
        is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        full = "out of memory; a smaller model, or a lower max_model_len, needs less: " if is_full else ""
        raise ConfigError(f"device {device}: {full}{first_line(error)}") from error
