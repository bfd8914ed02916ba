"""The constants of the cost model, each with its range and its source.

Host times are in seconds. "Assumed" has no published source: its range is a factor of two.
"""


class Constant(float):
    """A float that knows its range and its source.

    Attributes:
        low, high: the range that the source supports, in the unit of the value.
        source: one sentence.
    """

    low: float
    high: float
    source: str

    def __new__(cls, value: float, low: float, high: float, source: str) -> "Constant":
        """Create a constant after checking its range.

        Raises:
            ValueError: the value is outside of its range.
        """
        if not low <= value <= high:
            raise ValueError(f"{value} must be between {low} and {high}")
        constant = super().__new__(cls, value)
        constant.low, constant.high, constant.source = low, high, source
        return constant


def _assumed(value: float) -> Constant:
    return Constant(value, value / 2, value * 2, "assumed")


# Fractions of the peak:
GEMM_SHARE = Constant(
    0.85,
    0.35,
    0.85,
    "published matmul benchmarks; whole prompts of published runs reach 35 to 67 %",
)
SDPA_SHARE = Constant(0.5, 0.25, 1.0, "published benchmarks of FusedSDPA; the range is assumed")
HBM_SHARE = Constant(0.75, 0.71, 0.91, "fitted to 121 published runs with large decode batches")

# Seconds on the host:
RECORD_OP_S = _assumed(5e-6)
LAUNCH_EAGER_OP_S = _assumed(20e-6)
LAUNCH_STEP_S = _assumed(200e-6)
REPLAY_GRAPH_S = Constant(180e-6, 150e-6, 210e-6, "published replays of HPU Graphs")
REPLAY_SUBGRAPH_S = Constant(20e-6, 10e-6, 40e-6, "published for one case; the range is assumed")

# A published warm-up log of Llama-3.1-8B has 24 prompt and 48 decode buckets: 13 + 16 s to compile
# and run them, then 7 s to capture 15 graphs of prompts and 14 s for 48 of decodes. Layers that are
# alike share a recipe. So this engine compiles 19,500 operators in 275 recipes for these buckets,
# with sampling, while a graph launches 34 recipes (1,694 operators in a prompt, 3,016 in a decode).
# The seconds follow the operators of recipes that are compiled, and the recipes of a graph.
COMPILE_STEP_S = _assumed(0.02)
COMPILE_OP_S = Constant(
    1.05e-3, 0.7e-3, 3.0e-3, "warm-up log of Llama-3.1-8B: prompts and decodes, each alone"
)
CAPTURE_RECIPE_S = Constant(
    10e-3, 8.6e-3, 13.7e-3, "warm-up log of Llama-3.1-8B: prompts and decodes, each alone"
)

GRAPH_BYTES_PER_OP = Constant(
    2_700,
    1_200,
    6_000,
    "3 MiB in logs, 10 MB in the vendor's calculator, per graph of an 8B model; the mean of both",
)
"""Memory of a graph without its outputs."""
