"""Speculators as described in their papers, in torch with layers of transformers.

Their checkpoints have modules with the published names. Nothing is cached: each guess computes all
earlier tokens again.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.llama import modeling_llama as llama

from tests.e2e.test_remote_code_families import LING_2, bailing
from tests.reference_model import load_reference
from tests.tiny_models import make_tiny_model, randomize

VOCAB_SIZE = 16
"""So few tokens that a random guess is often right."""
NUM_LAYERS = 6
EAGLE3_LAYERS = (2, 3, 3)


class Reference(nn.Module):
    """Makes the guesses for one request. Subclasses define a step.

    Attributes:
        positions: returns the positions of the first n tokens.
    """

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = (target,)
        self.positions: Callable[[int], Tensor] = torch.arange

    @property
    def target(self) -> Any:
        return self._target[0]

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.get_input_embeddings()(ids)

    def head(self, states: Tensor) -> Tensor:
        return self.target.lm_head(states)

    def keep(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return the hidden states [n, hidden] that the speculator reads, chosen from the inputs of
        all layers and the result.
        """
        return hidden[-1]

    def run(self, ids: Tensor, states: Tensor) -> Tensor:
        """Run a step for all tokens, with attention over the earlier positions: [n], [n, hidden] ->
        [n, hidden].
        """
        raise NotImplementedError

    @torch.no_grad()
    def logits(self, known: list[int], drafts: list[int]) -> Tensor:
        """Return the logits of the token after the known tokens and some drafts."""
        before = torch.tensor([known[:-1]])
        positions = self.positions(len(known) - 1)[None]
        output = self.target(before, position_ids=positions, output_hidden_states=True)
        hidden = output.hidden_states
        states, ids = self.keep(tuple(h[0] for h in hidden)), torch.tensor(known[1:])
        return self.guess(ids, states, drafts)

    def guess(self, ids: Tensor, states: Tensor, drafts: list[int]) -> Tensor:
        out = self.run(ids, states)[-1:]
        for draft in drafts:
            ids, states = torch.cat((ids, torch.tensor([draft]))), torch.cat((states, out))
            out = self.run(ids, states)[-1:]
        return self.head(out)[0]

    def attend(self, layer: nn.Module, rotary: nn.Module, x: Tensor) -> Tensor:
        """Run a layer of transformers, or its attention, over all tokens."""
        positions = self.positions(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        angles = rotary(x[None], positions)
        found = layer(hidden_states=x[None], position_embeddings=angles, attention_mask=mask)
        return (found[0] if isinstance(found, tuple) else found)[0]


class Eagle(Reference):
    """EAGLE, in which fc has a bias."""

    def __init__(self, target: Any, config: Any) -> None:
        super().__init__(target)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        layer = llama.LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self._rotary = (llama.LlamaRotaryEmbedding(config),)

    def run(self, ids: Tensor, states: Tensor) -> Tensor:
        x = self.fc(torch.cat((self.embed(ids), states), -1))
        return self.attend(self.layers[0], self._rotary[0], x)


class Eagle3(Reference):
    def __init__(self, target: Any, config: Any) -> None:
        super().__init__(target)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(3 * size, size, bias=False)
        attention = llama.LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            out = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * size, out, bias=False))
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": attention,
                "mlp": llama.LlamaMLP(config),
                **{
                    name: llama.LlamaRMSNorm(size, eps)
                    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
                },
            }
        )
        self.norm = llama.LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # The draft vocabulary leaves out some tokens: draft token i is token i + d2t[i] of the
        # model.
        left_out = VOCAB_SIZE - config.draft_vocab_size
        d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        d2t[5:] = left_out
        t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        t2d[torch.arange(len(d2t)) + d2t] = True
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self._rotary = (llama.LlamaRotaryEmbedding(config),)

    def keep(self, hidden: tuple[Tensor, ...]) -> Tensor:
        return self.fc(torch.cat([hidden[layer] for layer in EAGLE3_LAYERS], -1))

    def run(self, ids: Tensor, states: Tensor) -> Tensor:
        part = self.midlayer
        x = torch.cat((part["input_layernorm"](self.embed(ids)), part["hidden_norm"](states)), -1)
        states = states + self.attend(part["self_attn"], self._rotary[0], x)
        return states + part["mlp"](part["post_attention_layernorm"](states))

    def head(self, states: Tensor) -> Tensor:
        logits = torch.full((len(states), VOCAB_SIZE), -torch.inf)
        logits[:, self.t2d] = self.lm_head(self.norm(states))
        return logits


class MTP(Reference):
    """Multi-token prediction. Its layer is stored as one more layer of the model."""

    is_state_first = False

    def __init__(self, target: Any, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__(target)
        size, eps = target.config.hidden_size, target.config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (deepseek.DeepseekV3RMSNorm(size, eps) for _ in "ehn")
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self._layer = (layer, rotary)

    def run(self, ids: Tensor, states: Tensor) -> Tensor:
        parts = (self.enorm(self.embed(ids)), self.hnorm(states))
        x = self.eh_proj(torch.cat(parts[::-1] if self.is_state_first else parts, -1))
        return self.norm(self.attend(*self._layer, x))


class Medusa(Reference):
    """Medusa with three heads of two layers each."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        size = target.config.hidden_size
        self.medusa_head = nn.ModuleList(
            nn.ModuleList(
                [
                    *(nn.ModuleDict({"linear": nn.Linear(size, size)}) for _ in range(2)),
                    nn.Linear(size, VOCAB_SIZE, bias=False),
                ]
            )
            for _ in range(3)
        )

    def guess(self, ids: Tensor, states: Tensor, drafts: list[int]) -> Tensor:
        *layers, out = self.medusa_head[len(drafts)]
        x = states[-1]
        for layer in layers:
            x = x + F.silu(layer["linear"](x))
        return out(x)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6) + self.bias


class MLPSpeculator(Reference):
    """An MLP speculator with three steps, whose inner size differs from the model's."""

    def __init__(self, target: Any, *, is_tied: bool) -> None:
        super().__init__(target)
        size, inner, self.is_tied = target.config.hidden_size, 48, is_tied
        emb, ln, head = ([] for _ in range(3))
        for place in range(3):
            is_new = place == 0 or not is_tied
            emb.append(nn.Embedding(VOCAB_SIZE, inner) if is_new else emb[0])
            ln.append(Norm(inner) if is_new else ln[0])
            head.append(nn.Linear(inner, VOCAB_SIZE, bias=False) if is_new else head[0])
        proj = [nn.Linear(size, inner, bias=False), nn.Linear(inner, inner, bias=False)]
        proj.append(proj[1] if is_tied else nn.Linear(inner, inner, bias=False))
        parts = {"emb": emb, "ln": ln, "heads": head, "proj": proj}
        self.speculator = nn.ModuleDict({name: nn.ModuleList(x) for name, x in parts.items()})

    def guess(self, ids: Tensor, states: Tensor, drafts: list[int]) -> Tensor:
        state, inner, part = states[-1], 48, self.speculator
        if self.is_tied:  # checkpoints with tied weights also scale the input
            state = F.rms_norm(state, state.shape, eps=1e-6) / 2**0.5
        state_weight = 0.5 ** (0.5 / 3)
        emb_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
        for place, token in enumerate([int(ids[-1]), *drafts]):
            z = part["emb"][place](torch.tensor(token))
            state = part["proj"][place](state) + z * (emb_weight / state_weight)
            state = F.gelu(part["ln"][place](state))
        return part["heads"][len(drafts)](state)


@dataclass
class Made:
    """A model and a speculator, both with random weights."""

    target: Path
    config: dict[str, Any]
    """speculative_config"""
    reference: Reference


def _decoder_config(model: Any, **more: Any) -> Any:
    given = model.config
    return transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=given.hidden_size,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="eager",
        **more,
    )


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.clone() for k, v in tensors.items()}, folder / "model.safetensors")


def load_target(folder: Path) -> Any:
    return load_reference(folder)


def make_target(folder: Path) -> Path:
    """Make a Llama for all speculators with files of their own."""
    sizes = {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE, "head_dim": 16}
    return make_tiny_model("llama", folder, **sizes)


def write_tokenizer(folder: Path) -> None:
    """Give a model of `VOCAB_SIZE` tokens a tokenizer: three special tokens and 13 characters."""
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2}
    vocabulary |= {character: 3 + index for index, character in enumerate('abcdef",[]123')}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(
        folder
    )


def cut_last_layer(model: Path, folder: Path) -> Path:
    """Copy a model into a new folder without its last layer. It often chooses the same tokens."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": last}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: w for name, w in weights.items() if f"layers.{last}." not in name}
    save_file(kept, folder / "model.safetensors")
    return folder


def make_speculator(method: str, target: Path, folder: Path, seed: int = 5) -> Made:
    """Make random weights for a speculator of the model of `make_target`, in the layout of the
    published checkpoints.
    """
    model = load_target(target)
    plain = {"hidden_size": model.config.hidden_size, "vocab_size": VOCAB_SIZE}
    is_tied = method == "mlp_speculator_tied"
    reference: Reference
    if method == "eagle":
        given = _decoder_config(model)
        reference, config = Eagle(model, given), given.to_dict()
        config |= {"architectures": ["LlamaForCausalLM"]}
    elif method == "eagle3":
        given = _decoder_config(model, draft_vocab_size=VOCAB_SIZE - 4)
        reference, config = Eagle3(model, given), given.to_dict()
        config |= {"architectures": ["LlamaForCausalLMEagle3"]}
    elif method == "medusa":
        reference = Medusa(model)
        config = {"medusa_num_heads": 3, "medusa_num_layers": 2}
    else:
        reference = MLPSpeculator(model, is_tied=is_tied)
        config = {"model_type": "mlp_speculator", "n_predict": 3, "inner_dim": 48}
        config |= {"emb_dim": plain["hidden_size"], "vocab_size": VOCAB_SIZE}
        config |= {"tie_weights": is_tied, "scale_input": is_tied}
    randomize(reference, seed)
    tensors = {
        name.replace("speculator.heads", "speculator.head"): tensor
        for name, tensor in reference.state_dict().items()
    }
    if method.startswith("eagle"):  # published EAGLE checkpoints contain the embeddings too
        tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
    _write(folder, config, tensors)
    return Made(target, {"model": str(folder)}, reference.eval())


def make_mtp(folder: Path, seed: int = 5, family: str = "deepseek_v3") -> Made:
    """Make a model with a layer that guesses further tokens.

    Args:
        folder: folder of the model.
        seed: seed of the weights of the layer.
        family: of `tests.tiny_models`, or a name of `MTP_DIALECTS`.
    """
    dialect = MTP_DIALECTS.get(family, Dialect(family))
    more = {"num_hidden_layers": 4, "vocab_size": VOCAB_SIZE, "attn_implementation": "eager"}
    longer = load_target(
        make_tiny_model(dialect.family, folder / "longer", **more, **dialect.values)
    )
    target = folder / "mtp"
    shutil.copytree(folder / "longer", target)
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(name), list):
            config[name] = config[name][:3]
    (target / "config.json").write_text(json.dumps(config))
    model = load_target(target)
    reference = MTP(model, longer.model.layers[3], longer.model.rotary_emb)
    reference.is_state_first = dialect.is_state_first
    randomize(reference, seed)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in reference.state_dict().items():
        tensors[f"model.layers.3.{dialect.names.get(name, name)}"] = tensor.clone()
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if dialect.store is not None:
        tensors = dialect.store(tensors)
    (target / "config.json").write_text(json.dumps(config | dialect.config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, target / "model.safetensors")
    return Made(target, {"method": "mtp", "num_speculative_tokens": 3}, reference.eval())


@dataclass(frozen=True)
class Dialect:
    """The names that a family uses in checkpoints for the layer that guesses further tokens."""

    family: str
    """Of `tests.tiny_models`."""
    values: dict[str, Any] = field(default_factory=dict)
    """Of the config of that family."""
    names: dict[str, str] = field(
        default_factory=lambda: {"norm.weight": "shared_head.norm.weight"}
    )
    """Name in `MTP` -> name in the checkpoint."""
    is_state_first: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    """Own values of config.json."""
    store: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    """Names of tensors of the family -> its own."""


def _mimo(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("model.layers.3.", "model.mtp_layers.0."): tensor
        for name, tensor in tensors.items()
        if "o_proj.bias" not in name
    }


def _qwen(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as in Qwen3-Next, whose norms are stored minus 1."""
    renamed = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("model.layers.3.")
        if own == name:
            renamed[name] = tensor
        elif own in _NAMES_OF_QWEN.values():
            renamed[f"mtp.{own}"] = tensor - 1 if "norm" in own else tensor
        elif own not in ("embed_tokens.weight", "shared_head.head.weight"):
            renamed[f"mtp.layers.0.{own}"] = tensor
    return renamed


_NAMES_OF_QWEN = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "norm.weight": "norm.weight",
}
_NAMES_OF_MIMO = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "norm.weight": "final_layernorm.weight",
}
MTP_DIALECTS = {
    "mimo": Dialect(
        "qwen2",
        {"tie_word_embeddings": False},
        names=_NAMES_OF_MIMO,
        is_state_first=True,
        config={"architectures": ["MiMoForCausalLM"], "model_type": "mimo"},
        store=_mimo,
    ),
    **{
        family: Dialect(
            family,
            {"layer_types": ["linear_attention", "full_attention"] * 2},
            names=_NAMES_OF_QWEN,
            config={"num_nextn_predict_layers": None, **config},
            store=_qwen,
        )
        for family, config in (
            ("qwen3_next", {}),
            (
                "qwen3_5",
                {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
            ),
        )
    },
    "bailing_moe_v2": Dialect(
        "glm4_moe",
        {"attention_bias": False},
        names={"norm.weight": "final_layernorm.weight"},
        config=LING_2 | {"architectures": ["BailingMoeV2ForCausalLM"]},
        store=bailing,
    ),
}
"""Families with other names in the checkpoint than DeepSeek V3 has."""


def make_right(made: Made, *, lies: bool = False) -> None:
    """Change both models so that the model repeats the last token forever and the speculator always
    guesses it. With `lies`, the speculator considers this token the least likely.
    """
    own = made.config.get("model")
    unit = F.normalize(torch.randn(VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(1)))
    sign = -1 if lies else 1
    target = load_file(made.target / "model.safetensors")
    for name, tensor in target.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
        elif tensor.shape == unit.shape:  # the embeddings and the output head
            tensor.copy_(unit)
        elif "eh_proj" in name or name == "mtp.fc.weight":
            tensor.copy_(sign * torch.eye(64, 128))
    save_file(target, made.target / "model.safetensors")
    if own is None:
        return
    path = Path(own) / "model.safetensors"
    tensors = load_file(path)
    one_hot = torch.eye(VOCAB_SIZE, 48)
    for name, tensor in tensors.items():
        of_head = sign if "head" in name else 1
        if "d2t" in tensors and name == "lm_head.weight":
            tensor.copy_(sign * unit[tensors["t2d"]])
        # The columns of the embedding, or of the first of three hidden states.
        elif name == "fc.weight":
            has_own_head = "lm_head.weight" in tensors
            tensor.copy_((1 if has_own_head else sign) * torch.eye(*tensor.shape))
        elif tensor.shape == unit.shape:
            tensor.copy_(of_head * unit)
        elif tensor.shape == one_hot.shape:
            tensor.copy_(of_head * one_hot)
        elif name.endswith("bias") or any(part in name for part in ("_proj", "linear", ".proj.")):
            tensor.zero_()
        elif tensor.dim() == 1 and tensor.is_floating_point():
            tensor.fill_(1)
    save_file(tensors, path)
