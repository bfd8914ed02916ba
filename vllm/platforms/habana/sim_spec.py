"""The published numbers of the simulated cards, and the constants of the cost model.

Nothing here was measured on a card by this project.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class CardSpec:
    """One kind of card. Rates are per second and in one direction."""

    name: str
    pool_bytes: int
    """What a process can allocate, as published logs show it; the HBM itself is larger."""
    bf16_flops: float
    fp8_flops: float
    hbm_bytes_per_s: float
    pcie_bytes_per_s: float
    link_bytes_per_s: float
    """To the other cards of the box, all links together."""
    e4m3_max: float
    """Largest number in fp8 with four bits of exponent."""


CARDS = {
    "gaudi2": CardSpec("GAUDI2", int(94.62 * GIB), 432e12, 865e12, 2.45e12, 32e9, 262.5e9, 240.0),
    "gaudi3": CardSpec("GAUDI3", int(126.5 * GIB), 1835e12, 1835e12, 3.67e12, 64e9, 525e9, 448.0),
}

# Shares of the peak that published measurements support.
GEMM_SHARE = 0.85
SDPA_SHARE = 0.5
HBM_SHARE = 0.75

# Host time. Published: replays 150-210 us, 20 us per further submission. Assumed: the others.
RECORD_OP_S = 5e-6
LAUNCH_EAGER_OP_S = 20e-6
LAUNCH_STEP_S = 200e-6
REPLAY_GRAPH_S = 180e-6
REPLAY_SUBGRAPH_S = 20e-6

# A published log has 0.33-0.5 s per recipe and 0.3 s per capture of an 8B model. That its graphs
# have about a thousand operators is an assumption.
COMPILE_STEP_S = 0.02
COMPILE_OP_S = 0.4e-3
CAPTURE_OP_S = 0.3e-3

# Published planning figure: 10 MB per graph of an 8B model, besides its outputs.
GRAPH_BYTES_PER_OP = 10_000
