"""Test offline generation over a fake core: order, bad input, early exits, chat and beam search."""

import dataclasses
import io
import itertools
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tqdm import tqdm

from tests.engine.fakes import make_config
from tests.engine.tokenizers_for_tests import byte_level, sentencepiece
from tests.fake_core import FakeEngineCore
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.llm import LLM
from vllm.errors import CapacityError, EngineDeadError, PromptTooLongError, RequestError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
)

BOS = 0


def make_llm(core=None, defaults=None, **config):
    engine = LLMEngine(
        make_config(**config), core or FakeEngineCore(), byte_level(), defaults or {}
    )
    return LLM.from_engine(engine)


def last_prompt_token(request):
    return [request.prompt_token_ids[-1]]


def encode(text):
    return byte_level()(text, add_special_tokens=False)["input_ids"]


# ---- generate -----------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts_with_increasing_ids():
    llm = make_llm(FakeEngineCore(last_prompt_token))
    params = [SamplingParams(max_tokens=count) for count in (5, 1, 3)]
    prompts = [[10], "import os", {"prompt_token_ids": [30]}]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 1, 3]
    assert [output.outputs[0].token_ids[0] for output in outputs] == [10, encode(" os")[-1], 30]
    assert [output.prompt for output in outputs] == [None, "import os", None]
    again = llm.generate([40], use_tqdm=False)
    assert [int(output.request_id) for output in outputs + again] == [0, 1, 2, 3]


@pytest.mark.parametrize("prompt", ["a b", [5, 6], {"prompt": "a"}, {"prompt_token_ids": [5]}])
def test_a_single_prompt_gives_a_list_of_one(prompt):
    assert len(make_llm().generate(prompt, use_tqdm=False)) == 1


def test_no_prompts_give_no_outputs():
    assert make_llm().generate([], use_tqdm=False) == []


def test_samples_of_one_prompt_come_together_ordered_by_index():
    core = FakeEngineCore(lambda request: [10 + request.seed % 5])
    (output,) = make_llm(core).generate("a", SamplingParams(n=3, seed=0, max_tokens=2))
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert [sample.token_ids for sample in output.outputs] == [[10, 10], [11, 11], [12, 12]]


def test_parameters_of_the_caller_keep_their_output_kind():
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=3)
    (output,) = make_llm().generate("a", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert params.output_kind is RequestOutputKind.DELTA


def test_without_parameters_the_model_recommends_them():
    core = FakeEngineCore()
    llm = make_llm(core, {"temperature": 0.25, "max_tokens": 3, "eos_token_ids": [1]})
    assert llm.get_default_sampling_params().temperature == 0.25
    (output,) = llm.generate("a", use_tqdm=False)
    assert core.added["0"].sampling_params.temperature == 0.25
    assert len(output.outputs[0].token_ids) == 3


def test_a_bad_prompt_is_named_and_costs_the_others_nothing():
    core = FakeEngineCore()
    llm = make_llm(core)
    with pytest.raises(RequestError, match="prompt 1 of 3: the prompt has no tokens"):
        llm.generate(["a", [], "b"], use_tqdm=False)
    assert not core.added
    assert len(llm.generate(["a", "b"], use_tqdm=False)) == 2


def test_a_prompt_that_is_too_long_is_named_and_keeps_its_type():
    with pytest.raises(PromptTooLongError, match="prompt 1 of 2: prompt has 64 tokens"):
        make_llm().generate([[5], [5] * 64], use_tqdm=False)


def test_a_prompt_that_never_fits_takes_those_before_it_back():
    core = FakeEngineCore(capacity=20)
    llm = make_llm(core)
    with pytest.raises(CapacityError, match="prompt 1 of 2: needs"):
        llm.generate([[5], [5] * 30], use_tqdm=False)
    assert core.aborted == ["0"]
    assert len(llm.generate([[5]], use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"sampling_params": [SamplingParams()] * 3},
            "sampling_params must have one entry for each of the 2",
        ),
        ({"priority": [1]}, "priority must have one entry for each of the 2"),
        ({"sampling_params": {"n": 1}}, "must be SamplingParams, got dict"),
        ({"sampling_params": [1, 2]}, "must be SamplingParams, got int"),
        ({"lora_request": LoRARequest("sql", 1, "/sql")}, "lora_request: the engine was started"),
        (
            {"lora_request": [None, LoRARequest("sql", 1, "/sql")]},
            "without LoRA, and the adapter 'sql'",
        ),
        ({"prompt_adapter_request": 1}, "prompt_adapter_request: prompt adapters are not"),
        ({"prompts": 5}, "prompts must be a prompt or a list of prompts, got int"),
        ({"prompts": None}, "prompts is missing"),
    ],
)
def test_bad_arguments_are_refused_with_what_is_wrong(arguments, message):
    core = FakeEngineCore()
    with pytest.raises(ValueError, match=message):
        make_llm(core).generate(**{"prompts": ["a", "b"], "use_tqdm": False, **arguments})
    assert not core.added


@pytest.mark.parametrize(
    ("prompts", "token_ids"),
    [
        (np.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (({"prompt_token_ids": each} for each in (np.array([5]), [6])), [[5], [6]]),
        ([{"prompt_token_ids": torch.tensor([5, 6])}], [[5, 6]]),
    ],
    ids=["array", "matrix", "generator", "tensor"],
)
def test_prompts_may_be_arrays_and_generators(prompts, token_ids):
    outputs = make_llm().generate(prompts, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == token_ids


def test_several_threads_may_use_one_object(monkeypatch):
    """A step of one thread must not begin while a run of another thread has not ended."""
    llm, owners = make_llm(), []
    step = llm.llm_engine.step

    def recorded_step():
        owners.append(threading.get_ident())
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", recorded_step)
    texts = [chr(ord("a") + i) for i in range(16)]
    params = SamplingParams(max_tokens=20)
    start = threading.Barrier(len(texts))

    def run(text):
        start.wait()
        return llm.generate([text] * 3, params, use_tqdm=False)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(texts)) as pool:
            found = list(pool.map(run, texts))
    finally:
        sys.setswitchinterval(interval)
    assert [[output.prompt for output in each] for each in found] == [[t] * 3 for t in texts]
    assert len(list(itertools.groupby(owners))) == len(texts)


def test_each_prompt_gets_its_priority():
    core = FakeEngineCore()
    make_llm(core).generate(["a", "b"], use_tqdm=False, priority=[2, -1])
    assert [request.priority for request in core.added.values()] == [2, -1]


@pytest.mark.parametrize(
    ("prompts", "token_ids", "texts"),
    [(None, [5, 6], [None]), (None, [[5, 6], [7]], [None, None]), (["a"], [[5, 6]], ["a"])],
)
def test_the_old_argument_for_token_ids_works_and_warns(prompts, token_ids, texts):
    with pytest.warns(DeprecationWarning, match="'prompt_token_ids'"):
        outputs = make_llm().generate(prompts, prompt_token_ids=token_ids, use_tqdm=False)
    assert [output.prompt for output in outputs] == texts
    assert outputs[0].prompt_token_ids == [5, 6]


OPTIONS = {"guided_regex": "[0-9]{3}", "guided_json": None}


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        dataclasses.make_dataclass("Options", OPTIONS)(**OPTIONS),
        GuidedDecodingParams(regex="[0-9]{3}"),
    ],
)
@pytest.mark.parametrize("params", [None, SamplingParams(), [SamplingParams(), SamplingParams()]])
def test_the_old_argument_for_the_form_of_the_output_works_and_warns(options, params):
    core = FakeEngineCore()
    with pytest.warns(DeprecationWarning, match="'guided_options_request'") as warned:
        make_llm(core).generate(["a", "b"], params, guided_options_request=options, use_tqdm=False)
    assert warned[0].filename == __file__
    forms = [request.sampling_params.guided_decoding for request in core.added.values()]
    assert [form.regex for form in forms] == ["[0-9]{3}"] * 2
    assert all(request.grammar is not None for request in core.added.values())
    given = params if isinstance(params, list) else [params]
    assert not any(each is not None and each.guided_decoding for each in given)


@pytest.mark.parametrize(
    ("options", "params", "message"),
    [
        ({"guided_jsn": {}}, None, "has no option 'guided_jsn'; accepted: guided_json, "),
        ({"guided_json": {}, "guided_regex": "a"}, None, "one kind of constraint"),
        ("[0-9]", None, "guided_options_request must be a dict, got str"),
        (
            OPTIONS,
            SamplingParams(guided_decoding=GuidedDecodingParams(regex="a")),
            "cannot be used together",
        ),
    ],
)
def test_wrong_options_of_the_old_argument_are_refused(options, params, message):
    with (
        pytest.warns(DeprecationWarning, match="'guided_options_request'"),
        pytest.raises(RequestError, match=message),
    ):
        make_llm().generate("a", params, guided_options_request=options, use_tqdm=False)


def test_deprecated_arguments_are_shown_where_they_are_asked_for_though_python_hides_them():
    llm = make_llm()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("ignore")
        llm.generate(prompt_token_ids=[5], use_tqdm=False)
        assert not shown
        with LLM.deprecate_legacy_api():
            llm.generate(prompt_token_ids=[5], use_tqdm=False)
        assert len(shown) == 1 and shown[0].category is DeprecationWarning
        llm.generate(prompt_token_ids=[5], use_tqdm=False)
        assert len(shown) == 1


def test_as_many_texts_as_token_lists_are_needed():
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match="one entry for each of the 2 prompts, got 1"),
    ):
        make_llm().generate(["a", "b"], prompt_token_ids=[[5]], use_tqdm=False)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("boom")])
def test_leaving_early_drops_the_requests_and_the_object_can_be_used_again(failure):
    core = FakeEngineCore()
    llm = make_llm(core)
    core.fail = failure
    with pytest.raises(type(failure)):
        llm.generate(["a", "b"], use_tqdm=False)
    assert core.aborted == ["0", "1"]
    assert not llm.llm_engine.has_unfinished_requests()
    assert [output.request_id for output in llm.generate("c", use_tqdm=False)] == ["2"]


def test_a_request_that_fails_is_returned_with_the_reason_among_the_others():
    core = FakeEngineCore()
    core.errors["1"] = "no probabilities"
    outputs = make_llm(core).generate(["a", "b", "c"], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].stop_reason == "no probabilities"


def test_an_engine_that_was_shut_down_says_so():
    llm = make_llm()
    llm.llm_engine.shutdown()
    with pytest.raises(EngineDeadError):
        llm.generate("a", use_tqdm=False)


def test_the_progress_bar_shows_requests_and_speeds():
    shown = io.StringIO()

    def make_bar(**options):
        return tqdm(file=shown, mininterval=0, **options)

    make_llm().generate(["a", "b"], use_tqdm=make_bar)
    last = shown.getvalue().split("\r")[-1]
    assert "Processed prompts: 100%" in last
    assert "2/2" in last
    assert "est. speed input: " in last
    assert "toks/s, output: " in last
    assert "output: 0.00" not in last


def test_a_new_tokenizer_reads_prompts_and_writes_texts():
    llm = make_llm(FakeEngineCore(last_prompt_token))
    llm.set_tokenizer(sentencepiece())
    assert llm.get_tokenizer() is sentencepiece()
    (output,) = llm.generate("the mat", SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == sentencepiece()("the mat")["input_ids"]
    assert output.outputs[0].text == sentencepiece().decode(output.outputs[0].token_ids)


# ---- chat ---------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hello"}]


def test_a_conversation_is_rendered_with_one_bos_and_the_answers_beginning():
    (output,) = make_llm().chat(HELLO, use_tqdm=False)
    assert output.prompt == "<s><|user|>hello<|end|><|assistant|>"
    assert output.prompt_token_ids.count(BOS) == 1
    assert byte_level().decode(output.prompt_token_ids) == output.prompt


def test_several_conversations_give_several_answers_in_order():
    bye = [{"role": "user", "content": "bye"}]
    outputs = make_llm().chat([HELLO, bye], SamplingParams(max_tokens=1), use_tqdm=False)
    assert ["hello" in output.prompt for output in outputs] == [True, False]


def test_prompts_of_conversations_can_be_made_without_running_them():
    core = FakeEngineCore()
    llm = make_llm(core)
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    prompts = llm.preprocess_chat(conversations)
    assert not core.added
    llm.chat(conversations, use_tqdm=False)
    ran = [request.prompt_token_ids for request in core.added.values()]
    assert [prompt["prompt_token_ids"] for prompt in prompts] == ran


def test_the_last_message_can_be_continued():
    messages = [*HELLO, {"role": "assistant", "content": "Hi, I"}]
    (output,) = make_llm().chat(
        messages, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt == "<s><|user|>hello<|end|><|assistant|>Hi, I"


def test_a_template_of_the_caller_gets_his_variables_and_tools():
    (output,) = make_llm().chat(
        HELLO,
        use_tqdm=False,
        chat_template="{{ mood }} {{ tools[0].function.name }} {{ messages[0].content }}",
        chat_template_kwargs={"mood": "glad"},
        tools=[{"type": "function", "function": {"name": "look_up"}}],
    )
    assert output.prompt == "glad look_up hello"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "- - -"),
        ({"enable_thinking": False}, "False False 0"),
        ({"thinking": True}, "True True -"),
        ({"reasoning_effort": "none"}, "False False 0"),
        ({"thinking": True, "reasoning_effort": "none"}, "True True -"),
    ],
)
def test_a_switch_of_thinking_sets_the_switches_of_all_names(given, expected):
    names = ("enable_thinking", "thinking", "thinking_budget")
    template = " ".join(f"{{{{ {name} if {name} is defined else '-' }}}}" for name in names)
    [prompt] = make_llm().preprocess_chat(HELLO, chat_template=template, chat_template_kwargs=given)
    assert prompt["prompt"] == expected


def test_a_malformed_conversation_is_refused_before_anything_runs():
    core = FakeEngineCore()
    with pytest.raises(ValueError, match="needs a role"):
        make_llm(core).chat([HELLO, [{"content": "no role"}]], use_tqdm=False)
    assert not core.added


# ---- beam search --------------------------------------------------------------------------


def test_beams_come_best_first_with_prompt_output_and_text():
    llm = make_llm()
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    first, second = llm.beam_search(["import", {"prompt_token_ids": [5]}], params)
    assert [len(beam.tokens) - 1 for beam in second.sequences] == [3, 3]
    entries = [e for position in second.sequences[0].logprobs for e in position.values()]
    assert entries and all(isinstance(entry.decoded_token, str) for entry in entries)
    best, other = first.sequences
    assert best.tokens == [BOS, *encode("import"), 10, 10, 10]
    assert best.cum_logprob == pytest.approx(-1.5)
    assert best.cum_logprob > other.cum_logprob
    assert best.text == byte_level().decode(best.tokens)


def test_beam_search_needs_its_own_parameters():
    with pytest.raises(RequestError, match="params must be BeamSearchParams, got SamplingParams"):
        make_llm().beam_search(["a"], SamplingParams())


def test_a_tool_that_is_a_function_of_python_is_refused():
    with pytest.raises(RequestError, match=r"tools\[0\] must be the description of a tool"):
        make_llm().chat([{"role": "user", "content": "a"}], tools=[print], use_tqdm=False)


def test_a_bad_prompt_ends_beam_search_before_anything_runs():
    core = FakeEngineCore()
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        make_llm(core).beam_search(["a", []], BeamSearchParams(beam_width=2, max_tokens=3))
    assert not core.added


def test_a_beam_too_wide_for_the_engine_names_the_limit():
    with pytest.raises(ValueError, match="max_logprobs"):
        make_llm(max_logprobs=5).beam_search(["a"], BeamSearchParams(beam_width=3, max_tokens=3))
