"""Create the source of draft tokens that the settings ask for."""

from collections.abc import Sequence

from vllm.config import SpeculativeConfig
from vllm.core.drafting.draft_control import DraftControl
from vllm.core.drafting.lookup_drafts import NgramDrafts, SuffixDrafts
from vllm.core.drafts import DraftSource
from vllm.messages import DRAFT_OF_WORKER
from vllm.request import Request


class ModelDrafts:
    """Plans the number of draft tokens; a draft model in the worker computes the tokens themselves.

    Args:
        max_drafts: limit per request and step.
        max_model_len: tokens that the draft model can process.
    """

    def __init__(self, max_drafts: int, max_model_len: int) -> None:
        self.max_drafts = max_drafts
        self._max_model_len = max_model_len

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return one placeholder for each draft that a request may have. The worker computes the
        tokens.
        """
        rooms = (self._max_model_len - len(request.token_ids) for request in requests)
        return [[DRAFT_OF_WORKER] * max(0, min(room, self.max_drafts)) for room in rooms]

    def leave(self, request: Request) -> None:
        """Do nothing: this source keeps no data of a request."""


def make_drafts(
    speculative: SpeculativeConfig,
) -> tuple[DraftSource, DraftControl] | tuple[None, None]:
    """Create the source of drafts and their limits; (None, None) if the settings ask for no drafts.

    Args:
        speculative: settings of speculative decoding.
    """
    options = speculative.drafts
    if options is None:
        return None, None
    source: DraftSource
    if options.method == "ngram":
        source = NgramDrafts(options)
    elif options.method == "suffix":
        source = SuffixDrafts(options)
    else:
        assert speculative.draft_model is not None
        max_model_len = speculative.draft_model.max_model_len or 0
        source = ModelDrafts(options.num_speculative_tokens, max_model_len)
    control = DraftControl(
        options.num_speculative_tokens, options.adaptive, options.disable_by_batch_size
    )
    return source, control
