"""The one forward pass that a profiling start runs, in the format of the Gaudi fork's variable."""

import re

from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.errors import ConfigError

_FORM = re.compile(r"(prompt|decode)_(\d+)_(\d+)(?:_(\d+))?_([tf])")


def parse_profiled(text: str) -> tuple[Bucket, bool]:
    """Parse the shape to profile; return its bucket, and whether it runs as a graph if possible.

    >>> parse_profiled("prompt_1_512_t")
    (Bucket(phase=<Phase.PREFILL: 0>, batch=1, query_len=512, blocks=0), True)

    Args:
        text: `prompt_BATCH_LENGTH_t`, `prompt_BATCH_LENGTH_CONTEXTBLOCKS_t` or
            `decode_BATCH_BLOCKS_t`; f at the end means "not as a graph".

    Raises:
        ConfigError: it has another format, or there is no such bucket.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or (match[1] == "decode" and match[4]):
        raise ConfigError(
            f"VLLM_PT_PROFILE={text!r} must be prompt_BATCH_LENGTH_t or decode_BATCH_BLOCKS_t, "
            "such as prompt_1_1024_t; f instead of t at the end runs without a graph"
        )
    batch, size = int(match[2]), int(match[3])
    if not batch or not size:
        raise ConfigError(f"VLLM_PT_PROFILE={text!r} must have sizes of at least 1")
    if match[1] == "prompt":
        return prefill(batch, size, int(match[4] or 0)), match[5] == "t"
    if size < batch:
        raise ConfigError(
            f"VLLM_PT_PROFILE={text!r} must have at least one block for each of its {batch} "
            f"requests, got {size} blocks"
        )
    return decode(batch, size), match[5] == "t"
