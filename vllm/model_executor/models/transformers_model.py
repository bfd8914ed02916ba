"""Runs decoders of the transformers library with our attention, linear layers and output head.

It is used for architectures without a class of their own. The modules of transformers run all
tokens of a batch as one sequence. Their attention interface passes queries, keys and values to our
attention layer, which knows which tokens belong together. A model that cannot run in this way is an
error with one line.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.config import ModelArch, RopeConfig
from vllm.config.families import TEXT_TYPES, usual_architecture
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.rotary import rotary_frequencies
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.models.transformers_checkpoint import CheckpointNames
from vllm.model_executor.models.transformers_layers import (
    ExpertsOfTransformers,
    ParallelPlan,
    replace_experts,
    replace_linear_layers,
)
from vllm.model_executor.models.transformers_stages import LayerRanges
from vllm.ops.attention_options import AttentionOptions
from vllm.transformers_utils.transformers_version import (
    attention_can_mask,
    dtype_argument,
    is_version_4,
)

_INTERFACE = "vllm"
"""Name of our attention in transformers."""
_CACHE_ARGUMENTS = frozenset(
    (
        *("cache", "past_key_values", "past_key_value", "layer_past"),
        *("cache_params", "state", "states"),
    )
)
"""Names of arguments with which modules of transformers get the cache of earlier tokens."""
_FIXED = "fixed"
"""Type of rotations that no module of transformers changes as it runs."""


class TransformersForCausalLM(CausalLM):
    """Runs any decoder of `AutoModelForCausalLM` that uses transformers' attention interface."""

    names: CheckpointNames
    _undivided: str | None = None
    """Reason why the model cannot run only some of its layers."""
    _device = torch.device("cpu")
    """Device of the weights. Only the CPU packs them, which removes all parameters."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self._whole = (_build(arch),)
        """A tuple, so that it is no submodule: modules have the names of transformers."""
        names = arch.hf_config.get("architectures") or [type(self.inner).__name__]
        if usual_architecture(names[0]) not in (type(self.inner).__name__, *TEXT_TYPES):
            raise self._refusal(
                f"model_type {arch.model_type!r} in config.json belongs to another class, "
                f"{type(self.inner).__name__}"
            )
        if self.base_model is self.inner:
            raise self._refusal("its decoder is not a separate module of the model")
        self._refuse_states()
        self._fix_rotations()
        try:
            plan = ParallelPlan(self.inner.config, tp)
            self._use_our_attention(plan)
            replace_linear_layers(self.base_model, plan, arch)
            replace_experts(self.base_model, plan)
        except ConfigError as error:
            raise self._refusal(str(error)) from error
        named = self.inner.named_modules()
        experts = tuple(path for path, m in named if isinstance(m, ExpertsOfTransformers))
        self.names = CheckpointNames(self.inner, experts)
        embedding = self.inner.get_input_embeddings()
        scale = self._scale_of(embedding)
        table = VocabParallelEmbedding(
            embedding.num_embeddings, embedding.embedding_dim, tp, scale=scale
        )
        self.inner.set_input_embeddings(table)
        head = self.inner.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise self._refusal("its output head must be a linear layer")
        lm_head = ParallelLMHead(
            head.out_features, head.in_features, tp, has_bias=head.bias is not None
        )
        self.inner.set_output_embeddings(lm_head)
        if arch.tie_word_embeddings:
            lm_head.tie(table)
        for name, module in self.inner.named_children():
            if module not in (self.base_model, lm_head):
                raise self._refusal(
                    f"the module '{name}' takes part in computing the logits, but only a plain "
                    "output head is supported"
                )
            self.add_module(name, module)
        self.lm_head = lm_head
        self.ranges = LayerRanges(self.base_model, self.inner.config, arch.num_layers)
        self.logits_of, *self._other_logits = _logits_functions(self.inner)

    @property
    def inner(self) -> Any:
        """The model object of transformers."""
        return self._whole[0]

    @property
    def base_model(self) -> Any:
        """The model object of transformers without its output head."""
        found = self.inner.base_model
        if not is_version_4() or found is not self.inner:
            return found
        # transformers 4 wraps the decoder of Gemma 3 once more.
        return getattr(found, "model", found)

    @property
    def layers(self) -> Sequence[nn.Module]:
        lists = (
            module for module in self.base_model.modules() if isinstance(module, nn.ModuleList)
        )
        return next((list(found) for found in lists if len(found) == self.arch.num_layers), [])

    def modules_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        if not self.ranges.is_planned:
            raise self._refusal(str(self._not_splittable_reason()))
        before, after = self.ranges.modules_around()
        return before, [*after, self.lm_head]

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.inner.get_input_embeddings()

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        if (first, end) == (0, self.num_layers):
            return self._last_hidden(hidden_states, positions)
        if self._undivided:
            raise self._refusal(self._undivided)
        with self.ranges.only(first, end):
            return self._last_hidden(hidden_states, positions)

    def _last_hidden(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return self._run(hidden_states, positions, self.base_model).last_hidden_state[0]

    def _run(self, hidden_states: Tensor, positions: Tensor, module: Any) -> Any:
        """Call a module of transformers with all tokens of a batch as one sequence."""
        return module(
            inputs_embeds=hidden_states[None],
            position_ids=_position_ids(positions),
            use_cache=False,
            return_dict=True,
        )

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Rename tensors of checkpoints of other transformers versions, and fill buffers from
        checkpoints.
        """
        buffers = dict(self.named_buffers())
        for found, part in self.names.convert(name, source):
            if found in buffers:
                part.fill(buffers[found])
            else:
                yield found, part

    def check(self) -> None:
        """Check by test runs that attention is used as configured, and that tokens depend on others
        only by it.
        """
        attended: list[nn.Module] = []

        def attend_to_itself(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            attended.append(module)
            query, key, value = args
            groups = query.unflatten(1, (key.shape[1], -1))
            return (groups + (key + value)[:, :, None]).flatten(1, 2)

        hooks = [
            module.register_forward_hook(attend_to_itself)
            for module in self.modules()
            if isinstance(module, Attention)
        ]
        last = self.arch.derived_max_model_len - 1
        held = chain(self.parameters(), self.buffers())
        self._device = next((tensor.device for tensor in held), self._device)
        try:
            # The second token is the same in both runs, but the token before it and the distance
            # differ. So its hidden state may not change.
            with _alone(self.tp):
                first, second = (
                    self.forward(self._inputs(rows), self._on_device(at))[1]
                    for rows, at in (([0, 1], [0, 1]), ([2, 1], [last, 1]))
                )
                num_attended = len(attended) // 2
                self._undivided = self._not_splittable_reason()
                if self.stage.is_last and "lm_head" in self._modules:
                    self._check_logits()
        except ConfigError as error:
            raise self._refusal(str(error)) from error
        except Exception as error:  # modules of an unknown architecture may raise anything
            raise self._refusal(
                f"a test run raised {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        if self._undivided and self.stage.count > 1:
            raise self._refusal(self._undivided)
        num_layers = self.stage.end_layer - self.stage.first_layer
        if num_attended != num_layers:
            raise self._refusal(
                f"its {num_layers} layers call the attention interface of transformers "
                f"{num_attended} times; each layer must call it once"
            )
        error_limit = torch.finfo(first.dtype).eps ** 0.5 * first.abs().max()
        if (first - second).abs().max() > error_limit:
            raise self._refusal(
                "its output for a token depends on neighbouring tokens in another way than by "
                "attention, so several requests cannot share a batch"
            )

    def _check_logits(self) -> None:
        """Find out how the model computes logits from the output of its head, by comparing results.

        Raises:
            ConfigError: no function that its config allows gives the same logits.
        """
        given, at = self._inputs([0, 1]), self._on_device([0, 1])
        embedded = self.embed(given) if self.stage.is_first else given
        first, end = self.stage.first_layer, self.stage.end_layer
        of_head = self.lm_head(self.run_layers(embedded.clone(), at, first, end))
        # Modules of transformers have a batch dimension, and our head does not.
        hooks = [
            self.lm_head.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1),)),
            self.lm_head.register_forward_hook(lambda _, args, out: out[None]),
        ]
        try:
            with self.ranges.only(first, end) if self.stage.count > 1 else nullcontext():
                theirs = self._run(embedded, at, self.inner).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        error_limit = torch.finfo(of_head.dtype).eps ** 0.5 * theirs.abs().max()
        for logits_of in (self.logits_of, *self._other_logits):
            ours = logits_of(of_head)
            if ours.shape == theirs.shape and (ours - theirs).abs().max() <= error_limit:
                self.logits_of = logits_of
                return
        raise ConfigError("its logits differ from output_head(hidden_states)")

    def _inputs(self, rows: list[int]) -> Tensor:
        """Make test inputs: token ids, or random hidden states if this is not the first stage."""
        if self.stage.is_first:
            return self._on_device(rows)
        size = (max(rows) + 1, self.arch.hidden_size)
        hidden_states = torch.rand(size, generator=torch.Generator().manual_seed(0))
        return self._on_device(hidden_states[rows].to(self.dtype))

    def _on_device(self, values: list[int] | Tensor) -> Tensor:
        return torch.as_tensor(values).to(self._device)

    def _not_splittable_reason(self) -> str | None:
        """Return why the layers cannot be divided into pipeline stages; None if they can."""
        if not self.ranges.is_planned:
            return (
                "its layers cannot be divided over stages, because transformers has no plan for "
                "that (base_model_pp_plan). Set pipeline_parallel_size=1"
            )
        size = (2, self.arch.hidden_size)
        given = self._on_device(torch.rand(size, generator=torch.Generator().manual_seed(0)))
        given = given.to(self.dtype)
        try:
            with self.ranges.only(0, 0):
                found = self._last_hidden(given.clone(), self._on_device([0, 1]))
        except Exception as error:
            if not is_version_4():  # decoder layers of transformers 4 may return a tuple
                raise
            return (
                "its layers cannot be divided over stages, because its decoder raises "
                f"{type(error).__name__} without them. Set pipeline_parallel_size=1"
            )
        if torch.equal(given, found):
            return None
        return (
            "its layers cannot be divided over stages, because it also changes hidden states "
            "outside of them. Set pipeline_parallel_size=1"
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_of(self.lm_head(hidden_states))

    def _scale_of(self, embedding: Any) -> float:
        """Return the factor by which transformers' embedding multiplies the table's entries."""
        with torch.device("cpu"):
            ids = torch.tensor([0, 1])
            found = []
            for value in (0.0, 1.0):
                # One value expanded to the shape, so that it needs no memory.
                table = torch.full((1,), value).expand(embedding.weight.shape)
                embedding.weight = nn.Parameter(table, requires_grad=False)
                found.append(embedding(ids))
            scale = float(found[1].flatten()[0])
            if found[0].any() or not torch.equal(found[1], torch.full_like(found[1], scale)):
                raise self._refusal(
                    "its token embedding does more than scale the entries of a table"
                )
        return scale

    def _refuse_states(self) -> None:
        """Check that no module keeps recurrent state: one that takes a cache but does not use
        attention.
        """
        for path, module in self.base_model.named_modules():
            takes_cache = not _CACHE_ARGUMENTS.isdisjoint(signature(module.forward).parameters)
            if isinstance(module, nn.Conv1d) or (
                takes_cache and not any(_attends(part) for part in module.modules())
            ):
                raise self._refusal(
                    f"its module {path} ({type(module).__name__}) stores data of earlier tokens "
                    "outside of the KV cache. Use one of the models in docs/supported_models.md"
                )

    def _fix_rotations(self) -> None:
        """Fix rotary frequencies that depend on the longest position of the batch.

        They are computed for the longest request allowed, as in our own layers: a token must not
        depend on other requests, and cached keys must stay valid.
        """
        kinds = list(self.arch.hf_config.get("layer_types") or ())
        for module in self.base_model.modules():
            given: Any = getattr(module, "rope_type", None)
            if isinstance(given, str) and _varies(given):
                self._fix_frequencies(module, "", self.arch.rope)
                module.rope_type = _FIXED
            elif isinstance(given, dict) and any(map(_varies, given.values())):
                for kind in filter(kinds.__contains__, given):
                    rope = self.arch.layer_ropes[kinds.index(kind)]
                    self._fix_frequencies(module, f"{kind}_", rope)
                module.rope_type = dict.fromkeys(given, _FIXED)

    def _fix_frequencies(self, module: Any, prefix: str, rope: RopeConfig | None) -> None:
        buffer = getattr(module, f"{prefix}inv_freq", None)
        if rope is None or buffer is None:
            raise self._refusal("its rotary embedding depends on the longest sequence of a batch")
        with torch.device("cpu"):
            frequencies, factor = rotary_frequencies(rope, self.arch.derived_max_model_len)
        if frequencies.shape != buffer.shape:
            raise self._refusal(
                f"its rotary embedding has {buffer.numel()} frequencies, but config.json describes "
                f"{frequencies.numel()}"
            )
        buffer.copy_(frequencies)
        setattr(module, f"{prefix}attention_scaling", factor)

    def _use_our_attention(self, plan: ParallelPlan) -> None:
        found = {
            path: module
            for path, module in self.base_model.named_modules()
            if hasattr(module, "layer_idx") and _attends(module)
        }
        if num_shared := self.arch.hf_config.get("num_kv_shared_layers"):
            raise ConfigError(
                f"num_kv_shared_layers in config.json must be 0, got {num_shared}: layers of "
                "transformers that share keys and values do not work with this engine's KV cache. "
                "Use model_impl='vllm' if that supports the model"
            )
        if len(found) != self.arch.num_layers:
            raise ConfigError(
                f"only {len(found)} of its {self.arch.num_layers} layers have attention that can "
                "be replaced; all of them must"
            )
        for path, module in found.items():
            if not getattr(module, "is_causal", True) or hasattr(module, "sinks"):
                raise ConfigError(
                    "its attention is not causal, or has attention sinks, which this engine does "
                    "not support for models of transformers"
                )
            heads = plan.heads_of(path, module, self.arch)
            module.vllm_attention = self._attention_of(module, *heads)

    def _attention_of(self, module: nn.Module, num_heads: int, num_kv_heads: int) -> Attention:
        index: Any = module.layer_idx
        window = self.arch.layer_windows[index]
        soft_cap: Any = getattr(module, "attn_logit_softcapping", None)
        head_size: Any = getattr(module, "head_dim", self.arch.head_size)
        scale: Any = module.scaling
        return AttentionOfTransformers(
            num_heads, head_size, num_kv_heads, AttentionOptions(float(scale), window, soft_cap)
        )

    def _refusal(self, reason: str) -> ConfigError:
        return _refusal(self.arch, reason)


def _refusal(arch: ModelArch, reason: str) -> ConfigError:
    names = arch.hf_config.get("architectures") or [arch.architecture]
    return ConfigError(f"{names[0]} cannot run with the model code of transformers: {reason}")


class AttentionOfTransformers(Attention):
    """Attention whose options are set by the first call of its transformers module.

    This first call happens before there is a cache. The options are not read from attributes of the
    module, since these may belong to other layers.
    """

    has_run = False


class _Alone:
    """Collectives of a rank without connections: each rank's own part counts as the result."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self._size, dim=-1)


@contextmanager
def _alone(tp: TPGroup) -> Iterator[None]:
    """Let layers run while the ranks are not connected yet, with their own parts as results."""
    before, tp.collectives = tp.collectives, _Alone(tp.size)
    try:
        yield
    finally:
        tp.collectives = before


def _varies(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _attends(module: nn.Module) -> bool:
    return hasattr(module, "scaling") and (
        hasattr(module, "is_causal") or hasattr(module, "num_key_value_groups")
    )


def _build(arch: ModelArch) -> Any:
    """Build the model of transformers: parameters without memory, buffers with memory."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not attention_can_mask():
        raise _refusal(
            arch,
            f"the installed transformers {version('transformers')} is too old, 4.53 is the first "
            f"release whose attention can be replaced. Install a newer one: pip install -U "
            f"transformers",
        )
    _register()
    try:
        config = CONFIG_MAPPING[arch.model_type].from_dict(dict(arch.hf_config))
        with _parameters_without_memory():
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=_INTERFACE, **dtype_argument(torch.get_default_dtype())
            )
    except Exception as error:  # modules of an unknown architecture may raise anything
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError) and error.args == (_INTERFACE,):
            reason = (
                "its attention implementation can only be one of a fixed list, without the one "
                "of this engine"
            )
        elif not isinstance(error, (ValueError, ImportError)):
            reason = (
                f"with this config.json, creating the model raises {type(error).__name__}: {reason}"
            )
        raise _refusal(arch, reason) from error


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Create parameters without memory, while buffers are computed by transformers.

    No checkpoint fills the buffers.
    """
    register: Callable[..., None] = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_INTERFACE, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' attention interface.

    Heads [1, H, T, D] -> (output [1, T, H, D], None instead of weights).
    """
    attention: Any = module.vllm_attention
    if attention_mask is not None:
        raise ConfigError("its attention uses its own mask, and only the causal mask is supported")
    heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    given = [tuple(part.shape[1::2]) for part in (query, key, value)]
    if given != [(count, attention.head_size) for count in heads]:
        raise ConfigError(
            f"its queries, keys and values have (heads, elements) {given}, but config.json "
            f"describes {heads} heads of {attention.head_size}"
        )
    built: AttentionOptions = attention.options
    asked = AttentionOptions(
        scale=scaling if scaling is not None else built.scale,
        sliding_window=options.get("sliding_window", built.sliding_window),
        logits_soft_cap=options.get("softcap", built.logits_soft_cap),
    )
    if not attention.has_run:
        attention.options, attention.has_run = asked, True
    elif asked != built:
        raise ConfigError(
            f"the options of its attention must be the same in each call, got {built}, then {asked}"
        )
    rows = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    return attention(*rows)[None], None


def _position_ids(positions: Tensor) -> Tensor:
    """Convert positions [P, T] or [T] to the shape that transformers needs.

    [1, T], or [P, 1, T] if a token has several positions.
    """
    if positions.dim() == 2 and len(positions) > 1:
        return positions[:, None]
    return positions.view(1, -1)


def _logits_functions(inner: Any) -> list[Callable[[Tensor], Tensor]]:
    """Return the functions that may convert the output of the head to logits, according to the
    config.

    Most families divide by `logits_scaling`, and some multiply by it.
    """
    config = inner.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    soft_cap = getattr(config, "final_logit_softcapping", None)
    return [_logits_function(each, soft_cap) for each in (scale / scaling, scale * scaling)]


def _logits_function(scale: float, soft_cap: float | None) -> Callable[[Tensor], Tensor]:
    def logits_of(logits: Tensor) -> Tensor:
        if scale != 1.0:
            logits = logits * scale
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return logits

    return logits_of
