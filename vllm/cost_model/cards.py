"""Published data of the cards, in the units of their data sheets.

Nothing here was measured on a card by this project.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class CardSpec:
    """One kind of card. Rates are per second and in one direction."""

    name: str
    pool_bytes: int
    """Memory that a process can allocate, as published logs show it; the HBM itself is larger."""
    bf16_flops: float
    fp8_flops: float
    hbm_bytes_per_s: float
    pcie_bytes_per_s: float
    link_bytes_per_s: float
    """Bytes per second to the other cards of the box, all links together."""
    e4m3_max: float
    """Largest value of FP8 with four bits of exponent (e4m3). On Gaudi 2, the format has infinities
    instead of the largest values of other e4m3 formats."""


CARDS = {
    "gaudi2": CardSpec("GAUDI2", int(94.62 * GIB), 432e12, 865e12, 2.45e12, 32e9, 262.5e9, 240.0),
    "gaudi3": CardSpec("GAUDI3", int(126.5 * GIB), 1835e12, 1835e12, 3.67e12, 64e9, 525e9, 448.0),
}

NUMBERS_OF_CARDS = (1, 2, 4, 8)
"""Numbers of cards that an engine is planned for. A box has eight cards."""
