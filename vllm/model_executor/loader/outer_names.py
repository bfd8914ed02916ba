"""Recognise checkpoints whose tensors all have longer or shorter names, because their program had
wrapped the model, saved it without its output head, or saved the language model of a multimodal
checkpoint with its old names.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from vllm.logger import init_logger
from vllm.model_executor.loader.weights import targets_by_name
from vllm.model_executor.models.interface import LoadableModel

logger = init_logger(__name__)

_PREFIXES = (
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("module.", ""),
    ("_orig_mod.", ""),
    ("base_model.model.", ""),
    *(("", inner) for inner in ("model.", "transformer.", "gpt_neox.", "backbone.")),
)
"""Beginning of the names, and what it is in other checkpoints. The first two come from multimodal
models, the next three from DistributedDataParallel, torch.compile and peft, and the last ones from
a decoder that was saved without its output head. Other beginnings are found in the names."""
_MAX_NAMES = 1000
"""Number of names that are searched for another beginning."""


def find_outer_names(
    model: LoadableModel, first: Iterable[str], others: Callable[[], Iterable[str]]
) -> None:
    """Set `outer_names` of a model if all tensors of its checkpoint have longer or shorter names.

    Args:
        model: whose layers do not have their weight methods yet.
        first: names of the tensors in the first file of the checkpoint.
        others: returns the names in all files, which are only read if necessary.
    """
    # An output head has the same name in multimodal checkpoints.
    expected = {name for name in targets_by_name(model) if not name.startswith("lm_head.")}

    def own(names: Iterable[str], prefix: str = "", inner: str = "") -> Iterator[str]:
        for name in names:
            if name.startswith(prefix):
                renamed = model.renamed(inner + name.removeprefix(prefix))
                if renamed in expected:
                    yield renamed

    if not expected or any(own(first)):
        return
    names = frozenset(chain(first, others()))
    if any(own(names)):
        return
    others_of_one = [(prefix, "") for prefix in _beginnings(model, names, expected)]
    # Some names are the same with several beginnings, others are not.
    num_own = {pair: len(set(own(names, *pair))) for pair in (*_PREFIXES, *others_of_one)}
    prefix, inner = max(num_own, key=num_own.__getitem__)
    if num_own[prefix, inner]:
        model.outer_names = prefix, inner
        logger.info(
            "the tensors of the checkpoint have unusual names: %r at their beginning is read "
            "as %r. Tensors that encode images or sounds are not loaded",
            *(prefix, inner),
        )


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
