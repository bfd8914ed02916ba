"""Run `python -m vllm.entrypoints.api_server`: POST /generate, for old clients of vLLM.

The body has `prompt`, `stream` and the fields of `SamplingParams`. The answer is `{"text": [prompt
+ output, ...]}`. A stream has one such object per line; if it fails midway, it ends with an error
body. The server also has all routes of `vllm.entrypoints.openai.api_server`, which new clients
should use.
"""

import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import JSONResponse, Response

from vllm.engine.async_llm_engine import AsyncLLM
from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.errors import describe_error, refuse_failed
from vllm.entrypoints.http.request_limits import check_limits, check_num_values
from vllm.entrypoints.http.sse import EventStream, run_until_disconnect
from vllm.entrypoints.http.validation_text import NO_BODY
from vllm.entrypoints.openai.cli_args import make_arg_parser, read_args
from vllm.entrypoints.openai.protocol.sampling import SamplingFields
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import RequestError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import FlexibleArgumentParser
from vllm.utils.process.program_end import end_program

router = APIRouter(include_in_schema=False)

_NOT_FROM_CLIENTS = {
    *("logits_processors", "output_kind", "guided_decoding", "extra_args"),
    "kept_special_token_ids",
}
_FIELDS = frozenset(SamplingParams.__struct_fields__) - _NOT_FROM_CLIENTS


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Continue one prompt."""
    context = get_context(request)
    data = await request.body()
    off_loop.mark_request(len(data))
    prompt, is_streamed, params = await off_loop.run(partial(read_body, data, context.args))
    outputs = context.engine.generate(prompt, params, f"generate-{uuid.uuid4().hex}")
    if is_streamed:
        headers = {"content-type": "application/x-ndjson"}
        return EventStream(_lines(prompt, outputs), headers=headers)
    return JSONResponse(_body(prompt, await run_until_disconnect(request, _last(outputs))))


def read_body(data: bytes, args: ServerArgs) -> tuple[str, bool, SamplingParams]:
    """Return the prompt, whether the answer is streamed, and the sampling parameters.

    Raises:
        RequestError: the body does not have the form that the module describes.
    """
    if not data:
        raise RequestError(NO_BODY)
    check_num_values(data, args)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    prompt, is_streamed = body.pop("prompt", None), body.pop("stream", False)
    if not isinstance(prompt, str):
        raise RequestError("prompt must be a string", param="prompt")
    if not isinstance(is_streamed, bool):
        raise RequestError("stream must be true or false", param="stream")
    for name in body:
        if name not in _FIELDS:
            raise RequestError(f"unknown field {name[:100]!r}", param=name[:100])
    check_limits(SamplingFields, body, args)
    kind = RequestOutputKind.CUMULATIVE if is_streamed else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams.from_optional(**body, output_kind=kind)
    except TypeError as error:
        raise RequestError(str(error)) from None
    return prompt, is_streamed, params


async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    async with aclosing(outputs):
        async for output in outputs:
            if output.finished:
                _refuse_failed(output)
                return output
    raise RuntimeError("the engine ended a request without a final output")


async def _lines(
    prompt: str, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    async with aclosing(outputs):
        try:
            async for output in outputs:
                _refuse_failed(output)
                yield msgspec.json.encode(_body(prompt, output)) + b"\n"
                has_begun = True
        except Exception as error:
            if not has_begun:
                raise  # nothing has been sent yet, so this is a normal error response
            yield msgspec.json.encode(describe_error(error).body()) + b"\n"


def _refuse_failed(output: RequestOutput) -> None:
    for sample in output.outputs:
        refuse_failed(sample)


def _body(prompt: str, output: RequestOutput) -> Mapping[str, Any]:
    return {"text": [prompt + sample.text for sample in output.outputs]}


def load_server(engine: AsyncLLM, args: ServerArgs) -> tuple[ServerContext, FastAPI]:
    """Return the application of the OpenAI server, with /generate added.

    Raises:
        The errors of `load_server` of the OpenAI server.
    """
    from vllm.entrypoints.server import app as openai_app

    context, app = openai_app.load_server(engine, args)
    app.include_router(router)
    return context, app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server as a program. Returns the exit code."""
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.shared.program import run_command

    parser = make_arg_parser(FlexibleArgumentParser(prog="api_server"))
    return run_command(
        lambda: run_server(*read_args(parser.parse_args(argv)), load_server), parser.flag_names
    )


if __name__ == "__main__":
    end_program(main())
