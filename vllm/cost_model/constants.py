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
        """Return the constant.

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

# A published log of an 8B model has 0.33 to 0.5 s per recipe and 0.29 to 0.36 s per capture. This
# engine runs 777 operators in a prefill and 2,004 in a decode of it; the values assume 1,000.
COMPILE_STEP_S = _assumed(0.02)
COMPILE_OP_S = Constant(0.4e-3, 0.16e-3, 0.64e-3, "warm-up log of Llama-3.1-8B")
CAPTURE_OP_S = Constant(0.3e-3, 0.14e-3, 0.46e-3, "warm-up log of Llama-3.1-8B")

GRAPH_BYTES_PER_OP = Constant(
    10_000,
    1_500,
    13_000,
    "3 MiB in a log, 10 MB in the vendor's calculator, per graph of an 8B model",
)
"""Memory of a graph without its outputs."""
