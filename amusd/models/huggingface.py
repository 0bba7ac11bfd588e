"""Loads causal language models of transformers, and runs those that `Decoder` does not cover.

A model that cannot be rolled back is refused before any weight is read.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError, DeviceError, UnsupportedModelError, first_line
from amusd.models.attention import Attention, register_attention
from amusd.models.cached_model import CachedModel
from amusd.models.checkpoint import (
    CONFIG,
    Checkpoint,
    find_checkpoint,
    one_line_errors,
    open_checkpoint,
)
from amusd.models.compatibility import is_quantized, position_limit, supported_class
from amusd.models.decoder import Decoder
from amusd.models.features import FeatureSpec, FeatureTaps
from amusd.models.graphs import run_each_time
from amusd.models.kv_cache import KVMemory
from amusd.models.linear import INT8
from amusd.models.load_options import LoadOptions, uses_decoder
from amusd.models.passes import Network
from amusd.models.row_attention import require_triton
from amusd.models.self_test import rows_agree
from amusd.models.vocabulary import SharedVocabulary, adopt_vocabulary

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FULL = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What errors of a full device say: of torch, of the driver, of cuBLAS."""


class HuggingFaceNetwork:
    """A `Network` around a causal language model of transformers whose attention is `amusd.models.attention.attend`."""

    implementation = "transformers"
    feature_width = 0
    fills_vectors = False
    """False: it is not known of other authors' layers."""

    def __init__(self, model: Any, features: Mapping[str, FeatureSpec] | None = None) -> None:
        """`model` is on its device and ready for inference. `features`: see `Decoder`."""
        _freeze_frequencies(model)
        self._model = model
        self.device: torch.device = model.device
        self.cache_dtype: torch.dtype = torch.float32 if self.device.type == "cpu" else model.dtype
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        self.num_ids, self.vocab_size = len(embedding), int(head.out_features)
        tensors = itertools.chain(model.parameters(), model.buffers())  # quantizers keep weights in either
        self.parameter_bytes = sum(int(tensor.nbytes) for tensor in tensors)
        self.weight_bytes = self.parameter_bytes - (0 if head.weight is embedding else int(embedding.nbytes))
        self.taps = FeatureTaps(features, self.device, model.dtype) if features else None

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        memory: KVMemory,
        *,
        with_logits: bool,
        several: bool = False,  # noqa: ARG002 - its rows never share more than rounding
    ) -> Tensor | None:
        """See `Network`."""
        module = self._model if with_logits else self._model.base_model
        output = module(
            input_ids=token_ids.unsqueeze(0),
            attention_mask=None,
            attention=attention,
            position_ids=positions.unsqueeze(0),
            past_key_values=memory,
            use_cache=True,
            output_hidden_states=self.taps is not None,
        )
        if self.taps is not None:
            self.taps.write({layer: output.hidden_states[layer][0] for layer in self.taps.layers}, memory)
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


def load_model(
    path: str | Path,
    options: LoadOptions,
    shared: SharedVocabulary | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> CachedModel:
    """Load a checkpoint: a folder, or a hub name if no such folder exists.

    `shared`: the vocabulary of a draft whose ids are not its target's; the model then reads the target's ids.
    `report` receives a line about each promise that transformers' layers for the model break.
    Raises `UnsupportedModelError` for a model that cannot be rolled back, or that `model_impl=amusd` does not cover (no
    weight has been read then), and `ConfigError` for one that is missing, incomplete or not in the safetensors format.
    """
    config = load_config(path, options.num_layers)
    check_quantizer(path, config)
    with quiet_transformers(), one_line_errors(path):
        model_class = supported_class(config, options.max_model_len)
        options.check(config)  # refuses before any weight is read
        prepare_device(options.device)
        checkpoint = open_checkpoint(path)
        if not is_quantized(config):
            _check_dtypes(checkpoint)
        if uses_decoder(config, options.model_impl):
            model = mapped_model(checkpoint, config)
        else:
            model = _stock_model(path, model_class, config, options)
        if shared is not None:
            adopt_vocabulary(model, shared)
        output_ids = None if shared is None or shared.has_same_tokenizer else shared.output_ids
        wrapped = wrap_model(model, options, output_ids, dtype=loaded_dtype(options.dtype))
    if wrapped.implementation == HuggingFaceNetwork.implementation:
        with one_line_errors(path, "transformers' code for it, without kernels from a hub, cannot compute a token"):
            wrapped = _try_out(wrapped, options, lambda line: report(f"model {path}: {line}"))
    return wrapped


def _try_out(model: CachedModel, options: LoadOptions, report: Callable[[str], None]) -> CachedModel:
    """Compute a few tokens; return the model, without captured passes if its layers cannot be captured."""
    try:
        is_exact = rows_agree(model)
    except DeviceError as error:
        if options.capture in (None, run_each_time):
            raise
        report(f"computed without CUDA graphs, which is slower: {error}")
        model = model.uncaptured()
        is_exact = rows_agree(model)
    if options.numerics.fixed and not is_exact:
        report("a token's logits depend on how many tokens share its pass, so the modes may give different answers")
    return model


def _check_dtypes(checkpoint: Checkpoint) -> None:
    """Raise `UnsupportedModelError` for weights whose dtype needs scales of which the configuration says nothing."""
    for name in checkpoint.names:
        if name.endswith(".weight") and (dtype := checkpoint.dtype(name)) not in _FLOATS:
            raise UnsupportedModelError(
                f"model {checkpoint.path}: {name} is stored as {dtype}, and config.json says nothing of it"
            )


def mapped_model(checkpoint: Checkpoint, config: Any) -> Any:
    """The model of a configuration that `Decoder` covers, its weights in the checkpoint's mapped files.

    Weights keep their stored dtype. None is read before it is copied, so beside the decoder memory holds at most one
    layer or the embeddings again. Raises `ConfigError` if weights are missing or do not fit.
    """
    model = empty_model(config, torch.float32)
    places: dict[Tensor, list[str]] = {}  # a tied weight has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    weights: dict[str, torch.nn.Parameter] = {}
    missing: list[str] = []
    for parameter, names in places.items():
        found = {name: stored for name in names if (stored := _find(model, checkpoint, name)) is not None}
        for name, tensor in found.items():
            if tensor.shape != parameter.shape:
                raise ConfigError(_wrong_shape(checkpoint.path, name, tensor.shape, parameter.shape))
        if found:
            weights.update(_tie(names, found))
        else:
            missing.append(names[0])
    if missing:
        raise ConfigError(f"model {checkpoint.path}: the checkpoint lacks weights, {min(missing)} among them")
    model.load_state_dict(weights, strict=False, assign=True)
    compute_frequencies(model, "cpu")
    return model


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The model of a configuration on `meta`, without weights."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=register_attention())
    return model.requires_grad_(requires_grad=False)


def compute_frequencies(model: Any, device: str) -> None:
    """Make the rotary frequencies of an `empty_model` anew on `device`: they are computed buffers, not weights."""
    with torch.device(device):
        model.base_model.rotary_emb = type(model.base_model.rotary_emb)(model.config)


def _tie(names: list[str], found: Mapping[str, Tensor]) -> dict[str, torch.nn.Parameter]:
    """The parameters at the places `names` of one weight, some of which were `found`: one for all.

    A place keeps its own weight if that differs, whatever the configuration says, as in transformers.
    """
    first = next(iter(found.values()))
    shared = torch.nn.Parameter(first, requires_grad=False)
    tied = dict.fromkeys(names, shared)
    for name, own in found.items():
        if own is not first and not torch.equal(own, first):
            tied[name] = torch.nn.Parameter(own, requires_grad=False)
    return tied


def _find(model: Any, checkpoint: Checkpoint, name: str) -> Tensor | None:
    """The tensor stored under a parameter's name, or under its name in a checkpoint of the model without a head."""
    for stored in (name, name.removeprefix(f"{model.base_model_prefix}.")):
        if stored in checkpoint:
            return checkpoint.tensor(stored)
    return None


def _wrong_shape(path: object, name: str, stored: Iterable[int], expected: Iterable[int]) -> str:
    """The message about a weight whose shape differs from the configuration's."""
    return f"model {path}: {name} has shape {list(stored)}, and {CONFIG} asks for {list(expected)}"


def _stock_model(path: str | Path, model_class: Any, config: Any, options: LoadOptions) -> Any:
    """The model as transformers loads it, which knows how the weights of every architecture are stored.

    Its quantizers are the libraries that are installed. Most of them load onto a device, by the library accelerate.
    """
    from transformers.utils import is_accelerate_available

    forbid_kernels()
    onto_device = is_quantized(config) and (options.device != "cpu" or is_accelerate_available())
    model, info = model_class.from_pretrained(
        str(find_checkpoint(path)),
        config=config,
        dtype=loaded_dtype(options.dtype),
        device_map={"": options.device} if onto_device else None,
        attn_implementation=register_attention(),
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # refused below, by name
        output_loading_info=True,
    )
    for name, stored, expected in info["mismatched_keys"]:
        raise ConfigError(_wrong_shape(path, name, stored, expected))
    if info["missing_keys"]:
        raise ConfigError(f"model {path}: the checkpoint lacks weights, {min(info['missing_keys'])} among them")
    return model


def forbid_kernels() -> None:
    """Hide the library `kernels` from all others in this process: it fetches compiled code from a hub and runs it."""
    from transformers.utils.import_utils import is_kernels_available

    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import fails then
    is_kernels_available.cache_clear()


def loaded_dtype(dtype: str) -> torch.dtype:
    """The dtype as which weights are read for a model in `dtype`: int8 ones are made from float32."""
    result: torch.dtype = torch.float32 if dtype == INT8 else getattr(torch, dtype)
    return result


def wrap_model(
    model: Any, options: LoadOptions, output_ids: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> CachedModel:
    """Put a loaded transformers model on its device, ready for inference; the caller must not use it any more.

    The lean decoder converts weights to `dtype` on the way; None leaves them as they are, which is float32 for `int8`.
    `output_ids`: see `LanguageModel`.
    Raises `ConfigError` without that device, `UnsupportedModelError` if the lean decoder is asked for and does not
    cover the model, the ranks cannot share it, or there are no int8 products.
    """

    def make(max_length: int) -> Network:
        if not uses_decoder(model.config, options.model_impl):
            is_there = model.device == torch.device(options.device)  # a quantized one may not be moved
            return HuggingFaceNetwork(model if is_there else model.to(options.device), options.features)
        return Decoder(
            model,
            device=torch.device(options.device),
            max_positions=max_length,
            dtype=dtype,
            int8=options.dtype == INT8,
            ranks=options.ranks,
            features=options.features,
        )

    check_memory(model, options, dtype)
    model = model.eval().requires_grad_(requires_grad=False)
    return wrap_network(make, model.config, options, output_ids)


def wrap_network(
    make: Callable[[int], Network], config: Any, options: LoadOptions, output_ids: Tensor | None = None
) -> CachedModel:
    """Put the network that `make` builds, given its number of positions, on its device. Raises as `wrap_model`."""
    options.check(config)
    prepare_device(options.device)
    max_length = _max_length(config, options)
    with device_errors(options.device):
        return CachedModel(
            make(max_length),
            options.numerics,
            max_length=max_length,
            output_ids=None if output_ids is None else output_ids.to(options.device),
            capture=options.capture,
            tokens_per_step=options.tokens_per_step,
            ranks=options.ranks,
        )


def prepare_device(device: str) -> None:
    """Set how torch computes on a GPU, and run a first kernel of Triton there. Idempotent.

    Raises `ConfigError` without that device, `MissingDependencyError` without what Triton needs.
    """
    if not device.startswith("cuda"):
        return
    with device_errors(device):
        require_triton(device)
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # it builds a plan for each length of a prompt: 0.4 s
    matmul = torch.backends.cuda.matmul  # split sums are added in float32
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False


def check_memory(model: Any, options: LoadOptions, dtype: torch.dtype | None = None) -> None:
    """Raise `ConfigError` if a GPU lacks room for the weights of `model` and the cache of one sequence.

    `model`: one of transformers; its weights in the device's memory are there already. `dtype`: see `wrap_model`. A
    worker needs more than this: `device_errors` reports what is missing later.
    """
    if not options.device.startswith("cuda"):
        return
    text, num_ranks = model.config.get_text_config(decoder=True), options.ranks.size
    weights = [weight for weight in model.parameters() if weight.device.type != "cuda"]
    weight_bytes = sum(weight.numel() * (dtype or weight.dtype).itemsize for weight in weights) // num_ranks
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    max_length = _max_length(model.config, options)
    item_bytes = (dtype or model.dtype).itemsize
    cache_bytes = 2 * text.num_hidden_layers * heads * head_dim * item_bytes * max_length // num_ranks
    with device_errors(options.device):
        free, total = torch.cuda.mem_get_info(options.device)
        free += torch.cuda.memory_reserved(options.device) - torch.cuda.memory_allocated(options.device)
    if weight_bytes + cache_bytes > free:
        raise ConfigError(
            f"device {options.device}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free, and the model needs "
            f"{weight_bytes / 1e9:.1f} GB for weights and {cache_bytes / 1e9:.1f} GB for the cache of a sequence of "
            f"{max_length} tokens; use a smaller model, a lower max_model_len or another GPU"
        )


def _max_length(config: Any, options: LoadOptions) -> int:
    """Longest sequence in tokens of the model of a transformers configuration."""
    return min(options.max_model_len, position_limit(config) or options.max_model_len)


def load_config(path: str | Path, num_layers: int | None = None) -> Any:
    """The transformers configuration of a checkpoint; with `num_layers`, of a model of so many of its first layers.

    Raises `ConfigError` if there is none, or it has no layers beyond those.
    """
    from transformers import AutoConfig

    folder = find_checkpoint(path)
    with quiet_transformers(), one_line_errors(path, CONFIG):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    if num_layers is not None:
        most = config.get_text_config(decoder=True).num_hidden_layers - 1
        if num_layers > most:
            raise ConfigError(
                f"drafter.num_layers={num_layers}: the target has {most + 1} layers; allowed: 1 to {most}"
            )
        set_num_layers(config, num_layers)
    return config


def check_quantizer(path: str | Path, config: Any) -> None:
    """Raise `ConfigError`, with transformers' own reason, if it cannot load a quantized checkpoint here."""
    if not is_quantized(config):
        return
    with quiet_transformers(), one_line_errors(path, "its quantization"):
        from transformers.quantizers import AutoHfQuantizer

        forbid_kernels()
        found = getattr(config, "quantization_config", None) or config.get_text_config(decoder=True).quantization_config
        AutoHfQuantizer.from_config(copy.deepcopy(found), pre_quantized=True).validate_environment(device_map=None)


def set_num_layers(config: Any, number: int) -> None:
    """Make `config` that of a model of its first `number` layers."""
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = number
    if layer_types := getattr(text, "layer_types", None):
        text.layer_types = layer_types[:number]


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
def device_errors(device: str, *, only_full: bool = False) -> Iterator[None]:
    """Turn what torch raises for a device that is not there, or is full, into a `ConfigError` of one line.

    `only_full`: raise other errors as they are.
    """
    try:
        yield
    except (RuntimeError, AssertionError, MemoryError) as error:
        is_full = isinstance(error, MemoryError) or any(text in str(error) for text in _FULL)
        if only_full and not is_full:
            raise
        advice = "a smaller model, or a lower max_model_len or max_num_seqs, needs less"
        full = f"out of memory; {advice}: " if is_full else ""
        raise ConfigError(f"device {device}: {full}{first_line(error)}") from error
