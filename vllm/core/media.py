"""Choose the images that a step encodes, and the embeddings that the worker keeps. Pure accounting.

A prompt may run up to the first image whose embeddings do not exist yet. The step whose tokens need
the image encodes it, within a separate budget, so that running requests wait for a bounded time.
Embeddings are kept after their prompt, and the least recently used ones are dropped first. So an
image that is sent again is not encoded again.

Items that cross-attention layers read are counted in the same way, in hidden states instead of
embeddings. A request holds all of its items from its admission until it leaves the batch. It is
admitted only if all of them exist or can be encoded, so that no two requests wait for each other.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm.core.pacing.step_bound import PromptBudget
from vllm.errors import CapacityError
from vllm.inputs import singular
from vllm.messages import END_OF_REQUEST, EngineRequest, MediaItem, MediaStats
from vllm.request import Request


@dataclass(slots=True)
class _Entry:
    size: int
    holders: set[tuple[str, int]] = field(default_factory=set)
    """Requests that have still to run tokens of it, and which of their items it is."""


@dataclass(slots=True)
class MediaPlan:
    """Collects the images that a step needs, while the step is planned."""

    used: list[tuple[Request, int]] = field(default_factory=list)
    """(request, item): the tokens of the step need its embeddings."""
    encoded: dict[str, int] = field(default_factory=dict)
    """Key of each image to encode -> its embeddings."""

    @property
    def num_encoded(self) -> int:
        """Number of embeddings that must be computed."""
        return sum(self.encoded.values())


class EncoderCache:
    """Keeps account of the image embeddings that the worker stores, and of the images to encode.

    Args:
        capacity: number of embeddings that the worker can store.
        budget: number of embeddings that a step may compute. A larger image gets a step for itself.
        most_whole: largest number of tokens of an image, all of which must run in one step. None:
            the tokens may be divided between steps.
        largest: embeddings of the largest image that fits into the memory of the encoder; None: no
            limit.

    Attributes:
        num_queries: images that prompts needed, each counted once per request.
        num_hits: how many of these were stored already.
    """

    def __init__(
        self,
        capacity: int,
        budget: int,
        *,
        most_whole: int | None = None,
        largest: int | None = None,
    ) -> None:
        self.capacity, self.budget, self._most_whole = capacity, budget, most_whole
        self._largest = largest
        self.num_queries = 0
        self.num_hits = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """Entries by key, the least recently used first."""
        self._num_held = 0
        """Embeddings of entries that have holders."""
        self._held: dict[str, tuple[Request, set[int]]] = {}
        """Request id -> the request, and the indices of the items that it holds."""
        self._num_kept = 0
        self._encoded: list[tuple[Request, int]] = []
        self._num_encoded = 0
        self._dropped: list[str] = []
        self._step_budget = budget

    def stats(self) -> MediaStats:
        """Return the counters of queries and hits."""
        return MediaStats(num_queries=self.num_queries, num_hits=self.num_hits)

    @property
    def num_encoded(self) -> int:
        """Number of embeddings that the step computes which is being planned."""
        return self._num_encoded

    @property
    def num_kept(self) -> int:
        """Number of embeddings that are stored, including those of the step that is being
        planned.
        """
        return self._num_kept

    def check(self, spec: EngineRequest) -> None:
        """Refuse a request whose images need more embeddings or tokens than possible.

        Raises:
            CapacityError: states both numbers.
        """
        costliest = max(spec.media, key=lambda item: item.num_embeddings)
        largest, one = costliest.num_embeddings, _name_of(costliest)
        if _is_held_whole(spec):
            self._check_together(spec)
        elif largest > self.capacity:
            raise CapacityError(
                f"{one} has {largest} embeddings, but the encoder cache holds at most "
                f"{self.capacity}. Send a smaller one"
            )
        longest = max(spec.media, key=_num_tokens)
        if self._most_whole is not None and _num_tokens(longest) > self._most_whole:
            raise CapacityError(
                f"{_name_of(longest)} has {_num_tokens(longest)} tokens, but at most "
                f"{self._most_whole} fit into one step, "
                "and they cannot be split over several steps (required by the model or "
                "--disable-chunked-mm-input). Send a smaller one, or start the engine with a "
                "larger --max-num-batched-tokens"
            )
        if self._largest is not None and largest > self._largest:
            raise CapacityError(
                f"{one} has {largest} embeddings, but the memory of the encoder allows at most "
                f"{self._largest}. Send a smaller one"
            )

    def _check_together(self, spec: EngineRequest) -> None:
        total = sum({item.key: item.num_states for item in spec.media}.values())
        if total > self.capacity:
            raise CapacityError(
                f"the images and sounds of a request have {total} hidden states, but the "
                f"cross-attention cache holds at most {self.capacity}. Send fewer or smaller ones, "
                "or start the engine with more memory"
            )

    def begin_step(self, num_computed: NDArray[np.int32]) -> None:
        """Start to plan a step: reset the budget of the encoder, and release images whose tokens
        have all been scheduled.

        Args:
            num_computed: computed tokens of each request, by its batch index.
        """
        self._step_budget = self.budget
        if not self._held:  # the usual case: no running request has media
            return
        for request in self.holders:
            self._pass_items(request, int(num_computed[request.row]))

    def limit_to_one(self) -> None:
        """Limit the step that is planned to one new image, or to the images of one request, because
        streams wait for the step.
        """
        self._step_budget = 0

    def with_whole_item(self, request: Request, start: int, num_tokens: int, most: int) -> int:
        """Return how many tokens of a prompt to run, so that an image at their beginning is not
        divided.

        Args:
            request: request with the prompt.
            start: index of the first token.
            num_tokens: number of tokens to run if no image is cut.
            most: maximum number of tokens, even to complete an image.
        """
        if self._most_whole is None or not 0 < num_tokens < most:
            return num_tokens
        for _, item in _items_between(request, start, start + 1):
            num_tokens = max(num_tokens, min(item.end - start, most))
        return num_tokens

    def limit(
        self,
        request: Request,
        start: int,
        num_tokens: int,
        plan: MediaPlan,
        budget: PromptBudget | None = None,
    ) -> int:
        """Return how many tokens of a request can run in this step, and add the images that they
        need to the plan.

        Args:
            request: request with images.
            start: index of the first token.
            num_tokens: number of tokens to run if no image prevents it.
            plan: images of the step.
            budget: time of the step, which encoders need too; None: unlimited.
        """
        before = plan.num_encoded
        if _is_held_whole(request.spec):
            if not self._may_hold(request, start, plan):
                return 0
            num_new = plan.num_encoded - before
            return num_tokens if budget is None else budget.most(start, num_tokens, num_new)
        for index, item in _items_between(request, start, start + num_tokens):
            if item.start >= start + num_tokens:
                break
            is_cut = self._most_whole is not None and start + num_tokens < item.end
            if is_cut or not self._may_use(item, plan):
                return max(item.start - start, 0)
            is_new = item.key not in self._entries and item.key not in plan.encoded
            if is_new and budget is not None:
                num_new = plan.num_encoded - before + item.num_embeddings
                most = budget.most(start, num_tokens, num_new)
                least = item.end - start if self._most_whole else max(item.start - start, 0) + 1
                if most < least and item.start > start:
                    return item.start - start  # there is time for the text before it only
                if not most:
                    return 0
                num_tokens = max(most, least)
            plan.used.append((request, index))
            if is_new:
                plan.encoded[item.key] = item.num_embeddings
        return num_tokens

    def _may_use(self, item: MediaItem, plan: MediaPlan) -> bool:
        """Return whether the embeddings of an image are stored or can be computed in this step."""
        entry = self._entries.get(item.key)
        if item.key in plan.encoded or (entry is not None and entry.holders):
            return True
        found = {request.spec.media[index].key for request, index in plan.used}
        if entry is not None and item.key in found:
            return True
        num_encoded = plan.num_encoded
        # Kept images that this step uses must not be dropped to make room for new ones.
        kept = (self._entries[key] for key in found if key in self._entries)
        num_kept = sum(each.size for each in kept if not each.holders)
        size = item.num_embeddings
        if self._num_held + num_kept + num_encoded + size > self.capacity:
            return False
        num_encoded += self._num_encoded
        return entry is not None or not num_encoded or num_encoded + size <= self._step_budget

    def _may_hold(self, request: Request, start: int, plan: MediaPlan) -> bool:
        """Return whether a request can be admitted with all items that its tokens from `start` on
        read, and add these items to its plan.
        """
        sizes: dict[str, int] = {}
        for index, item in _items_between(request, start, END_OF_REQUEST):
            plan.used.append((request, index))
            sizes[item.key] = item.num_states
        new = {key: size for key, size in sizes.items() if key not in self._entries}
        held = (key for key in sizes.keys() - new.keys() if self._entries[key].holders)
        num_held = self._num_held + sum(sizes.values()) - sum(sizes[key] for key in held)
        num_new = sum(new.values())
        if num_held > self.capacity:
            return False
        if num_new and self._num_encoded and self._num_encoded + num_new > self._step_budget:
            return False
        plan.encoded.update(new)
        return True

    def commit(self, plan: MediaPlan) -> None:
        """Make the requests hold the images of a plan, and mark the images that must be encoded."""
        for request, index in plan.used:
            item = request.spec.media[index]
            _, indices = self._held.setdefault(request.request_id, (request, set()))
            if index not in indices:
                self.num_queries += 1
                self.num_hits += item.key in self._entries
            if item.key in self._entries:
                self._entries.move_to_end(item.key)
            else:
                self._entries[item.key] = _Entry(item.num_embeddings)
                self._num_kept += item.num_embeddings
                self._encoded.append((request, index))
                self._num_encoded += item.num_embeddings
            entry = self._entries[item.key]
            if not entry.holders:
                self._num_held += entry.size
            entry.holders.add((request.request_id, index))
            indices.add(index)
        self._make_room()

    def take_step(self) -> tuple[list[tuple[int, int]], list[str]]:
        """Return the images to encode in this step as (batch index, item index), and the keys of
        the images to drop.
        """
        if not self._encoded and not self._dropped:
            return [], []
        encoded = [(request.row, index) for request, index in self._encoded]
        dropped, self._encoded, self._dropped = self._dropped, [], []
        self._num_encoded = 0
        return encoded, dropped

    def release(self, request: Request) -> None:
        """Release all images of a request that leaves the batch."""
        _, indices = self._held.pop(request.request_id, (request, set()))
        for index in indices:
            self._let_go(request, index)

    def drop(self, request: Request) -> None:
        """Drop the stored images of a failed request, because they may have caused the failure."""
        for key in {item.key for item in request.spec.media}:
            entry = self._entries.get(key)
            if entry is not None and not entry.holders:
                self._forget(key)

    def clear(self) -> None:
        """Drop all images that no request holds."""
        for key in [key for key, entry in self._entries.items() if not entry.holders]:
            self._forget(key)

    @property
    def holders(self) -> list[Request]:
        """The requests that hold images until the tokens of the images have run."""
        return [each for each, _ in self._held.values() if not _is_held_whole(each.spec)]

    def _pass_items(self, request: Request, num_computed: int) -> None:
        _, indices = self._held[request.request_id]
        passed = {index for index in indices if request.spec.media[index].end <= num_computed}
        for index in passed:
            self._let_go(request, index)
        indices -= passed
        if not indices:
            del self._held[request.request_id]

    def _let_go(self, request: Request, index: int) -> None:
        entry = self._entries[request.spec.media[index].key]
        entry.holders.discard((request.request_id, index))
        if not entry.holders:
            self._num_held -= entry.size

    def _forget(self, key: str) -> None:
        self._num_kept -= self._entries.pop(key).size
        self._dropped.append(key)

    def _make_room(self) -> None:
        """Drop the least recently used images that no request holds, until the rest fits."""
        while self._num_kept > self.capacity:
            key = next(key for key, entry in self._entries.items() if not entry.holders)
            self._forget(key)


def _name_of(item: MediaItem) -> str:
    """Return how an error names an item, with its position in the request where it is known."""
    name = singular(item.modality)
    return f"{item.where}: {name}" if item.where else name


def _num_tokens(item: MediaItem) -> int:
    """Return the tokens from the first to the last one of an item; 0 if only cross-attention reads
    it."""
    return 0 if item.num_states else item.end - item.start


def _is_held_whole(spec: EngineRequest) -> bool:
    """Return whether a request holds all of its items while it runs (cross-attention)."""
    return any(item.num_states for item in spec.media)


def _items_between(request: Request, start: int, end: int) -> Iterator[tuple[int, MediaItem]]:
    """Yield the images that have tokens between `start` and `end`, with their indices."""
    for index, item in enumerate(request.spec.media):
        if item.start < end and item.end > start:
            yield index, item
