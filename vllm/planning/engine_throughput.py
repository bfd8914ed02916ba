"""Predicts the throughput of a planned engine, for a grid of batch sizes and prompt lengths."""

from collections.abc import Sequence

from vllm.cost_model.fitted import Fitted
from vllm.cost_model.throughput import ServingCost
from vllm.errors import ConfigError
from vllm.planning.engine_plan import EnginePlan
from vllm.planning.throughput.prediction import Lengths, Prediction, predict
from vllm.worker.hpu.model_figures import model_figures

BATCHES = (1, 4, 16, 64, 256)
PROMPTS = (128, 512, 2048, 8192, 32768, 131072)
DEFAULT_OUTPUT = 128


def is_speed_known(plan: EnginePlan) -> bool:
    """Return whether the cost model supports the engine: it must generate text, without pipeline
    stages.
    """
    config = plan.config
    return config.parallel.pipeline_parallel_size == 1 and config.model.pooler is None


def serving_cost(plan: EnginePlan, fitted: Fitted | None = None) -> ServingCost:
    """Return the cost model for the steps of a planned engine.

    Raises:
        ConfigError: it has pipeline stages or pools prompts, so its speed cannot be predicted.
    """
    if plan.config.model.pooler is not None:
        raise ConfigError(
            "the speed of models that pool prompts is not predicted. Plan them without --traffic "
            "and goals"
        )
    if not is_speed_known(plan):
        raise ConfigError(
            f"the speed of pipeline stages is not predicted: pipeline_parallel_size must be 1, got "
            f"{plan.config.parallel.pipeline_parallel_size}"
        )
    return ServingCost(
        plan.spec.name.lower(),
        plan.config.parallel.world_size,
        model_figures(plan.worker.model, plan.config),
        block_size=plan.config.cache.block_size,
        fitted=fitted,
    )


def max_requests(plan: EnginePlan, lengths: Lengths) -> int:
    """Return how many requests of these lengths the KV cache holds at a time."""
    blocks = -(-lengths.total // plan.config.cache.block_size)
    num_usable = (plan.report.num_blocks - 1) // len(plan.report.windows)
    return num_usable // blocks


def predict_plan(
    plan: EnginePlan, cost: ServingCost, batches: Sequence[int], lengths: Lengths
) -> Prediction:
    """Predict the speed of a planned engine.

    Args:
        plan: plan of the engine.
        cost: cost of its steps.
        batches: numbers of requests that run at a time.
        lengths: length of each request.
    """
    return predict(
        cost,
        batches,
        lengths,
        block_size=plan.config.cache.block_size,
        longest_prefill=plan.config.scheduler.max_num_batched_tokens,
    )


def throughput_grid(
    plan: EnginePlan, cost: ServingCost, output_len: int = DEFAULT_OUTPUT
) -> list[Prediction]:
    """Predict the speed for prompts that fit the model, and batches that fit the KV cache."""
    scheduler, predictions = plan.config.scheduler, []
    longest = scheduler.max_model_len - output_len
    for prompt in [size for size in PROMPTS if size <= longest] or [max(longest, 1)]:
        lengths = Lengths(prompt, output_len)
        most = min(scheduler.max_num_seqs, max_requests(plan, lengths))
        batches = sorted({batch for batch in BATCHES if batch < most} | {most})
        if most > 0:
            predictions.append(predict_plan(plan, cost, batches, lengths))
    return predictions
