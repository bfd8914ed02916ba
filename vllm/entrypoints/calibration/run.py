"""Run the steps of a calibration (`steps`): all in order, or one again."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.families import family_of
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.calibration.dataset import (
    read_samples,
    read_texts,
    split_samples,
    write_samples,
)
from vllm.entrypoints.calibration.folder import CalibrationFolder
from vllm.entrypoints.calibration.perplexity import perplexity
from vllm.entrypoints.calibration.steps import STEPS, steps_before
from vllm.errors import ConfigError
from vllm.inputs import TokensPrompt

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """Settings that a user gives."""

    dataset: str | None
    """File with texts; None where no step reads it."""
    num_samples: int
    sample_tokens: int
    output_tokens: int
    """Tokens that are generated after each sample, and measured too."""
    batch_size: int
    scale_method: str
    blocked: tuple[str, ...]
    """Names of modules that are not quantized; none: the ones of the model's family."""
    unify_ranks: int | None = None
    unify_experts: bool = False
    """Whether each rank has measured other experts."""
    expand_ranks: int | None = None
    warms_up: bool | None = None
    """Whether the engines warm up all buckets. None: only if VLLM_SKIP_WARMUP is set to 0. Each of
    them runs a few shapes once, which costs less than a warm-up."""

    @property
    def other_ranks(self) -> int | None:
        """Number of ranks for which scales are created, if it differs from the number of ranks that
        ran.
        """
        return self.unify_ranks or self.expand_ranks


class Calibration:
    """Runs the steps of a calibration for one model.

    Args:
        engine: arguments of the engine; their quantization is changed here.
        folder: folder of the files.
        settings: settings of the user.
        say: called with each line of output for the user.
    """

    def __init__(
        self,
        engine: EngineArgs,
        folder: CalibrationFolder,
        settings: CalibrationSettings,
        say: Callable[[str], None],
    ) -> None:
        if engine.quantization is not None or engine.quant_config is not None:
            raise ConfigError(
                "--quantization and --quant-config: leave them out, the calibration sets them"
            )
        self.engine = engine
        self.folder = folder
        self.settings = settings
        self.say = say
        self.world_size: int = engine.tensor_parallel_size * engine.pipeline_parallel_size
        if engine.pipeline_parallel_size > 1 and settings.other_ranks is not None:
            raise ConfigError(
                "--unify-ranks and --expand-ranks need --pipeline-parallel-size 1 (got "
                f"{engine.pipeline_parallel_size}), because each stage measures different layers. "
                "Measure with tensor parallelism only; such files work with any number of stages"
            )
        self._inputs = {
            "model": engine.model,
            "dataset": settings.dataset,
            "num_samples": settings.num_samples,
            "sample_tokens": settings.sample_tokens,
            "output_tokens": settings.output_tokens,
            "blocked": list(settings.blocked),
            "ranks": self.world_size,
        }

    def run(self, step: str | None = None) -> dict[str, Any]:
        """Run the steps that are not done yet.

        Args:
            step: run only this step, even if it is done; None: all steps that are not done.

        Returns:
            The state of the calibration.

        Raises:
            ConfigError: a step cannot be done.
        """
        state = self.folder.read_state()
        inputs = self._inputs
        if step is not None and state and self.settings.dataset is None:
            inputs = {**inputs, "dataset": state.get("inputs", {}).get("dataset")}
        if state.get("inputs") != inputs:
            state = {"inputs": inputs, "done": []}
        if state.get("scale_method") != self.settings.scale_method:
            state["done"] = [s for s in state["done"] if s in steps_before("quantize")]
        state["scale_method"] = self.settings.scale_method
        # Written again, because the folder may have been moved since an earlier run.
        self._write_configs()
        if step is not None:
            self._do(step, f"step 1 of 1, {step}", state)
            return state
        for number, name in enumerate(STEPS, start=1):
            if not self._is_asked_for(name):
                continue
            line = f"step {number} of {len(STEPS)}, {name}"
            if name in state["done"]:
                self.say(f"{line}: done before")
            else:
                self._do(name, line, state)
        return state

    def _is_asked_for(self, name: str) -> bool:
        setting = STEPS[name].only_with
        return setting is None or getattr(self.settings, setting) is not None

    def _do(self, name: str, line: str, state: dict[str, Any]) -> None:
        if not self._is_asked_for(name):
            raise ConfigError(
                f"--step {name} needs {STEPS[name].flag}, the number of devices to make scales for"
            )
        self.say(line)
        # Steps that depend on this one must run again.
        state["done"] = [s for s in state["done"] if s in steps_before(name)]
        getattr(self, f"_{name}")(state)
        state["done"].append(name)
        self.folder.write_state(state)

    # ---- steps ----------------------------------------------------------------------------

    def _prepare(self, state: dict[str, Any]) -> None:
        from vllm.transformers_utils.tokenizer import get_tokenizer

        if self.settings.dataset is None:
            raise ConfigError("the step prepare needs --dataset, a file with texts")
        texts = read_texts(self.settings.dataset)
        model = self.engine.create_engine_config().model
        tokenizer = get_tokenizer(
            model.tokenizer or model.resolved_path, trust_remote_code=model.trust_remote_code
        )
        measured, held_out = split_samples(
            texts,
            partial(tokenizer.encode, verbose=False),
            self.settings.sample_tokens,
            self.settings.num_samples,
        )
        write_samples(self.folder.samples, measured)
        write_samples(self.folder.held_out, held_out)
        state["num_measured"] = 0
        self.say(f"{len(measured)} samples to measure, {len(held_out)} for the perplexity")

    def _measure(self, state: dict[str, Any]) -> None:
        from tqdm import tqdm

        from vllm import SamplingParams

        samples = read_samples(self.folder.samples)
        num_done = int(state.get("num_measured", 0)) % len(samples)
        if not num_done:
            self.folder.delete_measurements()
        params = SamplingParams(
            max_tokens=self.settings.output_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        size = self.settings.batch_size
        with (
            self._engine(quant_config=str(self.folder.measure_config)) as llm,
            tqdm(total=len(samples), initial=num_done, desc="Measured samples") as bar,
        ):
            for start in range(num_done, len(samples), size):
                batch = samples[start : start + size]
                prompts = [TokensPrompt(prompt_token_ids=sample) for sample in batch]
                llm.generate(prompts, params, use_tqdm=False)
                # Save after each batch, so that a stopped run can continue here.
                llm.collective_rpc("save_measurements", args=(True,))
                state["num_measured"] = start + len(batch)
                self.folder.write_state(state)
                bar.update(len(batch))

    def _postprocess(self, state: dict[str, Any]) -> None:
        self.folder.postprocess(self.world_size)

    def _unify(self, state: dict[str, Any]) -> None:
        assert self.settings.unify_ranks is not None, "the step is left out"
        shares_experts = self.settings.unify_experts or bool(self.engine.enable_expert_parallel)
        self.folder.unify(self.world_size, self.settings.unify_ranks, shares_experts=shares_experts)

    def _expand(self, state: dict[str, Any]) -> None:
        assert self.settings.expand_ranks is not None, "the step is left out"
        self.folder.expand(self.world_size, self.settings.expand_ranks)

    def _quantize(self, state: dict[str, Any]) -> None:
        self.folder.delete_scales()
        with self._engine(**self._quantized()):
            self.say(f"scales are in {self.folder.prefix}*")

    def _evaluate(self, state: dict[str, Any]) -> None:
        samples = read_samples(self.folder.held_out)
        with self._engine() as llm:
            before = perplexity(llm, samples, use_tqdm=True)
        with self._engine(**self._quantized()) as llm:
            after = perplexity(llm, samples, use_tqdm=True)
        state["perplexity"] = {"before": before, "after": after}

    def _write_configs(self) -> None:
        """Write the configs. They exclude the modules of `blocked`, by default the modules that
        the model family names.
        """
        arch = self.engine.create_engine_config().model.resolved_arch
        scales = family_of(arch.model_type).fp8_scales
        blocked = list(self.settings.blocked or scales.blocked)
        self.folder.write_configs(self.settings.scale_method, blocked, scales.scale_format)

    # ---- engines --------------------------------------------------------------------------

    def _quantized(self) -> dict[str, Any]:
        return {
            "quant_config": str(self.folder.quant_config),
            "kv_cache_dtype": "fp8_inc",
            "tensor_parallel_size": self.settings.other_ranks or self.engine.tensor_parallel_size,
        }

    @contextmanager
    def _engine(self, **changes: Any) -> "Iterator[LLM]":
        from vllm import LLM
        from vllm.engine.llm_engine import LLMEngine

        arguments = {**vars(self.engine), "max_model_len": self._max_model_len(), **changes}
        config = EngineArgs(**arguments).create_engine_config()
        skips = not self._warms_up()
        full = config.hpu.full_warmup and not skips
        config = replace(config, hpu=replace(config.hpu, skip_warmup=skips, full_warmup=full))
        llm = LLM.from_engine(LLMEngine.from_vllm_config(config))
        try:
            yield llm
        finally:
            llm.llm_engine.shutdown()
            del llm
            gc.collect()

    def _warms_up(self) -> bool:
        if self.settings.warms_up is not None:
            return self.settings.warms_up
        return envs.is_set("VLLM_SKIP_WARMUP") and not envs.get().VLLM_SKIP_WARMUP

    def _max_model_len(self) -> int:
        return self.settings.sample_tokens + max(1, self.settings.output_tokens)
