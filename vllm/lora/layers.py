"""Find the layers of a model that adapters can change, by their names in an adapter's file.

After loading, the methods of these layers are wrapped (`lora/methods`, `lora/experts`), so model
files and weight formats are independent of adapters.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor

from vllm.attention import ContextHolder, share_context
from vllm.errors import ConfigError, WeightLoadError
from vllm.lora.adapted_layers import AdaptedLayers
from vllm.lora.experts import ExpertsWithAdapters, can_adapt
from vllm.lora.files import EXPERT_PARAMETERS, NAME_PREFIX
from vllm.lora.methods import HeadWithAdapters, LoRALinearMethod
from vllm.lora.targets import LatentTarget, Target
from vllm.lora.weights import source_of
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.latent import LatentUpProjection
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, Slice
from vllm.model_executor.loader.stage import PPMissingLayer
from vllm.model_executor.loader.weights import checkpoint_name
from vllm.model_executor.models.interface import CausalLM, without_wrappers
from vllm.ops.lora_weights import AdaptedExpert, AdaptedExperts, AdaptedLayer, LoRAHeads

_OUTER = {"base_model", "model", "module", "language_model"}
"""First parts of names in files of other programs, or of a model that has this one as a part."""


class AdapterLayers:
    """The layers of a model that adapters can change.

    Args:
        model: a loaded model.
        modules: names of modules that adapters may change, such as q_proj or experts; None: all.
        has_experts: adapters may change experts if `modules` is None.

    Attributes:
        model: as given.
        adapted_layers: the layers with their indices and sizes.
        targets: projections of the checkpoint, by their names in the model.
        table: name of the input embedding, and the embedding; None: adapters cannot change it.
        experts: name of an expert module that can be changed -> the layer.
        left_out: names of modules that adapters could change, but may not.

    Raises:
        ConfigError: the model has no module of one of these names.
    """

    def __init__(
        self, model: CausalLM, modules: Sequence[str] | None = None, *, has_experts: bool = True
    ) -> None:
        self.model = model
        self._modules, self._has_experts = modules, has_experts
        self._seen: set[str] = set()
        """Names of modules that adapters could change."""
        self.left_out: set[str] = set()
        self.targets: dict[str, Target] = {}
        self.experts: dict[str, Experts] = {}
        self.adapted_layers = AdaptedLayers()
        self.table: tuple[str, VocabParallelEmbedding] | None = None
        self._absent = {
            path for path, module in model.named_modules() if isinstance(module, PPMissingLayer)
        }
        launch = share_context(model)
        self._add_linear_layers(launch)
        self._add_tables(launch)
        self._add_experts(launch)
        known = self._seen | {path.rpartition(".")[2] for path in self._absent}
        if unknown := [name for name in modules or () if name not in known]:
            raise ConfigError(
                f"lora_target_modules: {unknown[0]!r} is not the name of a module for which this "
                "engine supports adapters; accepted for this model: "
                f"{', '.join(sorted(self._seen))}"
            )

    # ---- what adapters may change -----------------------------------------------------------

    def _add_linear_layers(self, launch: ContextHolder) -> None:
        for path, layer in self.model.named_modules():
            if not isinstance(layer, ParallelLinear) or layer.is_held or layer.is_of_items:
                continue
            if layer.is_shared:
                continue
            if ".experts." in f".{path}." or layer.weight_dtype:
                continue  # adapters have the dtype of the model
            if not self._is_chosen(path, *layer.feature_slices):
                continue
            if isinstance(layer, LatentUpProjection):
                self._add_heads(path, layer)
                continue
            adapted = self._add(path, layer)
            layer.method = LoRALinearMethod(layer.method, adapted, launch)
            if layer.is_of_head:
                self.adapted_layers.of_head.append(adapted)

    def _add_tables(self, launch: ContextHolder) -> None:
        for path, layer in self.model.named_modules():
            if isinstance(layer, ParallelLMHead):
                if not self._is_chosen(path):
                    continue
                adapted = self._add(path, layer)
                layer.method = HeadWithAdapters(layer.method, adapted, launch)
                self.adapted_layers.of_head.append(adapted)
            elif isinstance(layer, VocabParallelEmbedding) and self.table is None:
                if not self._is_chosen(path):
                    continue
                self.table = path, layer
                parts = ((0, layer.embedding_dim),)
                layer.adapted = self.adapted_layers.add(layer.num_embeddings, parts)
                self.adapted_layers.embedding = layer.adapted

    def _is_chosen(self, path: str, *features: str, is_default: bool = True) -> bool:
        """Return whether adapters may change a module, which is known by its own name and the names
        of its parts.

        Args:
            path: path of the module.
            features: names of its parts.
            is_default: the result if the engine was given no names.
        """
        names = {path.rpartition(".")[2], *features} - {""}
        self._seen |= names
        modules = self._modules
        is_chosen = is_default if modules is None else not names.isdisjoint(modules)
        if not is_chosen:
            self.left_out |= names
        return is_chosen

    def _add_experts(self, launch: ContextHolder) -> None:
        first = self.adapted_layers.num_parts
        for path, layer in self.model.named_modules():
            if not isinstance(layer, Experts) or not can_adapt(layer):
                continue
            if not self._is_chosen(path, is_default=self._has_experts):
                continue
            self.experts[path] = layer
            self._absent |= {f"{path}.{number}" for number in layer.elsewhere}
            start = len(self.adapted_layers.layers)
            experts = [self._add_expert(f"{path}.{number}", layer) for number in layer.expert_ids]
            end = len(self.adapted_layers.layers)
            self.adapted_layers.alike += [range(start, end, 2), range(start + 1, end, 2)]
            adapted = AdaptedExperts(experts, layer.expert_ids.start)
            layer.method = ExpertsWithAdapters(layer.method, adapted, launch)
        self.adapted_layers.experts = range(first, self.adapted_layers.num_parts)

    def _add_expert(self, path: str, layer: Experts) -> AdaptedExpert:
        hidden, size = layer.hidden_size, layer.intermediate_size
        total, first = size * layer.tp.size, self.adapted_layers.num_parts
        *first_parts, second = layer.options.parts
        parts = tuple((size * index, size) for index in range(len(first_parts)))
        for number, (name, (offset, _)) in enumerate(zip(first_parts, parts, strict=True), first):
            self.targets[f"{path}.{name}"] = Target(
                number, layer, Slice(0, offset, size, total), hidden
            )
        last = first + len(parts)
        self.targets[f"{path}.{second}"] = Target(last, layer, Slice(1, 0, size, total), hidden)
        gate_up = self.adapted_layers.add(hidden, parts)
        return AdaptedExpert(gate_up, self.adapted_layers.add(size, ((0, hidden),)))

    def _add_heads(self, path: str, layer: LatentUpProjection) -> None:
        """Add two layers of heads: for queries, and for the output of attention."""
        (part,) = layer.feature_slices.values()
        first, latent = self.adapted_layers.num_parts, layer.input_size
        key_size, value_size = layer.head_sizes
        count = layer.output_size // (key_size + value_size)
        self.targets[path] = LatentTarget(first, layer, part, latent)
        layer.adapted = (
            self._add_alike(count, key_size, latent),
            self._add_alike(count, latent, value_size),
        )

    def _add_alike(self, count: int, in_features: int, out_features: int) -> LoRAHeads:
        parts, start = ((0, out_features),), len(self.adapted_layers.layers)
        heads = [self.adapted_layers.add(in_features, parts) for _ in range(count)]
        self.adapted_layers.alike.append(range(start, start + count))
        return LoRAHeads(heads)

    def _add(self, path: str, layer: ParallelLinear | ParallelLMHead) -> AdaptedLayer:
        first = self.adapted_layers.num_parts
        for number, (name, part) in enumerate(layer.feature_slices.items(), first):
            target = checkpoint_name(path, name, "").removesuffix(".")
            other_size = layer.input_size if part.dim == 0 else layer.output_size
            self.targets[target] = Target(number, layer, part, other_size)
        return self.adapted_layers.add(
            layer.input_size,
            [
                (part.offset, part.size) if part.dim == 0 else (0, layer.output_size)
                for part in layer.feature_slices.values()
            ],
        )

    # ---- names ------------------------------------------------------------------------------

    def module_of(self, name: str) -> str:
        """Return the name in the model of a module in an adapter's file."""
        usual = self._in_model(name.removeprefix(NAME_PREFIX))
        if self._is_known(usual):
            return usual
        parts = without_wrappers(name).split(".")
        outer = list(takewhile(lambda part: part in _OUTER, parts))
        for count in range(len(outer) + 1):
            rest = ".".join(parts[count:])
            for other in (rest, f"model.{rest}"):
                if self._is_known(found := self._in_model(other)):
                    return found
        return usual

    def _in_model(self, name: str) -> str:
        """Convert the name of a module in a checkpoint to its name in the model."""
        # Convert the name together with its parameter, because renames apply to names of a
        # checkpoint.
        return self.model.renamed(f"{name}.weight").removesuffix(".weight")

    def _is_known(self, module: str) -> bool:
        """Return whether a module is next to one that adapters can change, or is one."""
        parent = module.rpartition(".")[0]
        return module in self._paths or (bool(parent) and parent in self._parents)

    @cached_property
    def _paths(self) -> set[str]:
        tables = set() if self.table is None else {self.table[0]}
        return {*self.targets, *self.experts, *self._absent, *tables}

    @cached_property
    def _parents(self) -> set[str]:
        return {path.rpartition(".")[0] for path in (*self.targets, *self.experts)}

    def is_table(self, module: str) -> bool:
        """Return whether a module is the input embedding."""
        return self.table is not None and module == self.table[0]

    def is_elsewhere(self, module: str) -> bool:
        """Return whether a module belongs to another stage of the pipeline, which checks it."""
        parts = module.split(".")
        paths = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return not paths.isdisjoint(self._absent)

    def sizes_of_experts(self, experts: str, name: str) -> tuple[int, int]:
        """Return (inputs, outputs) of one expert, over all ranks, for a parameter of all
        experts.
        """
        layer = self.experts[experts]
        size = layer.intermediate_size * layer.tp.size
        hidden = layer.hidden_size
        sizes = {"gate_up_proj": (hidden, 2 * size), "up_proj": (hidden, size)}
        return sizes.get(name, (size, hidden))

    def projections(
        self, module: str, rows: Tensor, *, is_transposed: bool
    ) -> list[tuple[Target, CheckpointTensor]]:
        """Return the projections in a module of a checkpoint, with their rows (one per output
        feature).

        None for a projection: it is unknown.

        Args:
            module: name of the module in the model.
            rows: [outputs, r]
            is_transposed: whether the adapter says that the weights in the checkpoint are
                transposed.
        """
        if (head := self.targets.get(module)) and isinstance(head.layer, ParallelLMHead):
            # Unchanged, even if the checkpoint's tensor of the head is converted.
            return [(head, source_of(rows))]
        found: list[tuple[Target, CheckpointTensor]] = []
        # If only some modules are transposed, peft writes False for all of them, so try both.
        for swaps in (is_transposed, not is_transposed):
            try:
                parts = self._convert(module, rows.T if swaps else rows)
                found = [(target, source.picked(module)) for target, source in parts]
            except (RuntimeError, WeightLoadError):
                continue
            if all(source.shape == (t.output_size, rows.shape[1]) for t, source in found):
                break
        return found

    def _convert(self, module: str, weight: Tensor) -> list[tuple[Target, CheckpointTensor]]:
        # Convert it in the same way as the tensor of the checkpoint, so that its rows are stored at
        # the same positions.
        expert, _, name = module.rpartition(".")
        experts, _, number = expert.rpartition(".")
        if name in EXPERT_PARAMETERS and experts in self.experts:
            found = list(self._of_expert(experts, number, name, weight))
        else:
            found = list(self.model.convert(f"{module}.weight", source_of(weight)))
        names = [name.removesuffix(".weight") for name, _ in found]
        if not all(name in self.targets for name in names):
            return []
        targets = [self.targets[name] for name in names]
        return [(target, source) for target, (_, source) in zip(targets, found, strict=True)]

    def _of_expert(
        self, experts: str, number: str, name: str, rows: Tensor
    ) -> Iterator[tuple[str, CheckpointTensor]]:
        """Yield the matrices of an expert, given rows of a parameter of all experts."""
        layer, first = self.experts[experts], f"{experts}.0."
        # A family that stores such a parameter knows its order: [experts, in, out] or [experts,
        # out, in].
        count = len(layer.expert_ids) + len(layer.elsewhere)
        order = torch.arange(len(rows)).expand(count, 1, -1)
        rows_of: dict[str, Tensor] = {}
        for numbers in (order, order.transpose(1, 2)):
            stored = self.model.convert(f"{experts}.{name}", source_of(numbers))
            rows_of = {
                each.removeprefix(first): source.read(()).flatten()
                for each, source in takewhile(lambda found: found[0].startswith(first), stored)
            }
            if sum(map(len, rows_of.values())) == len(rows):
                break
        if not rows_of and name == "gate_up_proj":
            gate, up = torch.arange(len(rows)).chunk(2)
            rows_of = {"gate_proj.weight": gate, "up_proj.weight": up}
        elif not rows_of:
            rows_of = {f"{name}.weight": torch.arange(len(rows))}
        for matrix, chosen in rows_of.items():
            yield f"{experts}.{number}.{matrix}", source_of(rows[chosen])
