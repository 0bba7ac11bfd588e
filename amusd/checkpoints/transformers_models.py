"""Runs transformers' own models, for architectures that `Decoder` does not cover."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer
from transformers.cache_utils import Cache
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import is_accelerate_available, logging

from amusd.checkpoints.checkpoint import find_checkpoint, one_line_errors, refuse_unread
from amusd.checkpoints.configuration import quantization_of
from amusd.checkpoints.recurrent_layers import RecurrentLayers
from amusd.checkpoints.vocabulary import EMBEDDING, HEAD, HEAD_BIAS, SharedVocabulary, adopt_vocabulary
from amusd.errors import ConfigError, NotFiniteError
from amusd.logs import logger
from amusd.models.attention import (
    Attention,
    AttentionInputs,
    attention_of_pass,
    causal_attention,
    register_attention,
)
from amusd.models.features import FeatureTaps
from amusd.models.kv_cache import KVMemory, PassMemory
from amusd.models.network import Network
from amusd.models.recurrent import StateHistory, StateShelf
from amusd.runner.load_options import LoadOptions, loaded_dtype
from amusd.runner.model_runner import ModelRunner
from amusd.runner.self_test import measure_width_invariance

_LOCAL_WITHOUT_CODE: Mapping[str, Any] = {"trust_remote_code": False, "local_files_only": True}


class HuggingFaceNetwork(Network):
    """A causal language model of transformers whose attention is `amusd.models.attention.attend`."""

    implementation = "transformers"

    def __init__(self, model: Any, options: LoadOptions) -> None:
        """`model`: of transformers; changed here, so no other code may use it."""
        if model.device != torch.device(options.device):  # quantized models may not be moved
            model = model.to(options.device)
        model.eval().requires_grad_(requires_grad=False)
        _freeze_frequencies(model)
        self._model = model
        self.device = model.device
        keeps_latents = any(hasattr(module, "expand_kv") for module in model.modules())  # expanded in the model's dtype
        self.cache_dtype = model.dtype if keeps_latents or self.device.type != "cpu" else torch.float32
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        self.num_ids, self.vocab_size = len(embedding), int(head.out_features)
        tensors = itertools.chain(model.parameters(), model.buffers())  # quantizers keep weights in either
        self.weight_bytes = sum(int(tensor.nbytes) for tensor in tensors)
        if head.weight is not embedding:
            self.weight_bytes -= int(embedding.nbytes)
        self.recurrent = RecurrentLayers(model)
        self.is_recurrent = bool(self.recurrent.layers)
        self.taps = FeatureTaps(options.features, self.device, model.dtype) if options.features else None

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: PassMemory, *, with_logits: bool
    ) -> Tensor:
        """See `Network`."""
        module = self._model if with_logits else self._model.base_model
        attention_of_pass.set(attention)
        self.recurrent.begin(is_prompt=not with_logits)
        output = module(
            input_ids=token_ids.unsqueeze(0),
            attention_mask=None,
            position_ids=positions.unsqueeze(0),
            past_key_values=_MemoryAsCache(memory),
            use_cache=True,
            output_hidden_states=self.taps is not None,
        )
        if self.taps is not None:
            self.taps.write({layer: output.hidden_states[layer][0] for layer in self.taps.layers}, memory)
        rows: Tensor = output[0][0]
        return rows if with_logits else rows[:0]


class _MemoryAsCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A memory as transformers' `past_key_values`."""

    def __init__(self, memory: PassMemory) -> None:
        super().__init__(layers=[])
        self._memory, self.parts = memory, memory.states

    def update(self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [1, heads, rows, dim] at the slots of the pass; return the tensors [1, heads, slots, dim]."""
        keys, values = self._memory.update(keys[0], values[0], layer)
        return keys.unsqueeze(0), values.unsqueeze(0)

    def get_query_offset(self, *_args: Any) -> int:
        """0: `attention` has the positions of the pass, and masks are made of windows alone."""
        return 0

    def get_mask_sizes(self, query_length: int, *_args: Any) -> tuple[int, int]:
        """See `get_query_offset`."""
        return query_length, 0


def _freeze_frequencies(model: Any) -> None:
    frozen = {"dynamic": "default", "longrope": "default"}
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):  # by type of layer
            module.rope_type = {layer_type: frozen.get(kind, kind) for layer_type, kind in kinds.items()}
        elif kinds is not None:
            module.rope_type = frozen.get(kinds, kinds)


def load_stock_config(folder: Path) -> Any:
    """Load transformers' configuration of a checkpoint folder; its dtype, which may be `auto`, is not read."""
    with quiet_transformers():
        return AutoConfig.from_pretrained(str(folder), dtype="float32", **_LOCAL_WITHOUT_CODE)


def make_stock_config(settings: Mapping[str, Any]) -> Any:
    """Make transformers' configuration from settings with a `model_type`."""
    with quiet_transformers():
        return AutoConfig.for_model(**settings)


def load_stock_tokenizer(folder: Path) -> tuple[Any, Mapping[str, str], str | None]:
    """Load the parts of a `Tokenizer`: backend, special tokens and chat template."""
    with quiet_transformers():
        stock: Any = AutoTokenizer.from_pretrained(str(folder), config=load_stock_config(folder), **_LOCAL_WITHOUT_CODE)
    template = stock.chat_template
    if isinstance(template, dict):
        reason = f"there are several ({', '.join(template)}), and none is named default"
        template = template.get("default", f"{{{{ raise_exception({reason!r}) }}}}")
    return stock.backend_tokenizer, stock.special_tokens_map, template


def load_stock(path: str | Path, config: Any, options: LoadOptions, shared: SharedVocabulary | None) -> Any:
    """Load the model with transformers; quantized models need further libraries."""
    forbid_kernels()
    quantization = quantization_of(config)
    if quantization is not None:  # transformers would ignore a method that it does not know
        AutoHfQuantizer.from_config(copy.deepcopy(quantization), pre_quantized=True)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class.config_class is not type(config):  # the class computes the text of a larger model
        config = config.get_text_config(decoder=True)
        if quantization is not None:
            config.quantization_config = quantization
    onto_device = quantization is not None and (options.device != "cpu" or is_accelerate_available())
    with quiet_transformers():
        model, info = model_class.from_pretrained(
            str(find_checkpoint(path)),
            config=config,
            dtype=loaded_dtype(options.dtype),
            device_map={"": options.device} if onto_device else None,
            attn_implementation=register_attention(),
            use_safetensors=True,
            **_LOCAL_WITHOUT_CODE,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    for name, stored, expected in info["mismatched_keys"]:
        raise ConfigError(f"model {path}: {name} has shape {list(stored)}, and config.json asks for {list(expected)}")
    if info["missing_keys"]:
        raise ConfigError(f"model {path}: lacks weights, {min(info['missing_keys'])} among them")
    if quantization is None:  # else scales would count as unread
        refuse_unread(path, info["unexpected_keys"], model.state_dict())
    if shared is not None:
        adopt_into(model, shared)
    return model


def try_model(path: str | Path, model: ModelRunner) -> None:
    """Compute a few tokens; with `fixed`, log a warning if their logits depend on the pass.

    Raises `ConfigError` if transformers' code cannot compute a token, and as `try_layers`.
    """
    found: list[float] = []
    cannot = "transformers' code for it, without kernels from a hub, cannot compute a token"
    with one_line_errors(path, cannot), contextlib.suppress(NotFiniteError):  # answers report it
        if model.network.is_recurrent:
            with quiet_transformers():  # fallbacks would warn that they are slow
                try_layers(path, model)
        found = measure_width_invariance(model, (0, 1), min(6, model.max_length - 2))
    if model.options.numerics.fixed and any(found):
        line = "a token's logits depend on how many tokens share its pass, so the modes may give different answers"
        logger.warning("model %s: %s", path, line)


def try_layers(path: str | Path, model: ModelRunner) -> None:
    """Try the recurrent layers; if several tokens per call give wrong results, compute one per call.

    Raises `ConfigError` if the states cannot be rolled back, or the attention cannot be replaced.
    """
    number = min(6, model.max_length - 2)
    network, calls, attend = model.network, list[AttentionInputs](), causal_attention(0, number)
    assert isinstance(network, HuggingFaceNetwork)
    memory, token_ids = KVMemory(number, network.cache_dtype), torch.arange(number, device=model.device)
    states = [StateHistory(StateShelf()).begin(0, range(number), number)]

    def counted(layer: AttentionInputs) -> Tensor:
        calls.append(layer)
        return attend(layer)

    with torch.inference_mode():
        of_pass = PassMemory(memory, range(number), None, states)
        logits = model.fetch(network(token_ids, token_ids, counted, of_pass, with_logits=True))
    if len(calls) != memory.num_layers:
        raise ConfigError(f"model {path}: not supported: its attention cannot be replaced")
    limit = float(logits.float().std()) * max(1e-3, 32 * torch.finfo(loaded_dtype(model.options.dtype)).eps)
    for network.recurrent.most_rows in (None, 1):
        if max(measure_width_invariance(model, (0, 1), number)) <= limit:
            break
    else:
        raise ConfigError(f"model {path}: not supported: its recurrent state cannot be rolled back")
    if network.recurrent.most_rows:
        logger.info("model %s: its recurrent layers take one token at a time, as they compute several wrongly", path)


def adopt_into(model: Any, shared: SharedVocabulary) -> None:
    """`adopt_vocabulary` for a loaded model."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    places = {EMBEDDING: (embedding, "weight"), HEAD: (head, "weight"), HEAD_BIAS: (head, "bias")}
    ends = {name: getattr(*place).detach() for name, place in places.items() if getattr(*place, None) is not None}
    adopt_vocabulary(ends, shared)
    for name, tensor in ends.items():
        setattr(*places[name], torch.nn.Parameter(tensor, requires_grad=False))
    embedding.num_embeddings, head.out_features = len(ends[EMBEDDING]), len(ends[HEAD])


def forbid_kernels() -> None:
    """Hide the library `kernels` from this process: it would fetch compiled code from a hub and run it."""
    from transformers.utils.import_utils import is_kernels_available

    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import fails then
    is_kernels_available.cache_clear()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings for a while."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
