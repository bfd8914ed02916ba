"""Run a beam search for a request of the server."""

import asyncio
import itertools
from contextlib import aclosing

from vllm.entrypoints.http.errors import refuse_failed
from vllm.entrypoints.shared.beam_search import check_beam_width, search_beams_async
from vllm.entrypoints.shared.context import ServerContext
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import BeamSearchSequence, RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.transformers_utils.special_tokens import SpecialTokens
from vllm.utils.futures import end_tasks


async def search(
    context: ServerContext,
    prompt: TokensPrompt,
    params: BeamSearchParams,
    request_id: str,
    adapter: LoRARequest | None = None,
    priority: int = 0,
) -> list[BeamSearchSequence]:
    """Return the most likely continuations of a prompt, best first. Their `tokens` and `text` do
    not contain the prompt.

    Every beam is one engine request per token, so the engine's `max_logprobs` must be at least
    twice the beam width. Cancelling the search aborts these requests.

    Raises:
        RequestError: the prompt or the parameters are not valid.
        GenerationError: a beam failed in the engine.
    """
    check_beam_width(
        params.beam_width, context.config.model.max_logprobs, name="n", limit="--max-logprobs"
    )
    engine = context.engine
    counter = itertools.count()

    async def run_one(beam: TokensPrompt, step: SamplingParams) -> RequestOutput:
        outputs = engine.generate(
            beam,
            step,
            f"{request_id}-beam-{next(counter)}",
            lora_request=adapter,
            priority=priority,
        )
        async with aclosing(outputs):
            last = [output async for output in outputs][-1]
        refuse_failed(last.outputs[0])
        return last

    async def run(
        beams: list[TokensPrompt], step: SamplingParams, _: list[int]
    ) -> list[RequestOutput]:
        step.output_kind = RequestOutputKind.FINAL_ONLY
        tasks = [asyncio.ensure_future(run_one(beam, step)) for beam in beams]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await end_tasks(tasks)

    eos, others = engine.input_processor.prompts.end_tokens
    end_tokens = others if eos is None else others | {eos}
    (found,) = await search_beams_async(
        [prompt],
        params,
        run,
        end_tokens=frozenset() if params.ignore_eos else end_tokens,
        max_model_len=context.config.scheduler.max_model_len,
        tokenizer=None,
    )
    tokenizer = await engine.get_tokenizer()
    special = SpecialTokens.of(tokenizer).ids
    for beam in found.sequences:
        del beam.tokens[: len(prompt["prompt_token_ids"])]
        beam.text = str(tokenizer.decode([t for t in beam.tokens if t not in special]))
    return found.sequences
