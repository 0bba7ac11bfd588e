"""Builds causal language models from checkpoints, with the lean decoder where possible.

A model that cannot be rolled back is refused: by its configuration, or by a test after loading.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.checkpoints.checkpoint import one_line_errors, open_checkpoint, refuse_unread
from amusd.checkpoints.configuration import ModelConfig, check_supported, load_config, position_limit, quantization_of
from amusd.checkpoints.decoder_weights import bias_shapes, fit_weights, load_decoder, weight_shapes
from amusd.checkpoints.vocabulary import EMBEDDING, HEAD, SharedVocabulary, adopt_vocabulary
from amusd.errors import ConfigError, first_line
from amusd.models.linear import INT8, why_not_int8
from amusd.models.network import Network
from amusd.runner.fallback import try_triton
from amusd.runner.load_options import LoadOptions, loaded_dtype
from amusd.runner.model_runner import ModelRunner

_ADVICE = "a smaller model, or a lower max_model_len or max_num_seqs, needs less"
_FULL = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def load_model(
    path: str | Path,
    options: LoadOptions,
    shared: SharedVocabulary | None = None,
    num_layers: int | None = None,
) -> ModelRunner:
    """Load a checkpoint: a folder, or a hub name if no such folder exists.

    `shared`: makes a draft read the target's ids. `num_layers`: load only the first layers. Raises `ConfigError` for a
    model that cannot be read or run.
    """
    config = load_config(path, num_layers, options.model_impl)
    with one_line_errors(path), prepared(config, options) as max_length:
        network = _load_network(path, config, options, shared, max_length)
        model = ModelRunner(network, options, max_length, None if shared is None else shared.output_ids)
    if not isinstance(config, ModelConfig):
        from amusd.checkpoints.transformers_models import try_model

        try_model(path, model)
    return model


def _load_network(
    path: str | Path, config: Any, options: LoadOptions, shared: SharedVocabulary | None, max_length: int
) -> Network:
    with one_line_errors(path):
        stored = open_checkpoint(path)
        if quantization_of(config) is None:
            _check_dtypes(path, stored)
        if isinstance(config, ModelConfig):
            weights = read_weights(path, stored, config)
            if shared is not None:
                adopt_vocabulary(weights, shared)
        else:
            from amusd.checkpoints.transformers_models import HuggingFaceNetwork, load_stock

            stock = load_stock(path, config, options, shared)
    del stored  # else its files stay in memory beside the network's copies
    if isinstance(config, ModelConfig):
        return load_decoder(weights, config, options, max_length)
    return HuggingFaceNetwork(stock, options)


def _check_dtypes(path: str | Path, stored: Mapping[str, Tensor]) -> None:
    for name, tensor in stored.items():
        if name.endswith(".weight") and not (tensor.is_floating_point() and tensor.itemsize > 1):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(f"model {path}: {name} is stored as {dtype}, and config.json says nothing of it")


def read_weights(path: str | Path, stored: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Weights of a model that `Decoder` covers, by the names of `weight_shapes`, still mapped."""
    # Names begin with "model." unless the model was saved without its head.
    first = "" if any(name.startswith("model.") for name in stored) else "model."
    given = {name if name == HEAD else first + name: tensor for name, tensor in stored.items()}
    ends = [given[name] for name in (EMBEDDING, HEAD) if name in given]
    # As in transformers, a stored head that differs from the embedding stays, even if the configuration ties them.
    if config.tie_word_embeddings and ends and (len(ends) == 1 or torch.equal(*ends)):
        given[EMBEDDING] = given[HEAD] = ends[0]
    shapes = weight_shapes(config) | bias_shapes(config)
    refuse_unread(path, given, shapes)
    return fit_weights(f"model {path}", given, shapes)


@contextlib.contextmanager
def prepared(config: Any, options: LoadOptions) -> Iterator[int]:
    """Check model and device, prepare the device, and yield the longest sequence in tokens.

    Raises `ConfigError` for an unsupported model or, in the block, a missing or full device. `config`: None for a model
    without layers.
    """
    if config is not None:
        check_supported(config, options.ranks.size)
        if options.dtype == INT8 and not isinstance(config, ModelConfig):
            raise ConfigError("dtype=int8: transformers computes this model, which has no int8 products")
        if options.model_impl == "transformers" and isinstance(config, ModelConfig):
            raise ConfigError("model_impl=transformers: transformers computes checkpoints, not random weights")
    if options.dtype == INT8 and (reason := why_not_int8(torch.device(options.device))) is not None:
        raise ConfigError(f"dtype=int8: there are no fast int8 products: {reason}")
    prepare_device(options.device)
    with device_errors(options.device):
        length = options.max_model_len if config is None else position_limit(config, options.max_model_len)
        if isinstance(config, ModelConfig) and options.device.startswith("cuda"):
            _check_memory(config, options, length)
        yield length


def _check_memory(config: ModelConfig, options: LoadOptions, length: int) -> None:
    """Raise `ConfigError` if a GPU has no room for the weights and the cache of one sequence."""
    cached = (2, config.num_hidden_layers, config.num_key_value_heads, config.head_dim, length)
    shapes = weight_shapes(config) | {"cache": cached} | ({HEAD: (0,)} if config.tie_word_embeddings else {})
    needed = sum(map(math.prod, shapes.values())) * loaded_dtype(options.dtype).itemsize / options.ranks.size
    if needed > (free := torch.cuda.mem_get_info(options.device)[0]):
        need = f"weights and the cache of one sequence need {needed / 1e9:.1f} GB"
        raise ConfigError(f"device {options.device}: {free / 1e9:.1f} GB are free, and {need}; {_ADVICE}")


def prepare_device(device: str) -> None:
    """Set how torch computes on a GPU, and try Triton there. Idempotent."""
    if not device.startswith("cuda"):
        return
    try_triton(device)
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # it takes 0.4 s for each new length of a prompt
    matmul = torch.backends.cuda.matmul  # partial sums are added in float32
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False


@contextlib.contextmanager
def device_errors(device: str, *, only_full: bool = False) -> Iterator[None]:
    """Turn torch's errors for a missing or full device into a `ConfigError` of one line.

    `only_full`: raise other errors as they are.
    """
    try:
        yield
    except (RuntimeError, AssertionError, MemoryError) as error:
        is_full = isinstance(error, MemoryError) or any(text in str(error) for text in _FULL)
        if only_full and not is_full:
            raise
        full = f"out of memory; {_ADVICE}: " if is_full else ""
        raise ConfigError(f"device {device}: {full}{first_line(error)}") from error
