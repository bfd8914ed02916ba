"""A recorded forward pass that runs in one call of the C++ kernels.

With one call per operator, a small model spends more time in Python and in waking threads than in
arithmetic. Here a call only sets a few pointers. Knows operations and their buffers, no modules.
"""

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from vllm.ops.cpu.attention import last_keys_address
from vllm.ops.cpu.library import require_cpu_kernels
from vllm.ops.cpu.low_rank import PackedRows
from vllm.ops.cpu.operators.activations import activate_matmuls
from vllm.ops.cpu.operators.recorder import ON_PARTS_OF_HEADS, Operand, Operation, Recorder
from vllm.ops.cpu.symbols import Buffer, NotFusibleError, Rows
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.moe import PackedExperts
from vllm.ops.item_slots import ItemSlots
from vllm.ops.lora_weights import AdaptedRows

_num_threads = torch.get_num_threads


class Program:
    """Runs forward passes of one model; results have the same bits as with single operators.

    Keeps everything that the operations read alive, and scratch memory for its largest forward
    pass. One call at a time.

    Args:
        recorder: has recorded the operations. Weights and caches may change their content, but not
            their address.
        result: the recorded tensor that a forward pass returns.
        given: the recorded tensor that is its input; None: its input is token ids.
        taps: hidden states that it also returns.

    Attributes:
        dtype: data type of activations.
        tapped: values of `taps` in the last forward pass, [T, width] each.
        width: elements of the result per token.
        given_width: elements of the input per token, or 0 for token ids.
        num_positions: positions of a token, which rotate its heads.
        num_types: number of token types; 0: the model has none.

    Raises:
        NotFusibleError: the kernels cannot run it.
        RuntimeError: the kernels are not built.
    """

    def __init__(
        self, recorder: Recorder, result: Rows, given: Rows | None = None, taps: Sequence[Rows] = ()
    ) -> None:
        library = require_cpu_kernels("a program needs")
        self.dtype, self.width = recorder.dtype, result.width
        self.given_width = given.width if given is not None else 0
        if not recorder.operations or result.offset:
            raise NotFusibleError(
                "a program must have at least one operation, and its result must not begin inside "
                "a buffer"
            )
        if given is not None and given.buffer is result.buffer:
            raise NotFusibleError("the input buffer of a program must not be its output buffer")
        kernels = library.of[self.dtype]
        self.num_positions, self.num_types = recorder.num_positions, recorder.num_types
        self._kernels, self._status = kernels, kernels.ProgramStatus
        self._forward, self._scratch_bytes = kernels.program_forward, kernels.program_scratch_bytes
        self._recorder = recorder
        operations = activate_matmuls(recorder.operations, result, taps)
        if not all(tap.is_whole for tap in taps):
            raise NotFusibleError("hidden states that a program returns must be whole buffers")
        buffers = _Buffers(
            operations,
            result.buffer,
            given.buffer if given is not None else None,
            [tap.buffer for tap in taps],
        )
        self._tap_widths = [tap.width for tap in taps]
        self.tapped: list[Tensor] = []
        widest = max(
            (o.numbers["option"] for o in operations if "sections" in o.operands), default=0
        )
        if widest > kernels.kMaxSectionedElements:
            raise NotFusibleError(
                "rotary embedding by several positions supports at most "
                f"{kernels.kMaxSectionedElements} elements, got {widest}"
            )
        if len(buffers.shapes) > kernels.kMaxBuffers:
            raise NotFusibleError(
                f"the program needs {len(buffers.shapes)} buffers; at most {kernels.kMaxBuffers} "
                "are supported"
            )
        self._operations = (kernels.Operation * len(operations))(
            *(kernels.Operation(**_fields(kernels, o, buffers)) for o in operations)
        )
        tap_of = {buffers.index[tap.buffer]: number for number, tap in enumerate(taps, start=1)}
        self._buffers = (kernels.ProgramBuffer * len(buffers.shapes))(
            *((*shape, tap_of.get(index, 0)) for index, shape in enumerate(buffers.shapes))
        )
        runs = [sum(map(_weight_bytes, run)) for run in _runs(operations)]
        num_blocks, block_size = recorder.cache_shape
        self._struct = kernels.Program(
            operations=ctypes.addressof(self._operations),
            buffers=ctypes.addressof(self._buffers),
            num_operations=len(operations),
            num_buffers=len(buffers.shapes),
            given=-1 if given is None else buffers.index[given.buffer],
            out=buffers.index[result.buffer],
            out_width=result.width,
            vocab_size=recorder.vocab_size,
            max_positions=recorder.max_positions,
            num_types=recorder.num_types,
            num_blocks=num_blocks,
            block_size=block_size,
            num_groups=recorder.num_groups,
            largest_run_bytes=max(runs),
            weight_bytes=sum(runs),
            attended_elements=sum(o.out.buffer.width for o in operations if o.kind == "attend"),
            item_elements=sum(o.out.buffer.width for o in operations if o.kind == "attend_items"),
        )
        self._out_width = result.buffer.width
        self._launch = kernels.ProgramLaunch()
        self._addresses = ctypes.addressof(self._struct), ctypes.addressof(self._launch)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_for = (0, 0)  # sizes for which scratch memory exists: tokens, threads

    @property
    def num_groups(self) -> int:
        """Number of groups of layers with separate block tables."""
        return self._recorder.num_groups

    @property
    def buffer_width(self) -> int:
        """Elements from one token of the result to the next, in the memory of the caller."""
        return self._out_width

    @property
    def address(self) -> int:
        """Address of the kernels' Program struct, valid as long as this object exists."""
        return self._addresses[0]

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_decodes: int,
        replaced: tuple[Tensor, Tensor] | None = None,
        adapted: AdaptedRows | None = None,
        last_keys: np.ndarray | None = None,
        items: ItemSlots | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Run one ragged forward pass of T tokens of B requests; decodes of one token come first.

        G groups of layers have separate block tables; the dimension may be missing if G is 1.

        Args:
            inputs: token ids [T] int64; or hidden states [T, given_width] if the program takes
                these, which may be overwritten.
            positions: [P, T] int64; P is 1 if all positions of a token are the same.
            slot_mapping: [G, T] int64: slots for keys and values; negative: they are not stored.
            block_tables: [G, B, max_blocks] int32, rows dense.
            seq_lens: [B] int32: tokens of a request, this forward pass included.
            query_start_loc: [B + 1] int32: index of the first token of each request.
            num_decodes: number of requests that are decodes; their tokens come first.
            replaced: tokens [m] int64, and the embeddings [m, W] that replace theirs.
            adapted: the adapters of the T tokens; None: no token has one.
            items: the slots that the T tokens see by cross-attention; None: no token sees any.
            token_types: [T] int64, for models with token types; None: all are 0.
            last_keys: [T] int32: the last key that each token sees, see
                `NativeOps.paged_attention_prefill`; None: its own.

        Returns:
            [T, width]

        Raises:
            ValueError: dtypes, shapes, strides or devices do not fit, or the number of decodes.
            IndexError: a token, position, type, slot, length or block is out of range.
            MemoryError: there is no scratch memory.
            CollectiveError: another rank has failed, or was not ready in time.
        """
        if slot_mapping.dim() == 1:
            slot_mapping, block_tables = slot_mapping[None], block_tables[None]
        self._check(
            inputs, positions, slot_mapping, block_tables, seq_lens, query_start_loc, num_decodes
        )
        num_tokens, num_requests = len(inputs), len(seq_lens)
        num_threads = _num_threads()
        out = torch.empty(num_tokens, self._out_width, dtype=self.dtype)
        launch = self._launch
        if self.given_width:
            launch.given = inputs.data_ptr()
        else:
            launch.input_ids = inputs.data_ptr()
        launch.token_types = None
        if token_types is not None:
            _check_dense("token_types", token_types, torch.int64, num_tokens)
            launch.token_types = token_types.data_ptr()
        launch.positions = positions.data_ptr()
        launch.slot_mapping = slot_mapping.data_ptr()
        launch.block_tables = block_tables.data_ptr()
        launch.seq_lens = seq_lens.data_ptr()
        launch.query_start_loc = query_start_loc.data_ptr()
        launch.out = out.data_ptr()
        launch.num_positions = len(positions)
        launch.num_tokens, launch.num_requests = num_tokens, num_requests
        launch.num_decodes = num_decodes
        launch.group_stride, launch.table_stride = block_tables.stride()[:2]
        launch.max_blocks = block_tables.shape[2]
        if num_tokens > self._scratch_for[0] or num_threads != self._scratch_for[1]:
            self._grow(num_tokens, num_threads)
        launch.last_keys = None
        if last_keys is not None:
            launch.last_keys = last_keys_address(last_keys, num_tokens)
        launch.replaced = launch.embeddings = None
        if replaced is not None:
            sources, embeddings = self._sources(num_tokens, *replaced)
            launch.replaced, launch.embeddings = sources.data_ptr(), embeddings.data_ptr()
        packed = self.pack_rows(adapted, num_tokens)
        launch.adapted = None if packed is None else packed.address
        launch.item_slots = launch.num_item_slots = None
        if items is not None:
            if not len(items.addresses) == len(items.counts) == num_tokens:
                raise ValueError(
                    f"items must have one count for each of the {num_tokens} tokens, got "
                    f"{len(items.counts)}"
                )
            launch.item_slots = items.addresses.ctypes.data
            launch.num_item_slots = items.counts.ctypes.data
        taps = self.take_taps(num_tokens)
        launch.taps = ctypes.addressof(taps)
        status = self._forward(*self._addresses, num_threads)
        if status == self._status.kBadType and token_types is not None:
            bad = launch.bad_index
            raise IndexError(
                f"token_types[{bad}] is {token_types[bad]}, it must be below {self.num_types}"
            )
        if status != self._status.kDone:
            self._refuse(status, inputs, positions, slot_mapping, block_tables, seq_lens)
        return out if self.width == self._out_width else out[:, : self.width]

    def _check(
        self,
        inputs: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_decodes: int,
    ) -> None:
        """Raise ValueError if the arguments of `forward` do not fit together."""
        num_tokens, num_requests = len(inputs), len(seq_lens)
        if self.given_width:
            _check_dense("inputs", inputs, self.dtype, num_tokens, self.given_width)
        else:
            _check_dense("input_ids", inputs, torch.int64, num_tokens)
        num_positions = len(positions)
        _check_dense("positions", positions, torch.int64, num_positions, num_tokens)
        if num_positions not in (1, self.num_positions):
            raise ValueError(
                f"positions must have 1 or {self.num_positions} entries for each token, got "
                f"{num_positions}"
            )
        num_groups = max(self.num_groups, 1)
        _check_dense("slot_mapping", slot_mapping.flatten(), torch.int64, num_groups * num_tokens)
        _check_dense("seq_lens", seq_lens, torch.int32, num_requests)
        _check_dense("query_start_loc", query_start_loc, torch.int32, num_requests + 1)
        _check_tables(block_tables, num_groups, num_requests)
        if not 0 <= num_decodes <= min(num_requests, num_tokens) or (
            num_decodes == num_requests != num_tokens
        ):
            raise ValueError(
                f"{num_decodes} decodes among {num_requests} requests with {num_tokens} tokens: "
                "each decode must be a request with one token"
            )

    def take_taps(self, num_tokens: int) -> ctypes.Array[ctypes.c_void_p]:
        """Allocate `tapped` for a forward pass; return the addresses.

        The result must be kept as long as the forward pass runs.
        """
        self.tapped = [
            torch.empty(num_tokens, width, dtype=self.dtype) for width in self._tap_widths
        ]
        return (ctypes.c_void_p * len(self.tapped))(*(tap.data_ptr() for tap in self.tapped))

    def check_exchange(self, status: int, reason: int) -> None:
        """Raise if a forward pass has failed in an exchange between the ranks.

        Args:
            status: status of the forward pass, a `ProgramStatus`.
            reason: status that the exchange has returned.

        Raises:
            CollectiveError: with the operation and the rank.
        """
        exchanges = {
            self._status.kNotReduced: "all_reduce",
            self._status.kNotGathered: "all_gather",
        }
        collectives, operation = self._recorder.collectives, exchanges.get(status)
        if collectives is not None and operation is not None:
            raise collectives.failure(operation, reason)

    def pack_rows(self, rows: AdaptedRows | None, num_rows: int) -> PackedRows | None:
        """Pack the adapters of the tokens for the kernels; None if no token has one."""
        return None if rows is None else PackedRows(self._kernels, rows, num_rows)

    def _sources(
        self, num_tokens: int, indices: Tensor, embeddings: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the index of the replacing embedding for each token, or -1, and the embeddings."""
        width = self._recorder.replaced_width
        if embeddings.shape != (len(indices), width):
            raise ValueError(
                f"embeddings must be [{len(indices)}, {width}], got {list(embeddings.shape)}"
            )
        sources = torch.full((num_tokens,), -1)
        sources[indices] = torch.arange(len(indices))
        return sources, embeddings.to(self.dtype).contiguous()

    def _grow(self, num_tokens: int, num_threads: int) -> None:
        num_bytes = self._scratch_bytes(self._addresses[0], num_tokens, num_threads)
        self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        address = self._scratch.data_ptr()
        self._launch.scratch = address + -address % 64
        self._scratch_for = num_tokens, num_threads

    def _refuse(
        self,
        status: int,
        inputs: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
    ) -> NoReturn:
        """Raise the error for the status of a forward pass that was not computed."""
        bad, program, known = self._launch.bad_index, self._struct, self._status
        self.check_exchange(status, bad)
        if status == known.kNoMemory:
            raise MemoryError("not enough memory for a forward pass")
        if status == known.kBadStart:
            raise ValueError(
                f"the first {bad} requests are decodes of one token each, so the first prefill "
                f"must begin at token {bad}"
            )
        if status == known.kBadToken:
            raise IndexError(
                f"input_ids[{bad}] must be a token of the vocabulary of {program.vocab_size}, got "
                f"{inputs[bad]}"
            )
        if status == known.kBadPosition:
            raise IndexError(
                f"positions[:, {bad}] must be below {program.max_positions}, the number of "
                f"positions of the model, got {positions[:, bad].tolist()}"
            )
        if status == known.kBadSlot:
            num_slots = program.num_blocks * program.block_size
            slots = ", ".join(str(slot) for slot in slot_mapping[:, bad].tolist())
            raise IndexError(
                f"slot_mapping[{bad}] must be one of the {num_slots} slots of the KV cache, got "
                f"{slots}"
            )
        if status == known.kBadItem:
            raise IndexError(
                f"token {bad} refers to a slot of an image or a sound that does not exist"
            )
        if status == known.kBadAdapter:
            raise IndexError(f"token {bad} refers to a LoRA slot that is not loaded")
        tables = ", ".join(str(table) for table in block_tables[:, bad].tolist())
        raise IndexError(
            f"request {bad} has {seq_lens[bad]} tokens and the blocks {tables} of "
            f"{program.block_size} tokens, but the cache has only {program.num_blocks} blocks"
        )


_ALL_ROWS = ("attend", "attend_items", "all_reduce", "all_gather")
"""Operations that take the rows of all tokens at once: a run of others ends there."""


class _Buffers:
    """Assigns the results of operations to the buffers of a program.

    Results that are no longer read free their buffer for others of the same width. Results that are
    used in one run only are local: the buffers hold only a part of their tokens at a time.
    """

    def __init__(
        self,
        operations: list[Operation],
        out: Buffer,
        given: Buffer | None,
        taps: Sequence[Buffer] = (),
    ) -> None:
        self.shapes: list[tuple[int, bool]] = []
        """(width, is_local) of each buffer."""
        self.index: dict[Buffer, int] = {}
        self._free: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        self._is_local: dict[Buffer, bool] = {out: False}
        last_use: dict[Buffer, int] = {}
        first_run: dict[Buffer, int] = {}
        number = 0
        for run, part in enumerate(_runs(operations)):
            for operation in part:
                for buffer in _used(operation):
                    last_use[buffer] = number
                    is_one_run = first_run.setdefault(buffer, run) == run
                    self._is_local[buffer] = is_one_run and self._is_local.get(buffer, True)
                number += 1
        kept = {out, *taps} if given is None else {out, given, *taps}
        for buffer in kept:
            self._is_local[buffer] = False
            self._make(buffer)
        for number, operation in enumerate(operations):
            ended = [
                b
                for b in dict.fromkeys(_used(operation))
                if last_use[b] == number and b not in kept and b is not operation.out.buffer
            ]
            if _is_row_operation(operation):
                self._release(ended)
            if operation.out.buffer not in self.index:
                self._make(operation.out.buffer)
            if not _is_row_operation(operation):
                self._release(ended)

    def _make(self, buffer: Buffer) -> None:
        key = buffer.width, self._is_local[buffer]
        if self._free[key]:
            self.index[buffer] = self._free[key].pop()
        else:
            self.index[buffer] = len(self.shapes)
            self.shapes.append(key)

    def _release(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            key = buffer.width, self._is_local[buffer]
            self._free[key].append(self.index[buffer])


def _is_row_operation(operation: Operation) -> bool:
    """Return whether the result of an operation may overwrite an operand of the same width."""
    others = ("linear", "head_linear", "low_rank", "experts", "copy", "widen")
    return operation.kind not in (*others, *_ALL_ROWS)


def _used(operation: Operation) -> list[Buffer]:
    return [x.buffer for x in (operation.x, operation.y, operation.out) if x is not None]


def _runs(operations: list[Operation]) -> Iterator[list[Operation]]:
    """Yield lists of operations: each run of row operations, and each other operation by itself."""
    run: list[Operation] = []
    for operation in operations:
        if operation.kind in _ALL_ROWS:
            yield run
            yield [operation]
            run = []
        else:
            run.append(operation)
    yield run


def _weight_bytes(operation: Operation) -> int:
    """Return the bytes of weights that the operation reads for one token."""
    weight, experts = operation.operands.get("packed"), operation.operands.get("experts")
    if isinstance(experts, PackedExperts):
        return experts.num_bytes * int(operation.numbers["top_k"]) // experts.num_experts
    if operation.kind not in ("linear", "head_linear") or not isinstance(weight, PackedWeight):
        return 0
    return weight.num_bytes


def _fields(kernels: Any, operation: Operation, buffers: _Buffers) -> dict[str, Any]:
    """Return the fields of the struct Operation in csrc/cpu/program_args.h."""
    kind = kernels.OperationKind.__members__.get(operation.kind)
    if kind is None:
        raise NotFusibleError(f"the kernels do not support the operation {operation.kind!r}")
    fields = {"kind": kind} | operation.numbers
    for name, rows in (("x", operation.x), ("y", operation.y), ("out", operation.out)):
        if rows is not None:
            fields |= {name: buffers.index[rows.buffer], f"{name}_offset": rows.offset}
        if rows is not None and operation.kind in ON_PARTS_OF_HEADS:
            fields[f"{name}_head_stride"] = rows.head_distance
    return fields | {name: _pointer(x) for name, x in operation.operands.items()}


def _pointer(x: Operand | None) -> int | None:
    if x is None:
        return None
    return x.data_ptr() if isinstance(x, Tensor) else x.address


def _check_dense(name: str, x: Tensor, dtype: torch.dtype, *sizes: int) -> None:
    if x.dtype != dtype or x.shape != sizes or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name} must be dense {dtype} {list(sizes)} on cpu, got {x.dtype} {list(x.shape)} "
            f"with strides {list(x.stride())} on {x.device}"
        )


def _check_tables(block_tables: Tensor, num_groups: int, num_requests: int) -> None:
    shape, dtype = block_tables.shape, block_tables.dtype
    is_dense = len(shape) == 3 and (shape[2] <= 1 or block_tables.stride(2) == 1)
    is_fitting = is_dense and shape[:2] == (num_groups, num_requests) and block_tables.is_cpu
    if dtype != torch.int32 or not is_fitting:
        raise ValueError(
            f"block_tables must be torch.int32 [{num_groups}, {num_requests}, max_blocks] with "
            f"dense rows on cpu, got {dtype} {list(shape)} with strides "
            f"{list(block_tables.stride())} on {block_tables.device}"
        )
