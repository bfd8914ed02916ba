"""Searches the number of cards that meets goals, with a plan of the engine for each number."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.cost_model.cards import NUMBERS_OF_CARDS
from vllm.cost_model.fitted import Fitted
from vllm.errors import ConfigError
from vllm.planning.engine_plan import EnginePlan, mode_setting
from vllm.planning.engine_throughput import max_requests, predict_plan, serving_cost
from vllm.planning.throughput.goals import Choice, Goals, search
from vllm.planning.throughput.prediction import Lengths, Prediction
from vllm.planning.throughput.table import as_lines, as_objects

MAX_REQUESTS = 1024
"""Maximum number of requests at a time. Published runs have up to 4,000, but each size of a batch
needs its own buckets."""

MakePlan = Callable[[int, int | None], EnginePlan]
"""Plans an engine on so many cards, with this max_num_seqs; None: the value of the flags."""


@dataclass(frozen=True)
class FoundCards:
    """The result of a search for cards.

    Attributes:
        choice: the engine that meets the goals, or comes nearest.
        plan: plan of the engine on these cards, with this max_num_seqs.
        unfit: number of cards -> why the engine does not run on it.
    """

    choice: Choice
    plan: EnginePlan
    unfit: dict[int, str]


def search_cards(
    make_plan: MakePlan,
    goals: Goals,
    lengths: Lengths,
    *,
    numbers_of_cards: Sequence[int] = NUMBERS_OF_CARDS,
    fitted: Fitted | None = None,
) -> FoundCards:
    """Return the fewest cards that meet the goals, and the largest max_num_seqs with them.

    Args:
        make_plan: makes the plan for a number of cards; raises ConfigError if it does not fit.
        goals: the goals, at least one.
        lengths: length of each request.
        numbers_of_cards: numbers of cards to try, in ascending order.
        fitted: constants of the card; None: constants from published runs.

    Raises:
        ConfigError: the engine, or a request of these lengths, fits on no number of cards.
    """
    unfit: dict[int, str] = {}
    plans: dict[int, EnginePlan] = {}

    def predictions() -> Iterator[tuple[int, Prediction]]:
        for num_cards in numbers_of_cards:
            try:
                plan = plans[num_cards] = make_plan(num_cards, None)
            except ConfigError as error:
                unfit[num_cards] = str(error)
                continue
            if held := _num_held(plan, lengths):
                yield num_cards, _predict(plan, lengths, held, fitted)
            else:
                unfit[num_cards] = f"the KV cache holds no request of {lengths.total} tokens"
        if len(unfit) == len(numbers_of_cards):
            most = numbers_of_cards[-1]
            raise ConfigError(
                f"the engine does not fit on any number of cards; on {most}: {unfit[most]}"
            )

    choice = search(goals, predictions())
    first = plans[choice.num_cards]
    # A larger batch needs more memory outside of the KV cache, so fewer requests may fit into it.
    while True:
        try:
            plan = make_plan(choice.num_cards, choice.max_num_seqs)
            held = _num_held(plan, lengths)
        except ConfigError:
            held = choice.max_num_seqs // 2
            if not held:
                raise
        if held >= choice.max_num_seqs:
            return FoundCards(choice, plan, unfit)
        choice = search(goals, [(choice.num_cards, _predict(first, lengths, held, fitted))])


def _num_held(plan: EnginePlan, lengths: Lengths) -> int:
    """Return how many requests the KV cache holds at a time.

    Raises:
        ConfigError: the model does not accept a request of these lengths.
    """
    limit = plan.config.scheduler.max_model_len
    if lengths.total > limit:
        raise ConfigError(
            f"requests of {lengths.prompt} + {lengths.output} tokens are longer than "
            f"max_model_len={limit}. Lower --input-len or --output-len, or raise --max-model-len"
        )
    return min(max_requests(plan, lengths), MAX_REQUESTS)


def _predict(plan: EnginePlan, lengths: Lengths, most: int, fitted: Fitted | None) -> Prediction:
    """Predict the speed of every batch size up to the largest."""
    return predict_plan(plan, serving_cost(plan, fitted), range(1, most + 1), lengths)


def serve_command(found: FoundCards, model: str, flags: Sequence[str] = ()) -> str:
    """Return the command that starts the chosen engine.

    Args:
        found: cards, limit of requests and mode.
        model: name or folder.
        flags: all other flags of the engine.
    """
    choice, setting = found.choice, mode_setting(is_lazy=found.plan.bridge.is_lazy)
    words = [setting, "vllm", "serve", model, *flags]
    words += ["--tensor-parallel-size", str(choice.num_cards)]
    words += ["--max-num-seqs", str(choice.max_num_seqs)]
    return shlex.join(words)


def found_object(found: FoundCards, command: str) -> dict[str, Any]:
    """Return the result of a search as an object for JSON."""
    choice = found.choice
    return {
        "is_met": not choice.misses,
        "num_cards": choice.num_cards,
        "max_num_seqs": choice.max_num_seqs,
        "misses": [vars(miss) for miss in choice.misses],
        "does_not_fit": {str(num_cards): reason for num_cards, reason in found.unfit.items()},
        "speed": as_objects([choice.prediction])[0],
        "command": command,
    }


def found_lines(found: FoundCards) -> list[str]:
    """Return the result of a search, without its command, as lines of text."""
    choice = found.choice
    setting = f"{_cards(choice.num_cards)} with --max-num-seqs {choice.max_num_seqs}"
    lines = [f"{_cards(num_cards)}: {reason}" for num_cards, reason in found.unfit.items()]
    if choice.misses:
        misses = "; ".join(map(str, choice.misses))
        lines.append(f"No setting meets the goals. The nearest is {setting}: {misses}")
    else:
        lines.append(f"The goals are met by {setting}")
    return [*lines, *as_lines([choice.prediction])]


def _cards(num_cards: int) -> str:
    return "1 card" if num_cards == 1 else f"{num_cards} cards"
