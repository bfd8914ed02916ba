"""Test the encoder of Whisper against transformers."""

import pytest
import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder as TheirEncoder

from vllm.model_executor.media.audio.whisper_encoder import WhisperEncoder
from vllm.multimodal.audio.whisper_config import read_whisper_config

SIZES = {
    "d_model": 32,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 25,
}


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_hidden_states_are_equal_to_transformers_for_several_items(activation):
    config = WhisperConfig(**SIZES, activation_function=activation)
    torch.manual_seed(0)
    theirs = TheirEncoder(config).eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.normal_(0, 0.2)
    ours = WhisperEncoder(read_whisper_config(config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    features = torch.randn(3, 8, 50)
    with torch.no_grad():
        wanted = theirs(features).last_hidden_state
        torch.testing.assert_close(ours(features), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours(features[1:2]), wanted[1:2], rtol=1e-4, atol=1e-5)


def test_hidden_states_that_are_masked_change_nothing():
    torch.manual_seed(0)
    ours = WhisperEncoder(read_whisper_config(SIZES))
    for param in ours.parameters():
        param.data.normal_(0, 0.2)
    features = torch.randn(1, 8, 50)
    changed = features.clone()
    changed[:, :, 30:] += 1
    mask = (torch.arange(25) < 10)[None, None, None]
    with torch.no_grad():
        before, after = ours(features, mask), ours(changed, mask)
        assert torch.equal(before[:, :10], after[:, :10])
        assert not torch.equal(ours(features)[:, :10], ours(changed)[:, :10])


def test_float16_does_not_overflow():
    torch.manual_seed(0)
    ours = WhisperEncoder(read_whisper_config({**SIZES, "encoder_layers": 1}))
    for param in ours.parameters():
        param.data.fill_(0.1)
    ours.layers[0].fc2.bias.data.fill_(65504.0)
    ours.layers[0].self_attn.out_proj.bias.data.fill_(30000.0)
    with torch.no_grad():
        hidden = ours.half().hidden_states(torch.zeros(1, 8, 50, dtype=torch.float16))
    assert hidden.isfinite().all()
