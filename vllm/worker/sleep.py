"""Sleep mode: releases the memory of weights and KV cache, and allocates it again on demand.

Each device releases memory in its own way: `worker/cpu/sleep`, `worker/hpu/memory/sleep`. The
engine makes sure that no request runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.messages import SLEEP_TAGS

logger = init_logger(__name__)

WEIGHTS, KV_CACHE = TAGS = SLEEP_TAGS

LEVELS = (1, 2)


BuildModel = Callable[[str], nn.Module]
"""Builds a new model like the running one, with the weights of a folder, in host memory."""


class SleepPart(Protocol):
    """A part of the memory that sleep mode can release and restore."""

    def release(self, *, keep: bool) -> None:
        """Release the memory.

        May be called again on released memory, if less of its content has to be kept.

        Args:
            keep: the content must be the same after `restore`.
        """
        ...

    def restore(self) -> None:
        """Allocate the memory again. If this raises, the memory stays released."""
        ...


class SleepingWeights(SleepPart, Protocol):
    """The weights of a model, which can also be read again."""

    def reload(self, folder: str | None) -> None:
        """Read the weights again, from another folder if one is given.

        While they are released, `restore` will read them from there.

        Raises:
            WeightLoadError: the folder cannot be read, or does not fit the model; nothing has
                changed.
        """
        ...


class ModelWithDrafter:
    """The weights of a model and of its draft model or speculator; see `SleepingWeights`.

    Args:
        model: weights of the model.
        drafter: weights of the draft model or speculator.
        have_one_folder: the draft model or speculator is stored in the files of the model.
    """

    def __init__(
        self, model: SleepingWeights, drafter: SleepingWeights, *, have_one_folder: bool
    ) -> None:
        self._model, self._drafter = model, drafter
        self._have_one_folder = have_one_folder

    def release(self, *, keep: bool) -> None:
        """Release the memory of both parts."""
        self._model.release(keep=keep)
        self._drafter.release(keep=keep)

    def restore(self) -> None:
        """Allocate the memory of both parts again."""
        self._model.restore()
        self._drafter.restore()

    def reload(self, folder: str | None) -> None:
        """Read the weights of the model again.

        Also reads the weights of the draft model if it is stored in the same folder.
        """
        self._model.reload(folder)
        if self._have_one_folder:
            self._drafter.reload(folder)


class Sleep:
    """Releases and restores the memory of a worker's parts.

    Args:
        parts: parts by tag.
    """

    def __init__(self, parts: Mapping[str, SleepPart]) -> None:
        self._parts = parts
        self._levels: dict[str, int] = {}
        """Sleep level of each part that sleeps."""

    @property
    def tags(self) -> list[str]:
        """The tags of the parts that sleep, in the order of `TAGS`."""
        return [tag for tag in TAGS if tag in self._levels]

    def sleep(self, level: int) -> None:
        """Release the memory of all parts.

        Args:
            level: 1 keeps the content of weights, 2 keeps nothing. The KV cache is always lost.

        Raises:
            RequestError: there is no such level.
        """
        if level not in LEVELS or isinstance(level, bool):
            raise RequestError(
                f"sleep level {level!r}: it must be 1 (keep the weights' content) or 2 (keep "
                f"nothing)",
                param="level",
            )
        todo = [tag for tag in reversed(TAGS) if self._levels.get(tag, 0) < level]
        if not todo:
            logger.warning("Executor is already sleeping.")
        for tag in todo:
            self._parts[tag].release(keep=tag == WEIGHTS and level == 1)
            self._levels[tag] = level

    def wake_up(self, tags: Sequence[str] | None) -> list[str]:
        """Allocate the memory of parts again.

        Args:
            tags: tags of the parts; None is all of them.

        Returns:
            The tags of the parts that slept.

        Raises:
            RequestError: there is no such part.
        """
        wanted = TAGS if tags is None else [tags] if isinstance(tags, str) else list(tags)
        unknown = [tag for tag in wanted if tag not in TAGS]
        if unknown:
            raise RequestError(
                f"wake_up tag {unknown[0]!r}: it must be one of {', '.join(TAGS)}", param="tags"
            )
        todo = [tag for tag in self.tags if tag in wanted]
        if not todo:
            logger.warning("Executor is not sleeping.")
        for tag in todo:
            self._parts[tag].restore()
            del self._levels[tag]
        return todo
