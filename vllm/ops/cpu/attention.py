"""Paged attention with the C++ kernels: fills in their arguments after checking them.

The meaning of the arguments is in csrc/cpu/attention_args.h. Choosing kernels by dtype and falling
back to torch is done in `vllm.ops.cpu.operators`.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from vllm.ops.attention_options import NO_TENSORS, AttentionOptions, AttentionTensors
from vllm.ops.cpu.row_operations import refuse_strides
from vllm.ops.native.attention import check_attention, check_last_keys

_NO_MEMORY = -2
_MAX_WINDOW = 2**31 - 1


_FP8_TYPES = {torch.float8_e4m3fn: "kE4m3", torch.float8_e5m2: "kE5m2"}
"""Dtype of a cache -> the CacheType of the kernels."""


def cache_type(kernels: Any, dtype: torch.dtype) -> int:
    """Return the kernels' CacheType for a cache of this dtype; 0: the dtype of the queries."""
    name = _FP8_TYPES.get(dtype)
    return 0 if name is None else int(kernels.CacheType[name])


def option_fields(options: AttentionOptions, head_size: int) -> dict[str, float]:
    """Return the options of a layer as fields of the kernels' struct, by name."""
    return {
        "scale": options.scale_of(head_size),
        "soft_cap": options.logits_soft_cap or 0.0,
        "sliding_window": min(options.sliding_window or 0, _MAX_WINDOW),
        "chunk_size": options.chunk_size or 0,
    }


def fp8_arguments(
    kernels: Any,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> Any:
    """Make the argument struct of `NativeOps.reshape_and_cache` for an FP8 cache."""
    num_tokens, num_kv_heads, head_size = key.shape
    if key_scales is None or value_scales is None:
        ones = torch.ones(num_kv_heads)
        key_scales = ones if key_scales is None else key_scales
        value_scales = ones if value_scales is None else value_scales
    return kernels.CacheFp8Args(
        key=key.data_ptr(),
        value=None if value is None else value.data_ptr(),
        key_cache=key_cache.data_ptr(),
        value_cache=None if value_cache is None else value_cache.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
        num_tokens=num_tokens,
        num_heads=num_kv_heads,
        head_size=head_size,
        key_stride=key.stride(0),
        value_stride=0 if value is None else value.stride(0),
        num_slots=key_cache.shape[0] * key_cache.shape[1],
        key_scales=_scales_address(key_scales, num_kv_heads),
        value_scales=_scales_address(value_scales, num_kv_heads),
        cache_type=cache_type(kernels, key_cache.dtype),
    )


def paged_attention_decode(
    kernels: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    options: AttentionOptions,
    tensors: AttentionTensors,
) -> Tensor:
    """Compute `NativeOps.paged_attention_decode` with the kernels for the dtype of query."""
    _check(query, key_cache, value_cache, block_tables, tensors)
    num_requests, num_heads, _ = query.shape
    if seq_lens.shape != (num_requests,) or block_tables.shape[0] != num_requests:
        raise ValueError(
            "seq_lens must be [batch] and block_tables [batch, blocks] for query [batch, heads, "
            f"head_size], got {list(seq_lens.shape)}, {list(block_tables.shape)} and "
            f"{list(query.shape)}"
        )
    if seq_lens.dtype != torch.int32 or not seq_lens.is_contiguous():
        raise ValueError(
            f"seq_lens must be dense int32, got {seq_lens.dtype} with strides "
            f"{list(seq_lens.stride())}"
        )
    # Separate arguments are faster than a shape.
    out = query.new_empty(num_requests, num_heads, value_cache.shape[3])
    args = _arguments(
        *(kernels, query, key_cache, value_cache, block_tables, seq_lens.data_ptr(), out),
        *(options, tensors),
    )
    bad = kernels.paged_attention_decode(ctypes.byref(args), torch.get_num_threads())
    if bad != -1:
        _refuse_request(bad, seq_lens, block_tables, key_cache)
    return out


def paged_attention_prefill(
    kernels: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Sequence[int] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    options: AttentionOptions,
    tensors: AttentionTensors,
    last_keys: np.ndarray | None = None,
) -> Tensor:
    """Compute `NativeOps.paged_attention_prefill` with the kernels for the dtype of query.

    The result of a token has the same bits however its prompt was cut into chunks, whatever else is
    in the batch, and on any number of threads. It may differ in the last bits from the result of
    `paged_attention_decode` for the same token, and between instruction sets.
    """
    _check(query, key_cache, value_cache, block_tables, tensors)
    num_tokens, num_heads, _ = query.shape
    num_requests = len(seq_lens)
    if len(query_start_loc) != num_requests + 1 or block_tables.shape[0] != num_requests:
        raise ValueError(
            "query_start_loc must have one entry more than seq_lens, and block_tables one row "
            f"for each, got {len(query_start_loc)}, {num_requests} and {list(block_tables.shape)}"
        )
    # One buffer for both arrays, because reading the address of an array takes longer than filling
    # it.
    host = np.empty(2 * num_requests + 1, dtype=np.int32)
    starts, lens = host[: num_requests + 1], host[num_requests + 1 :]
    starts[:], lens[:] = query_start_loc, seq_lens
    if num_requests and starts[0]:
        raise ValueError(f"query_start_loc must begin with 0, got {starts[0]}")
    address = ctypes.addressof(c_int32.from_buffer(host.data))
    out = query.new_empty(num_tokens, num_heads, value_cache.shape[3])
    lens_address = address + starts.nbytes
    args = _arguments(
        *(kernels, query, key_cache, value_cache, block_tables, lens_address, out),
        *(options, tensors),
    )
    args.query_start_loc, args.num_tokens = address, num_tokens
    if last_keys is not None:
        args.last_keys = last_keys_address(last_keys, num_tokens)
    bad = kernels.paged_attention_prefill(ctypes.byref(args), torch.get_num_threads())
    if bad != -1:
        _refuse_chunk(bad, starts, lens, num_tokens, block_tables, key_cache, last_keys)
    return out


def full_attention(
    kernels: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    """Compute `NativeOps.full_attention` without a mask, with the decode kernel for the dtype of
    query.

    The last token of a prompt attends to all keys, and query heads can share the keys of one head.
    So each image is passed as a prompt with one new token, whose heads are its N * H queries. torch
    takes four times as long in bfloat16.
    """
    num_images, num_heads, num_queries, head_size = query.shape
    num_keys = key.shape[2]
    # Keys and values are in memory order [token, head], so nothing is copied. `view(-1)` in
    # between, because the stride of a dimension of size 1 is arbitrary.
    shape = (num_images, num_keys, num_heads, head_size)
    key_cache, value_cache = (each.transpose(1, 2).reshape(-1).view(shape) for each in (key, value))
    tables = torch.arange(num_images, dtype=torch.int32)[:, None]
    read = paged_attention_prefill(
        kernels,
        query.reshape(num_images, num_heads * num_queries, head_size).contiguous(),
        key_cache,
        value_cache,
        tables,
        range(num_images + 1),
        [num_keys] * num_images,
        AttentionOptions(scale=scale),
        NO_TENSORS,
    )
    return read.view(query.shape)


def _arguments(
    kernels: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens_address: int,
    out: Tensor,
    options: AttentionOptions,
    tensors: AttentionTensors,
) -> Any:
    """Make the argument struct of both kernels, without the fields for prefill."""
    slopes, sinks, key_scales, value_scales = tensors
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    num_requests, max_blocks = block_tables.shape
    of_cache = cache_type(kernels, key_cache.dtype)
    return kernels.AttentionArgs(
        query=query.data_ptr(),
        key_cache=key_cache.data_ptr(),
        value_cache=value_cache.data_ptr(),
        block_tables=block_tables.data_ptr(),
        seq_lens=seq_lens_address,
        alibi_slopes=None if slopes is None else slopes.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        key_scales=_scales_address(key_scales, num_kv_heads) if of_cache else None,
        value_scales=_scales_address(value_scales, num_kv_heads) if of_cache else None,
        out=out.data_ptr(),
        num_requests=num_requests,
        num_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_size=value_cache.shape[3],
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks=max_blocks,
        query_stride=query.stride(0),
        table_stride=block_tables.stride(0),
        cache_type=of_cache,
        **option_fields(options, head_size),
    )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    tensors: AttentionTensors,
) -> None:
    """Check the conditions on shapes, dtypes and strides that both kernels rely on."""
    check_attention(query, key_cache, value_cache, tensors)
    if not key_cache.is_contiguous():
        refuse_strides("key_cache", key_cache)
    if value_cache.stride() != key_cache.stride():
        refuse_strides("value_cache", value_cache)
    if block_tables.dtype != torch.int32:
        raise ValueError(f"block_tables is {block_tables.dtype}, it must be torch.int32")
    if block_tables.stride(1) != 1 and block_tables.shape[1] > 1:
        refuse_strides("block_tables", block_tables)
    stride = query.stride()
    if stride[2] != 1 or (stride[1] != query.shape[2] and query.shape[1] != 1):
        refuse_strides("query", query)


def _scales_address(scales: Tensor | None, num_kv_heads: int) -> int | None:
    """Return the address of the scales of a cache, one for each head; None stays None."""
    if scales is None:
        return None
    is_known = scales.shape == (num_kv_heads,) and scales.dtype == torch.float32
    if not is_known or not scales.is_cpu or not scales.is_contiguous():
        raise ValueError(
            f"scales of a cache are {scales.dtype} {list(scales.shape)} on {scales.device}, they "
            f"must be dense torch.float32 [{num_kv_heads}] on cpu"
        )
    return scales.data_ptr()


def last_keys_address(last_keys: np.ndarray, num_tokens: int) -> int:
    """Return the address of the last keys of the tokens, after checking their number."""
    if last_keys.shape != (num_tokens,) or last_keys.dtype != np.int32:
        raise ValueError(
            f"last_keys is {last_keys.dtype} {list(last_keys.shape)}, it must be int32 "
            f"[{num_tokens}]"
        )
    if not last_keys.flags.c_contiguous:
        raise ValueError("last_keys is not dense")
    return int(last_keys.ctypes.data)


def _refuse_chunk(
    b: int,
    starts: np.ndarray,
    lens: np.ndarray,
    num_tokens: int,
    block_tables: Tensor,
    key_cache: Tensor,
    last_keys: np.ndarray | None,
) -> NoReturn:
    """Raise the error about request b of a prefill that the kernel has refused."""
    if b != _NO_MEMORY:
        start, end, seq_len = int(starts[b]), int(starts[b + 1]), int(lens[b])
        block_size, max_blocks = key_cache.shape[1], block_tables.shape[1]
        if not 0 <= start <= end <= num_tokens:
            raise ValueError(
                f"tokens {start} to {end} of request {b} must be within the {num_tokens} tokens "
                "of the batch"
            )
        if end - start > seq_len or seq_len > max_blocks * block_size:
            raise ValueError(
                f"request {b}: its new tokens must not be more than its tokens ({seq_len}), and "
                f"its block table must have blocks for all of them; got {end - start} new tokens "
                f"and {max_blocks} blocks of {block_size} tokens"
            )
        if last_keys is not None:
            check_last_keys(b, last_keys[start:end], seq_len)
    _refuse_request(b, lens, block_tables, key_cache)


def _refuse_request(
    b: int, seq_lens: Tensor | np.ndarray, block_tables: Tensor, key_cache: Tensor
) -> NoReturn:
    """Raise the error about request b that a kernel has refused."""
    if b == _NO_MEMORY:
        raise MemoryError("not enough memory for paged attention")
    block_size, max_blocks = key_cache.shape[1], block_tables.shape[1]
    raise IndexError(
        f"request {b} has {int(seq_lens[b])} tokens and the blocks {block_tables[b].tolist()}, "
        f"but its table holds only {max_blocks * block_size} tokens and the cache "
        f"{key_cache.shape[0]} blocks"
    )
