"""The simulated Gaudi card: the interface of the bridge in torch on the CPU, with a card's rules.

`vllm/platforms/hpu` opens it if VLLM_HPU_SIM asks for it; nothing else in vllm imports it.
"""
