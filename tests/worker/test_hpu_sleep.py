"""Test sleep mode on the simulated card: memory is freed, and nothing is compiled again."""

from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, simulated_hpu
from vllm import LLM, SamplingParams
from vllm.bucketing import MemoryClass

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ON_THE_CARD = (
    MemoryClass.WEIGHTS,
    MemoryClass.KV_CACHE,
    MemoryClass.PREFILL_GRAPHS,
    MemoryClass.DECODE_GRAPHS,
)


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(["import os", "def f("], PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def change_weights(model) -> None:
    model.model.norm.weight.data.neg_()


def test_a_card_gives_its_memory_back_and_wakes_up_without_compiling():
    with simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS) as bridge:
        llm = LLM(enable_sleep_mode=True, **SMALL_ENGINE)
        memory = bridge.card.memory
        (ledger,) = llm.collective_rpc(lambda worker: worker.ledger)
        booked = {cls: ledger.booked(cls) for cls in ON_THE_CARD}
        expected, awake = generate(llm), memory.in_use_bytes
        before = bridge.counters()
        for level in (1, 2):
            llm.sleep(level)
            assert memory.in_use_bytes - memory.workspace_bytes < awake / 1000
            assert [ledger.booked(cls) for cls in ON_THE_CARD] == [0, 0, 0, 0]
            llm.wake_up(["weights"])
            assert memory.in_use_bytes < awake - booked[MemoryClass.KV_CACHE] / 2
            llm.wake_up(["kv_cache"])
            assert memory.in_use_bytes == awake
            assert {cls: ledger.booked(cls) for cls in ON_THE_CARD} == booked
            assert generate(llm) == expected
        after = bridge.counters()
        assert after.compilations == before.compilations
        (num_graphs,) = llm.collective_rpc(
            lambda worker: len(worker.runner.launches.execution.shapes)
        )
        assert num_graphs > 0
        assert after.graph_captures - before.graph_captures == 2 * num_graphs

        llm.apply_model(change_weights)
        llm.reset_prefix_cache()
        changed = generate(llm)
        assert changed != expected
        llm.sleep(1)
        llm.wake_up()
        assert generate(llm) == changed
        llm.sleep(1)
        llm.sleep(2)
        llm.wake_up()
        assert generate(llm) == expected
        llm.llm_engine.shutdown()
