"""Recognise checkpoints whose tensors all have a longer name, because their program had wrapped the
model or saved the language model of a multimodal checkpoint with its old names.
"""

import re
from collections.abc import Callable, Collection, Iterable
from itertools import chain

from vllm.logger import init_logger
from vllm.model_executor.loader.weights import targets_by_name
from vllm.model_executor.models.interface import LoadableModel

logger = init_logger(__name__)

_PREFIXES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "module.": "",
    "_orig_mod.": "",
    "base_model.model.": "",
    "": "model.",
}
"""Beginning of the names -> what it is in other checkpoints. The first two come from multimodal
models, the next three from DistributedDataParallel, torch.compile and peft, and the last one from
a decoder that was saved without its output head. Other beginnings are found in the names."""
_MAX_NAMES = 1000
"""Number of names that are searched for another beginning."""


def find_outer_names(
    model: LoadableModel, first: Iterable[str], others: Callable[[], Iterable[str]]
) -> None:
    """Set `outer_names` of a model if all tensors of its checkpoint have longer names.

    Args:
        model: whose layers do not have their weight methods yet.
        first: names of the tensors in the first file of the checkpoint.
        others: returns the names in all files, which are only read if necessary.
    """
    # An output head has the same name in multimodal checkpoints.
    expected = {name for name in targets_by_name(model) if not name.startswith("lm_head.")}

    def has_own(names: Iterable[str], prefix: str = "", inner: str = "") -> bool:
        return any(
            model.renamed(inner + name.removeprefix(prefix)) in expected
            for name in names
            if name.startswith(prefix)
        )

    if not expected or has_own(first):
        return
    names = frozenset(chain(first, others()))
    if has_own(names):
        return
    others_of_one = [(prefix, "") for prefix in _beginnings(model, names, expected)]
    for prefix, inner in (*_PREFIXES.items(), *others_of_one):
        if has_own(names, prefix, inner):
            model.outer_names = prefix, inner
            logger.info(
                "the tensors of the checkpoint have unusual names: %r at their beginning is read "
                "as %r. Tensors that encode images or sounds are not loaded",
                *(prefix, inner),
            )
            return


def _beginnings(
    model: LoadableModel, names: Iterable[str], expected: Collection[str]
) -> Collection[str]:
    """Return what comes before the model's own names in a checkpoint of another program, such as
    `llm.` or `model.` of a class that had the model as an attribute.

    Empty if there are several: a program that has saved two models does not say which one is meant.
    """
    found = {
        name[: dot.end()]
        for name in sorted(names)[:_MAX_NAMES]
        for dot in re.finditer(r"\.", name)
        if model.renamed(name[dot.end() :]) in expected
    }
    return found if len(found) == 1 else ()
