"""Compute the tokens that a request may generate next, from its grammar, end tokens and other
parameters.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm.logger import init_logger
from vllm.messages import NO_ALLOWED_TOKEN, EngineRequest, IntArray
from vllm.structured_output.backends.interface import BackendError, LoadedGrammar, OutputMatcher
from vllm.structured_output.backends.vocabulary import Vocabulary, pack_tokens
from vllm.structured_output.call_matcher import CallMatcher
from vllm.structured_output.late_start import LateMatcher

logger = init_logger(__name__)

BUDGET_S = 2.0
BUDGET_PER_TOKEN_S = 0.005
"""Processor time for the masks of one request. The whole batch waits for them, and an ambiguous
grammar may take longer with every token, so its request is ended. Usually it takes less than 1
ms."""


class RowMatcher:
    """Follows one output. All work is done by `fill`, in the thread that calls it.

    End tokens are allowed only when the output is complete, which it never is inside reasoning.
    Before `min_tokens` tokens, and always with `ignore_eos`, they are allowed only if no other
    token is. If a stop token of the user is text, the grammar decides whether it is allowed; it
    ends the output.

    Args:
        request: request with a grammar.
        output_token_ids: tokens generated so far.
        open_grammar: returns the vocabulary and the grammar; called once, by the first `fill`.
            Raises BackendError or RequestError.
    """

    def __init__(
        self,
        request: EngineRequest,
        output_token_ids: Sequence[int],
        open_grammar: Callable[[], tuple[Vocabulary, LoadedGrammar]],
    ) -> None:
        params = request.sampling_params
        self._request_id = request.request_id
        self._eos = request.eos_token_id
        self._stop_token_ids = request.stop_token_ids
        self._model_ends = request.model_end_token_ids
        self._allowed_token_ids = params.allowed_token_ids
        self._min_tokens = params.min_tokens
        self._ends_late = params.ignore_eos
        guided = params.guided_decoding
        self._grammar_start = None if guided is None else guided.start
        self._num_tokens = len(output_token_ids)
        self._unread = list(output_token_ids)
        self._open_grammar: Callable[[], tuple[Vocabulary, LoadedGrammar]] | None = open_grammar
        self._error: str | None = None
        self._spent_s = 0.0

    @property
    def error(self) -> str | None:
        """The reason why the output cannot continue; None if it can."""
        return self._error

    def accept(self, token_id: int) -> None:
        """Add a generated token."""
        self._num_tokens += 1
        self._unread.append(token_id)

    def fill(self, mask: IntArray) -> None:
        """Write the mask [W] of the next token. Failures are stored in `error`."""
        self.fill_along(mask[None], ())

    def fill_along(self, masks: IntArray, drafts: Sequence[int]) -> None:
        """Write the masks [1 + d, W] of the next token, and of the tokens after each of d drafts.

        No token is allowed after a draft that is an end token, that is not allowed, or after which
        the matcher fails. Failures at the next token are stored in `error`.
        """
        mask = masks[0]
        try:
            if self._error is None:
                self._open()
                started = time.thread_time()
                self._read()
                self._fill(mask, self._num_tokens)
                self._fill_behind(masks, drafts)
                self._spend(time.thread_time() - started)
                return
        except ValueError as error:
            self._error = f"structured output failed: {error}"
        except Exception as error:  # a library may raise anything: only this request fails
            logger.error("structured output of %s failed", self._request_id, exc_info=True)
            self._error = f"structured output failed: {error!r}"
        mask[:] = -1  # all tokens are allowed: one must be sampled, but it is never shown

    def _open(self) -> None:
        if self._open_grammar is not None:
            vocabulary, grammar = self._open_grammar()
            self._open_grammar = None
            self._matcher = self._start(vocabulary, grammar)
            self._prepare(vocabulary)

    def _start(self, vocabulary: Vocabulary, grammar: LoadedGrammar) -> OutputMatcher:
        start = self._grammar_start
        if start is None or not start.is_late:
            return grammar.matcher()
        if start.grammar_starts:
            return CallMatcher(start, vocabulary, grammar)
        return LateMatcher(start, vocabulary, grammar.matcher())

    def _spend(self, seconds: float) -> None:
        self._spent_s += seconds
        if self._spent_s > BUDGET_S + BUDGET_PER_TOKEN_S * self._num_tokens:
            raise BackendError(
                f"following the grammar took {self._spent_s:.1f} s for {self._num_tokens} tokens, "
                f"because it is too ambiguous. Simplify it"
            )

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for token_id in unread:
            if token_id not in self._end_ids:
                self._matcher.accept(token_id)

    def _fill_behind(self, masks: IntArray, drafts: Sequence[int]) -> None:
        masks[1:] = 0
        num_accepted = 0
        for place, draft in enumerate(drafts):
            word, bit = divmod(draft, 32)
            if draft in self._end_ids or not masks[place, word] >> bit & 1:
                break
            try:
                self._matcher.accept(draft)
                num_accepted += 1
                self._fill(masks[place + 1], self._num_tokens + num_accepted)
            except BackendError:
                # If all drafts up to this one are accepted, the error is reported
                # when it is the next token.
                masks[place + 1] = 0
                break
        if num_accepted:
            self._matcher.rollback(num_accepted)

    def _fill(self, mask: IntArray, num_tokens: int) -> None:
        self._matcher.fill(mask)
        mask &= self._text
        is_early = num_tokens < self._min_tokens
        if is_early and (rest := mask & ~self._stops).any():
            mask[:] = rest
        has_text = bool(mask.any())
        if self._matcher.is_complete():
            if not has_text or not (is_early or self._ends_late):
                mask |= self._ends
            if not mask.any():
                mask |= self._all_ends
        elif not has_text:
            raise BackendError(NO_ALLOWED_TOKEN)

    def _prepare(self, vocabulary: Vocabulary) -> None:
        """Compute the masks that never change."""
        tokens = vocabulary.tokens

        def pack(token_ids: Sequence[int]) -> IntArray:
            return pack_tokens(np.array(token_ids, np.int64), vocabulary.num_words)

        self._end_ids = {
            t
            for t in self._stop_token_ids
            if t < len(tokens) and (t in self._model_ends or not tokens[t])
        }
        if self._eos is not None:
            self._end_ids.add(self._eos)
        self._all_ends = pack(sorted(self._end_ids))
        self._stops = pack(sorted(self._stop_token_ids - self._end_ids))
        self._ends = self._all_ends
        is_late = isinstance(self._matcher, (CallMatcher, LateMatcher))
        self._text = ~self._all_ends if is_late else vocabulary.text_mask & ~self._all_ends
        if self._allowed_token_ids is not None:
            allowed = pack(self._allowed_token_ids)
            self._ends = self._ends & allowed
            self._text = self._text & allowed
