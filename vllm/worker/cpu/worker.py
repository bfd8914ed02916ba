"""The worker of the CPU."""

import os
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.config.quantization.quant_method import quant_method
from vllm.distributed import CheckedCollectives, Collectives, Rendezvous
from vllm.distributed.rendezvous import ARENA_BUFFER_BYTES, ARENA_HEADER_BYTES
from vllm.kv_cache_spec import KVCacheLayout
from vllm.logger import init_logger
from vllm.messages import SchedulerOutput
from vllm.model_executor.layers.cross_attention import cross_attention_layers
from vllm.model_executor.loader import load_model
from vllm.model_executor.model_memory import model_storages
from vllm.model_executor.models.interface import CausalLM, LayeredModel, PoolingModel
from vllm.model_executor.quantization import Quantization
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.model_executor.speculators.interface import Speculator
from vllm.ops import set_ops
from vllm.ops.cpu.collectives import SharedMemoryCollectives
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators import CPUOps
from vllm.platforms import Platform, resolve_platform
from vllm.platforms.cpu_threads import (
    by_topology,
    count_cores,
    count_physical,
    count_threads,
    equal_shares,
    format_cores,
    usable_cores,
)
from vllm.platforms.numa import interleave, nodes_of
from vllm.utils.imports import load_class
from vllm.worker.calculated_scales import calculate_scales
from vllm.worker.cpu.block_copies import BlockCopies
from vllm.worker.cpu.draft_runner import DraftRunner
from vllm.worker.cpu.encoder_memory import encoder_bytes
from vllm.worker.cpu.int8_advice import int8_advice, is_worth_measuring, measure_rates
from vllm.worker.cpu.model_runner import CPUModelRunner
from vllm.worker.cpu.pooling_runner import make_pooling_runner
from vllm.worker.cpu.sleep import HostCache, HostWeights, check_can_sleep
from vllm.worker.cpu.speculator_runner import SpeculatorRunner
from vllm.worker.interface import MemoryReport
from vllm.worker.kv_cache import (
    bind_kv_caches,
    cache_dtype,
    count_blocks,
    count_kept_states,
    log_cache,
    num_provisional,
    states_bytes,
)
from vllm.worker.parts.encoded_media import embedding_width
from vllm.worker.parts.item_rows import ItemRows, count_item_states
from vllm.worker.parts.memory_use import MemoryUse, draft_use, items_use, weights_use
from vllm.worker.pooling_runner import PoolingRunner
from vllm.worker.runner import StepHandle
from vllm.worker.worker_base import WorkerBase

logger = init_logger(__name__)


class CPUWorker(WorkerBase):
    """A worker that runs the model on the CPU in this process, with torch's threads.

    Args:
        config: config of the engine.
        platform: reports the memory; None: this machine.
    """

    model: CausalLM | PoolingModel

    def __init__(self, config: VllmConfig, platform: Platform | None = None) -> None:
        super().__init__(config, torch.device("cpu"))
        self.platform = platform or resolve_platform("cpu")
        self._drafter: DraftRunner | SpeculatorRunner | None = None
        self._num_kept_states: int | None = None
        self._num_item_states: int | None = None
        self._item_bytes = 0
        self._encoder_bytes = 0
        self._has_own_cores = False  # several ranks share the cores of the machine
        self._ops = load_class(self.platform.ops_class)()
        set_ops(self._ops)

    def load(self, rank: int) -> None:
        """Build the model, load its weights and pack them for the kernels.

        Raises:
            ConfigError: the weights are to be quantized, but there are no kernels for that.
        """
        if self.config.model.enable_sleep_mode:
            check_can_sleep()
        self._bind(rank)
        super().load(rank)

    def _bind(self, rank: int) -> None:
        """Bind this thread, and all threads it starts from now on, to the cores of the rank."""
        device = self.config.device
        if device.bound_cores is not None:
            cores = device.bound_cores[rank]
            os.sched_setaffinity(0, cores)
            if device.counts_threads:
                torch.set_num_threads(len(cores))
        elif device.core_share is not None:
            os.sched_setaffinity(0, device.core_share)
        elif device.counts_threads and self._num_sharing_ranks > 1 and len(_nodes()) > 1:
            # Give each rank neighbouring cores of one NUMA node, so that its memory is local to
            # them.
            shares = equal_shares(by_topology(usable_cores()), self._num_sharing_ranks)
            os.sched_setaffinity(0, shares[rank % self._num_sharing_ranks])
            self._has_own_cores = True
        self._spread_memory(_nodes())

    @property
    def _num_sharing_ranks(self) -> int:
        """Number of ranks on this machine that compute at the same time and share its cores.

        If pipeline stages run one after another, these are the ranks of one stage.
        """
        if self.config.parallel.stages_alternate:
            return min(self.num_local_ranks, self.config.parallel.tensor_parallel_size)
        return self.num_local_ranks

    def _spread_memory(self, nodes: list[int]) -> None:
        """Allocate weights and KV cache interleaved over the memory nodes of the threads."""
        if len(nodes) < 2:
            return
        text = format_cores(set(nodes))
        try:
            is_done = interleave(nodes)
        except OSError as error:
            logger.warning(
                "memory cannot be distributed over the NUMA nodes %s: %s. Run one rank on each "
                "node (--tensor-parallel-size %d), start with numactl --interleave=%s, or allow "
                "the container CAP_SYS_NICE",
                text,
                error.strerror,
                len(nodes),
                text,
            )
            return
        if is_done:
            logger.info("memory is distributed over the NUMA nodes %s (interleaved)", text)

    def _load_model(self) -> None:
        self.model = self._read_model(self.config)
        models: list[nn.Module] = [self.model]
        if (draft_config := self._draft_config) is not None:
            models.append(self._read_drafter(draft_config, self.device))
        self._weight_bytes = sum(len(part) for model in models for part in model_storages(model))
        self._count_threads(self._weight_bytes)
        self._advise_int8()
        self.runner = self._make_runner(self.model)
        if draft_config is not None:
            self._draft_model = models[1]
            self._add_drafter(draft_config, models[1])

    def _add_drafter(self, config: VllmConfig, model: nn.Module) -> None:
        runner, drafts = self.runner, self.config.speculative.drafts
        assert isinstance(runner, CPUModelRunner) and drafts is not None
        if isinstance(model, Speculator):
            num_drafts = drafts.num_speculative_tokens
            reader = SpeculatorRunner(config, model, runner, num_drafts)
            self._drafter = runner.drafter = runner.launches.reader = reader
        else:
            assert isinstance(model, CausalLM), "a draft model generates text"
            self._drafter = runner.drafter = DraftRunner(config, model, runner)

    def _read_model(self, config: VllmConfig) -> CausalLM | PoolingModel:
        return load_model(
            config,
            self.tp,
            self.device,
            self._dense_format(),
            stage=self.stage,
            has_values=self.has_values,
        )

    def _count_threads(self, weight_bytes: int) -> None:
        device = self.config.device
        if device.counts_threads and device.bound_cores is None:
            found, num_ranks = torch.get_num_threads(), self._num_sharing_ranks
            num_replicas = self.config.parallel.num_local_replicas
            # One core reads memory faster when both of its hardware threads are used.
            num_physical = max(2, count_physical(usable_cores()))
            if self._has_own_cores:
                num_cores = count_cores(num_replicas * num_ranks)
            else:
                num_cores = max(1, count_cores(num_replicas) // num_ranks)
                num_physical = max(1, num_physical // num_ranks)
            wanted = count_threads(
                min(found, num_physical),
                num_cores,
                weight_bytes,
                runs_with_server=device.runs_with_server,
                is_pooling=self.config.model.pooler is not None,
            )
            if wanted != found:
                torch.set_num_threads(wanted)
        logger.info(
            "%.2f GiB of weights, %d threads on the CPU cores %s",
            weight_bytes / 2**30,
            torch.get_num_threads(),
            format_cores(usable_cores()),
        )

    def _dense_format(self) -> Quantization | None:
        """Return the storage format of dense weights for the kernels; None: dense torch tensors."""
        return CPUPacked() if isinstance(self._ops, CPUOps) else None

    def _make_runner(self, model: CausalLM | PoolingModel) -> CPUModelRunner | PoolingRunner:
        if isinstance(model, PoolingModel):
            return make_pooling_runner(self.config, model, self.device)
        return CPUModelRunner(self.config, model, self.device, self.grammars)

    def _make_collectives(self, rendezvous: Rendezvous) -> Collectives:
        kernels = load_cpu_kernels()
        memory = None if kernels is None else rendezvous.stage_memory()
        if kernels is not None and memory is not None:
            arena_fd, offset = memory
            return SharedMemoryCollectives(
                kernels,
                arena_fd,
                self.tp.rank,
                self.tp.size,
                header_bytes=ARENA_HEADER_BYTES,
                buffer_bytes=ARENA_BUFFER_BYTES,
                timeout_s=rendezvous.timeout_s,
                arena_offset=offset,
                first_rank=rendezvous.stage_ranks[0],
            )
        rendezvous.join(self.platform.collectives_backend)
        group = rendezvous.open_groups(rendezvous.layout.tensor_groups)
        return CheckedCollectives(self.rank, self.tp.size, group)

    def measure(self) -> MemoryReport:
        """Count the KV blocks that fit in memory.

        Of forward passes, only the largest one of the encoder is counted.
        """
        layout = self._layout
        free_bytes = self.platform.free_memory_bytes()
        if (transfer := self.config.connector.kv_transfer) is not None:
            free_bytes = max(0, free_bytes - int(transfer.kv_buffer_size))
        self._encoder_bytes = self._count_encoder_bytes()
        media_bytes = self._embeddings_bytes + self._encoder_bytes
        free_bytes = max(0, free_bytes - media_bytes * self.num_local_ranks)
        num_ranks, share = self.num_local_ranks, self.config.device.memory_share_bytes
        if share is not None:
            # Reserve memory for the weights of the other replicas, which may not be loaded yet.
            free_bytes = max(0, min(free_bytes, share - self._weight_bytes * num_ranks))
        # All ranks use the same memory, and each measured it before any of them allocated.
        free_bytes //= num_ranks
        items = count_item_states(self.config, self.model, free_bytes)
        if items is not None:
            self._num_item_states, self._item_bytes = items
            free_bytes -= self._item_bytes
        self._num_kept_states = count_kept_states(self.config, layout, free_bytes)
        return MemoryReport(
            free_bytes=free_bytes,
            block_bytes=layout.block_bytes,
            windows=tuple(group.window for group in layout.groups),
            num_blocks=count_blocks(
                self.config,
                layout.block_bytes,
                free_bytes,
                len(layout.groups),
                states_bytes(self.config, layout),
                self._uses(num_ranks),
                (self._num_kept_states or 0) * layout.state_bytes,
            ),
            num_kept_states=self._num_kept_states,
            num_item_states=self._num_item_states,
        )

    def _uses(self, num_ranks: int) -> list[MemoryUse]:
        """List how much memory this process uses, and for what."""
        drafts = 0
        if self._drafter is not None:
            drafts = sum(len(part) for part in model_storages(self._draft_model))
        uses = [weights_use(self._weight_bytes - drafts), draft_use(drafts)]
        if (transfer := self.config.connector.kv_transfer) is not None:
            name = "kv_buffer_size of --kv-transfer-config"
            num_bytes = int(transfer.kv_buffer_size) // num_ranks
            uses.append(
                MemoryUse("KV blocks kept in host memory", num_bytes, f"lower {name}", name)
            )
        if num_bytes := self._embeddings_bytes:
            fix = "lower --max-num-batched-tokens if it is above 8192"
            uses.append(MemoryUse("cache of image embeddings", num_bytes, fix))
        if num_bytes := self._encoder_bytes:
            fix = "set a smaller size of images with --mm-processor-kwargs"
            uses.append(MemoryUse("largest forward pass of the encoder", num_bytes, fix))
        if num_bytes := self._item_bytes:
            uses.append(items_use(num_bytes))
        return uses

    @property
    def _embeddings_bytes(self) -> int:
        """Largest size in bytes of the image embeddings that this rank keeps."""
        model = self.model
        if not isinstance(model, LayeredModel) or not (width := embedding_width(model)):
            return 0
        assert model.media_encoder is not None
        size = width * model.media_encoder.dtype.itemsize
        return self.config.scheduler.encoder_cache_size * size

    def _count_encoder_bytes(self) -> int:
        """Return the memory of the encoder's largest forward pass; 0 without an encoder on this
        rank.

        Also 0 if the config excludes it.
        """
        model = self.model
        if self.config.multimodal.skip_mm_profiling or not isinstance(model, LayeredModel):
            return 0
        if model.media_encoder is None or not model.stage.is_first:
            return 0
        return encoder_bytes(self.config, model.media_encoder)

    @property
    def _layout(self) -> KVCacheLayout:
        """Layout of the KV cache, including keys and values of the draft model."""
        layout = self.runner.cache_layout
        if self._drafter is None:
            return layout
        more_bytes = self._drafter.cache_layout.block_bytes
        return replace(layout, block_bytes=layout.block_bytes + more_bytes)

    def allocate(self, num_blocks: int) -> None:
        """Allocate a KV cache of `num_blocks` blocks, the null block included."""
        calculate_scales(self.config, self.model, self.device)
        layers, layout = self.runner.attention_layers, self.runner.cache_layout
        num_kept_states = self._num_kept_states or 0
        log_cache(self.config, num_blocks, self._layout, num_kept_states)
        dtype = cache_dtype(self.config)
        num_requests = self.config.scheduler.max_num_seqs
        num_rows, provisional = num_requests + num_kept_states, num_provisional(self.config)
        bind_kv_caches(
            *(layers, self.platform, num_blocks, layout, dtype, num_rows),
            provisional=(num_requests, provisional),
        )
        if (items := self.runner.parts.find(ItemRows)) is not None:
            assert self._num_item_states is not None
            logger.info(
                "Cross-attention cache: %d hidden states of images and sounds (%.2f GiB)",
                self._num_item_states,
                self._item_bytes / 2**30,
            )
            items.pool.allocate(self._num_item_states, self.platform, self.model.dtype)
        if (drafter := self._drafter) is not None:
            own, dtype = drafter.cache_layout, cache_dtype(drafter.config)
            bind_kv_caches(drafter.attention_layers, self.platform, num_blocks, own, dtype)
            drafter.start(num_blocks)
        if self.config.connector.kv_transfer is not None:
            self._blocks = BlockCopies(layers, num_blocks)
        can_sleep = self.config.model.enable_sleep_mode
        folder = self.config.model.path or ""
        weights = HostWeights(self.model, folder, self._build_model, can_sleep=can_sleep)
        pools = [each for x in cross_attention_layers(self.model) for each in x.pool_tensors]
        if drafter is None:
            self._set_memory(weights, HostCache(layers, pools))
            return
        folder, build = drafter.config.model.path or "", self._build_drafter
        self._set_memory(
            weights,
            HostCache([*layers, *drafter.attention_layers], [*drafter.kept_states, *pools]),
            HostWeights(self._draft_model, folder, build, can_sleep=can_sleep),
        )

    def _advise_int8(self) -> None:
        """Log what int8 would gain, if weights are dense and the processor has no bfloat16
        instructions.
        """
        model = self.config.model
        dtype: torch.dtype = getattr(torch, model.dtype_name)
        is_dense = (quant_method(model.resolved_arch) or model.quantization) is None
        _, isa = self._weights_and_kernels()
        if self.rank or not (self.has_values and is_dense and is_worth_measuring(isa, dtype)):
            return
        advice = int8_advice(measure_rates(dtype, model_storages(self.model)), isa)
        if advice is not None:
            logger.info(advice)

    def _weights_and_kernels(self) -> tuple[Iterable[Tensor], str]:
        kernels = load_cpu_kernels()
        isa = kernels.isa if kernels is not None and isinstance(self._ops, CPUOps) else "torch"
        return model_storages(self.model), isa

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        """Start a step and return its handle; at most one other step may be in flight."""
        with self.profile.step(step):
            return self.runner.execute(step)


def _nodes() -> list[int]:
    """Return the memory nodes of the cores that this thread may use."""
    return nodes_of(usable_cores())
