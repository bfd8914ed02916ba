"""Test rotary embeddings with several positions of a token (M-RoPE) against transformers."""

import pytest
import torch

from vllm.attention import LaunchContext
from vllm.config import ModelArch
from vllm.errors import ConfigError
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps
from vllm.transformers_utils.transformers_version import is_version_4

if is_version_4():
    pytest.skip("this transformers has other functions", allow_module_level=True)

from transformers.models.glm4v import modeling_glm4v
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

HEAD_SIZE = 32
MAX_POSITIONS = 200
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 4 * HEAD_SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0,
}


def arch_of(rope: dict, **values) -> ModelArch:
    return ModelArch.from_hf({**CONFIG, "rope_scaling": rope, **values})


def make_rotary(rope: dict, **values) -> RotaryEmbedding:
    config = arch_of(rope, **values).rope
    is_neox = "partial_rotary_factor" not in values
    return RotaryEmbedding(config, MAX_POSITIONS, is_neox)


@pytest.fixture(params=[NativeOps, CPUOps])
def ops(request):
    before = get_ops()
    set_ops(request.param())
    yield
    set_ops(before)


ROPES = {
    "one behind the other": (
        modeling_qwen2_vl.Qwen2VLRotaryEmbedding,
        modeling_qwen2_vl.apply_rotary_pos_emb,
        modeling_qwen2_vl.Qwen2VLConfig().text_config,
        {"type": "mrope", "mrope_section": [4, 6, 6]},
        {},
    ),
    "stretched": (
        modeling_qwen2_vl.Qwen2VLRotaryEmbedding,
        modeling_qwen2_vl.apply_rotary_pos_emb,
        modeling_qwen2_vl.Qwen2VLConfig().text_config,
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 50,
            "mrope_section": [4, 6, 6],
        },
        {},
    ),
    "neighbours": (
        modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding,
        modeling_qwen3_vl.apply_rotary_pos_emb,
        modeling_qwen3_vl.Qwen3VLConfig().text_config,
        {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        {},
    ),
    "pairs of neighbours, half a head": (
        modeling_glm4v.Glm4vTextRotaryEmbedding,
        modeling_glm4v.apply_rotary_pos_emb,
        modeling_glm4v.Glm4vConfig().text_config,
        {"rope_type": "default", "mrope_section": [2, 3, 3]},
        {"partial_rotary_factor": 0.5},
    ),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_rotate_as_in_transformers(name, dtype, ops):
    rotary_class, rotate, config, rope, values = ROPES[name]
    config.head_dim, config.max_position_embeddings = HEAD_SIZE, MAX_POSITIONS
    config.hidden_size = HEAD_SIZE * config.num_attention_heads
    kind = {"rope_type": "default", "rope_theta": 10000.0, **rope, **values}
    config.rope_parameters = {key: value for key, value in kind.items() if key != "type"}
    torch.manual_seed(0)
    positions = torch.randint(MAX_POSITIONS, (3, 11))
    query, key = torch.randn(11, 4, HEAD_SIZE).to(dtype), torch.randn(11, 2, HEAD_SIZE).to(dtype)
    heads = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    cos, sin = rotary_class(config)(query, positions[:, None])
    want = [x[0].transpose(0, 1) for x in rotate(*heads, cos, sin)]
    layer = make_rotary(rope, **values)
    got = layer(positions, query.clone(), key.clone())
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)

    angles = layer.angles(positions, dtype)
    context = LaunchContext(None, positions, rotary_angles=[angles])
    with layer.launch.running(context):
        shared = layer(positions, query.clone(), key.clone())
    for x, y in zip(shared, got, strict=True):
        assert torch.equal(x, y)


def test_equal_positions_rotate_as_one_does(ops):
    layer = make_rotary({"rope_type": "default", "mrope_section": [4, 6, 6]})
    plain = make_rotary({"rope_type": "default"})
    positions, heads = torch.tensor([[3, 70, 199]]), torch.randn(3, 4, HEAD_SIZE)
    want = plain(positions, heads.clone(), heads.clone())
    for given in (positions, positions.expand(3, -1), positions[0]):
        got = layer(given, heads.clone(), heads.clone())
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_layer_of_one_position_refuses_several():
    layer = make_rotary({"rope_type": "default"})
    with pytest.raises(
        ValueError,
        match=r"positions must have the shape .* for this layer, one per token, got \[3, 2\]",
    ):
        layer(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 1, 32), torch.zeros(2, 1, 32))


def test_the_number_of_positions_is_that_of_the_sections():
    assert arch_of({"rope_type": "default"}).num_positions == 0
    arch = arch_of({"type": "mrope", "mrope_section": [4, 6, 6]})
    assert (arch.num_positions, arch.rope.rope_type) == (3, "default")


@pytest.mark.parametrize("sections", [[4, 6, 5], [], [16.0], "16", [8, -8, 16]])
def test_sections_that_do_not_fit_a_head_are_refused(sections):
    with pytest.raises(ConfigError, match="must be a list of positive numbers"):
        arch_of({"rope_type": "default", "mrope_section": sections})
