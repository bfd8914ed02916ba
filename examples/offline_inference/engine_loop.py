"""Drive the engine by hand: add requests at any time, step, cancel."""

from vllm import EngineArgs, LLMEngine, SamplingParams


def main() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs())
    params = SamplingParams(temperature=0, max_tokens=12)
    engine.add_request("first", "import", params)
    engine.add_request("cancelled", "class", SamplingParams(max_tokens=1000))

    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps == 3:
            engine.add_request("late", "def", params)
            engine.abort_request("cancelled")
        for output in engine.step():
            if output.finished:
                print(f"step {steps}: {output.request_id}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
