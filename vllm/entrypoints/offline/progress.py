"""Show the progress bar of offline generation."""

from collections.abc import Callable
from typing import Any

from vllm.outputs import AnyRequestOutput, RequestOutput

MakeBar = Callable[..., Any]
"""Makes a bar when called like `tqdm.tqdm`."""


class GenerationProgress:
    """Counts finished requests and tokens per second, and shows a progress bar.

    Args:
        total: number of requests.
        use_tqdm: False: show nothing.
    """

    def __init__(self, total: int, use_tqdm: bool | MakeBar) -> None:
        self._bar: Any = None
        self._num_input_tokens = 0
        self._num_output_tokens = 0
        if use_tqdm:
            from tqdm import tqdm

            make = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
            self._show_speed()

    def __enter__(self) -> "GenerationProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, output: AnyRequestOutput) -> None:
        """Count one more finished request."""
        if self._bar is None:
            return
        self._num_input_tokens += len(output.prompt_token_ids or ())
        if isinstance(output, RequestOutput):
            self._num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self._show_speed()
        self._bar.update(1)

    def _show_speed(self) -> None:
        elapsed_s = self._bar.format_dict["elapsed"] or float("inf")
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_input_tokens / elapsed_s:.2f} toks/s, "
            f"output: {self._num_output_tokens / elapsed_s:.2f} toks/s",
            refresh=False,
        )
