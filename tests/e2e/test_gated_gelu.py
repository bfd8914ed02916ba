"""A gated MLP with GELU instead of SiLU gives the tokens of `transformers`."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm import LLM, SamplingParams

PROMPT = [5, 9, 60, 31, 7, 7, 80]


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh"])
def test_tokens_are_those_of_transformers(hidden_act, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        hidden_act=hidden_act,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT])
    for _ in range(12):
        next_id = model(ids).logits[0, -1].argmax()
        ids = torch.cat((ids, next_id.view(1, 1)), dim=1)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    output = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == ids[0, len(PROMPT) :].tolist()
    assert len(set(output.outputs[0].token_ids)) > 2  # a degenerate model would prove nothing
