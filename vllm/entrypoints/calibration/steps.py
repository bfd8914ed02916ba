"""List the steps of a calibration, in order.

The run, the help of `vllm calibrate` and the table of docs/quantization.md read them here. Each
step has a method with its name in `run.Calibration`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, which can be repeated."""

    name: str
    does: str
    """The help text."""
    needs: str
    writes: str
    script_number: str | None = None
    """Number of the step in the calibration scripts for Gaudi."""
    only_with: str | None = None
    """Setting without which the step is left out."""

    @property
    def flag(self) -> str | None:
        """Flag of the setting without which the step is skipped; None if the step always runs."""
        return None if self.only_with is None else f"--{self.only_with.replace('_', '-')}"


STEPS = {
    step.name: step
    for step in (
        Step(
            name="prepare",
            script_number="1",
            does=(
                "split the texts into samples of tokens, and keep a fifth of them for the step "
                "evaluate"
            ),
            needs="`--dataset`",
            writes="`calibration_samples.jsonl`, `evaluation_samples.jsonl`",
        ),
        Step(
            name="measure",
            script_number="2",
            does=(
                "run the model, and measure the largest values of inputs and weights of linear "
                "layers, and of keys and values"
            ),
            needs="the samples",
            writes="`gN/inc_output_hooks_maxabs_RANK_WORLD.json`",
        ),
        Step(
            name="postprocess",
            script_number="3",
            does=(
                "copy the measured ranges of the KV cache to the matmuls of attention that read "
                "it, where a file has such modules"
            ),
            needs="the measurements",
            writes="the same files",
        ),
        Step(
            name="unify",
            script_number="5",
            only_with="unify_ranks",
            does=(
                "merge the measurements of neighbouring ranks into N ranks (the largest value "
                "counts)"
            ),
            needs="the measurements",
            writes="files for N ranks",
        ),
        Step(
            name="expand",
            script_number="6",
            only_with="expand_ranks",
            does=(
                "make the measurements of N ranks from fewer measured ranks, and divide the "
                "experts among them"
            ),
            needs="the measurements",
            writes="files for N ranks",
        ),
        Step(
            name="quantize",
            script_number="4",
            does="load the model in FP8, which computes its scales",
            needs="the measurements",
            writes="`gN/inc_output_hooks_maxabs_METHOD_RANK_WORLD.json`",
        ),
        Step(
            name="evaluate",
            does="compute the perplexity of the samples kept for it, without and with FP8",
            needs="the samples kept for it, and the scales",
            writes="the perplexity, in `calibration_gN.json`",
        ),
    )
}
"""Name -> step."""


def steps_before(name: str) -> list[str]:
    """Return the names of the steps before a step."""
    names = list(STEPS)
    return names[: names.index(name)]
