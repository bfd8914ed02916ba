"""Choose the images that a step encodes, and the embeddings that the worker keeps. Pure accounting.

A prompt may run up to the first image whose embeddings do not exist yet. The step whose tokens need
the image encodes it, within a separate budget, so that running requests wait for a bounded time.
Embeddings are kept after their prompt, and the least recently used ones are dropped first. So an
image that is sent again is not encoded again.

An image may consist of parts that the encoder runs separately: tiles, frames of a video, or pieces
of a sound. If a step also runs decodes, it encodes only as many parts as its budget allows, but at
least one, and its next tokens wait until later steps have encoded the others.

Items that cross-attention layers read are counted in the same way, in hidden states instead of
embeddings. A request holds all of its items from its admission until it leaves the batch. It is
admitted only if all of them exist or can be encoded, so that no two requests wait for each other.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from vllm.core.pacing.step_bound import PromptBudget
from vllm.errors import CapacityError
from vllm.inputs import singular
from vllm.messages import END_OF_REQUEST, EngineRequest, MediaItem, MediaStats
from vllm.request import Request


class EncodeMode(Enum):
    """Amount of work that a step may give the encoder."""

    WHOLE = "whole"
    """Whole images, because no running request waits for its next token."""
    PARTS = "parts"
    """Parts of images: the step also runs decodes, which wait for the encoder."""
    NOTHING = "nothing"
    """Nothing: all decodes wait for a step in flight. A step without tokens is not executed, so it
    cannot encode parts of an image."""


@dataclass(slots=True)
class _Entry:
    size: int
    """Number of its embeddings. Space for all of them is taken with its first part."""
    num_parts: int
    num_encoded: int = 0
    """Number of parts that the planned steps encode, from its first part on."""
    holders: set[tuple[str, int]] = field(default_factory=set)
    """Requests that have still to run tokens of it, and which of their items it is."""

    @property
    def is_whole(self) -> bool:
        """Whether all of its parts are encoded."""
        return self.num_encoded == self.num_parts


@dataclass(slots=True)
class MediaPlan:
    """Collects the images that a step needs, while the step is planned."""

    used: list[tuple[Request, int]] = field(default_factory=list)
    """(request, item): the request needs its embeddings, in this step or once it is whole."""
    parts: dict[str, range] = field(default_factory=dict)
    """Key of each image that is encoded -> its parts that the step encodes."""
    num_encoded: int = 0
    """Number of embeddings that these parts have."""
    num_new: int = 0
    """Number of embeddings of images of which nothing is stored yet."""

    def encode(self, item: MediaItem, parts: range, *, is_new: bool) -> None:
        """Add parts of an image to the step.

        Args:
            item: the image.
            parts: the next parts that are missing.
            is_new: nothing of the image is stored or planned yet.
        """
        planned = self.parts.get(item.key, parts)
        self.parts[item.key] = range(planned.start, parts.stop)
        self.num_encoded += _size_of(item, parts)
        if is_new:
            self.num_new += item.num_embeddings


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
        mode: what the step that is planned may encode; `begin_step` resets it.
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
        self._encoded: list[tuple[Request, int, range]] = []
        self._num_encoded = 0
        self._dropped: list[str] = []
        self.mode = EncodeMode.WHOLE

    def stats(self) -> MediaStats:
        """Return the counters of queries and hits."""
        return MediaStats(num_queries=self.num_queries, num_hits=self.num_hits)

    @property
    def num_encoded(self) -> int:
        """Number of embeddings that are computed by the step that is being planned."""
        return self._num_encoded

    @property
    def num_kept(self) -> int:
        """Number of embeddings that are stored, including the ones of the step that is being
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
        costliest = max(spec.media, key=_size_of_part)
        size, one = _size_of_part(costliest), _name_of(costliest)
        if self._largest is not None and size > self._largest:
            each = "" if costliest.num_parts == 1 else " for each of its frames"
            raise CapacityError(
                f"{one} has {size} embeddings{each}, but the memory of the encoder allows at most "
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
        self.mode = EncodeMode.WHOLE
        if not self._held:  # the usual case: no running request has media
            return
        for request in self.holders:
            self._pass_items(request, int(num_computed[request.row]))

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
            return self._limit_held(request, start, num_tokens, plan, budget)
        for index, item in _items_between(request, start, start + num_tokens):
            if item.start >= start + num_tokens:
                break
            num_before = max(item.start - start, 0)
            is_cut = self._most_whole is not None and start + num_tokens < item.end
            if is_cut or not self._fits(item, plan):
                return num_before
            first = self._num_encoded_of(item, plan)
            if first < item.num_parts:
                parts = self._parts_from(first, item, plan, budget, before)
                if not parts:
                    return num_before
                is_whole = parts.stop == item.num_parts
                if budget is not None:
                    num_new = plan.num_encoded - before + _size_of(item, parts)
                    most = budget.most(start, num_tokens, num_new)
                    least = item.end - start if self._most_whole else num_before + 1
                    if num_before and (most < least or not is_whole):
                        return num_before  # there is time for the text before it only
                    if not most:
                        return 0
                    num_tokens = max(most, least)
                self._encode(item, parts, plan)
                if not is_whole:
                    plan.used.append((request, index))
                    return num_before
            plan.used.append((request, index))
        return num_tokens

    def _limit_held(
        self,
        request: Request,
        start: int,
        num_tokens: int,
        plan: MediaPlan,
        budget: PromptBudget | None,
    ) -> int:
        """Limit the tokens of a request that holds all of its items while it runs; see `limit`."""
        needed = list(_items_between(request, start, END_OF_REQUEST))
        items = {item.key: item for _, item in needed}
        if not self._fit_together(items.values(), plan):
            return 0
        before = plan.num_encoded
        missing = [
            (first, item)
            for item in items.values()
            if (first := self._num_encoded_of(item, plan)) < item.num_parts
        ]
        found: list[tuple[MediaItem, range]] = []
        if self.mode is EncodeMode.PARTS:
            for first, item in missing:
                parts = self._parts_from(first, item, plan, budget, before)
                if parts:
                    self._encode(item, parts, plan)
                    found.append((item, parts))
                if not parts or parts.stop < item.num_parts:
                    num_tokens = 0
                    break
            if missing and not found:
                return 0
        else:
            found = [(item, range(first, item.num_parts)) for first, item in missing]
            num_new, num_others = sum(_size_of(*each) for each in found), self._num_encoded + before
            is_too_much = bool(num_others) and num_others + num_new > self.budget
            if num_new and (self.mode is EncodeMode.NOTHING or is_too_much):
                return 0
        if num_tokens and budget is not None:
            num_new = plan.num_encoded - before
            num_tokens = budget.most(start, num_tokens, num_new)
        if self.mode is not EncodeMode.PARTS:
            if not num_tokens:
                return 0
            for item, parts in found:
                self._encode(item, parts, plan)
        plan.used += [(request, index) for index, _ in needed]
        return num_tokens

    def _encode(self, item: MediaItem, parts: range, plan: MediaPlan) -> None:
        is_new = item.key not in self._entries and item.key not in plan.parts
        plan.encode(item, parts, is_new=is_new)

    def _num_encoded_of(self, item: MediaItem, plan: MediaPlan) -> int:
        """Return how many parts of an image are encoded once the planned step has run."""
        if item.key in plan.parts:
            return plan.parts[item.key].stop
        entry = self._entries.get(item.key)
        return 0 if entry is None else entry.num_encoded

    def _parts_from(
        self, first: int, item: MediaItem, plan: MediaPlan, budget: PromptBudget | None, before: int
    ) -> range:
        """Return the parts of an image that this step may encode.

        Args:
            first: first part that is missing.
            item: the image.
            plan: images of the step.
            budget: time of the step; None: unlimited.
            before: embeddings in the plan whose time is already subtracted from `budget`.
        """
        num_others = self._num_encoded + plan.num_encoded
        everything = range(first, item.num_parts)
        if self.mode is EncodeMode.NOTHING:
            return range(first, first)
        if not num_others and self.mode is EncodeMode.WHOLE:
            return everything
        most = self.budget - num_others
        if budget is not None:
            most = min(most, budget.most_encoded(plan.num_encoded - before))
        if _size_of(item, everything) <= most:
            return everything
        if self.mode is EncodeMode.WHOLE:
            return range(first, first)
        count = max(most, 0) // _size_of_part(item)
        return range(first, first + max(count, 0 if num_others else 1))

    def _fits(self, item: MediaItem, plan: MediaPlan) -> bool:
        """Return whether an image is stored, or whether there is space for it."""
        entry = self._entries.get(item.key)
        if item.key in plan.parts or (entry is not None and entry.holders):
            return True
        found = {request.spec.media[index].key for request, index in plan.used}
        if entry is not None and item.key in found:
            return True
        # Kept images that this step uses must not be dropped to make room for new ones.
        kept = (self._entries[key] for key in found if key in self._entries)
        num_kept = sum(each.size for each in kept if not each.holders)
        return self._num_held + num_kept + plan.num_new + item.num_embeddings <= self.capacity

    def _fit_together(self, items: Iterable[MediaItem], plan: MediaPlan) -> bool:
        """Return whether there is space for all items of a request that holds them together."""
        num_held = self._num_held + plan.num_new
        for item in items:
            entry = self._entries.get(item.key)
            if item.key not in plan.parts and (entry is None or not entry.holders):
                num_held += item.num_states
        return num_held <= self.capacity

    def commit(self, plan: MediaPlan) -> None:
        """Make the requests hold the images of a plan, and mark the parts that must be encoded."""
        for request, index in plan.used:
            item = request.spec.media[index]
            _, indices = self._held.setdefault(request.request_id, (request, set()))
            if index not in indices:
                self.num_queries += 1
                self.num_hits += item.key in self._entries
            if item.key in self._entries:
                self._entries.move_to_end(item.key)
            else:
                self._entries[item.key] = _Entry(item.num_embeddings, item.num_parts)
                self._num_kept += item.num_embeddings
            entry = self._entries[item.key]
            parts = plan.parts.get(item.key)
            if parts is not None and entry.num_encoded < parts.stop:
                entry.num_encoded = parts.stop
                self._encoded.append((request, index, parts))
                self._num_encoded += _size_of(item, parts)
            if not entry.holders:
                self._num_held += entry.size
            entry.holders.add((request.request_id, index))
            indices.add(index)
        self._make_room()

    def take_step(self) -> tuple[list[tuple[int, int, int, int]], list[str]]:
        """Return what to encode in this step, as in `SchedulerOutput.encoded_media`, and the keys
        of the images to drop.
        """
        if not self._encoded and not self._dropped:
            return [], []
        encoded = [
            (request.row, index, parts.start, parts.stop) for request, index, parts in self._encoded
        ]
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
            if not entry.is_whole:
                self._forget(request.spec.media[index].key)

    def _forget(self, key: str) -> None:
        self._num_kept -= self._entries.pop(key).size
        self._dropped.append(key)

    def _make_room(self) -> None:
        """Drop the least recently used images that no request holds, until the rest fits."""
        while self._num_kept > self.capacity:
            key = next(key for key, entry in self._entries.items() if not entry.holders)
            self._forget(key)


def _size_of(item: MediaItem, parts: range) -> int:
    """Return how many embeddings some parts of an image have, as if all parts had equally many."""
    size, count = item.num_embeddings, item.num_parts
    # Rounded up: the first part has embeddings.
    return -(-size * parts.stop // count) + -size * parts.start // count


def _size_of_part(item: MediaItem) -> int:
    """Return the embeddings of the largest part of an image, if its parts are alike."""
    return -(-item.num_embeddings // item.num_parts)


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
