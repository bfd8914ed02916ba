// The forward pass of a decoder in one call: embedding, all layers, final norm.
//
// A layer is two steps. Attention is one, shared between the threads by its own kernels. The other
// is everything between attention and the attention of the next layer; a row of it needs no other
// row. When the weights of a layer stay in the caches, a thread takes some rows through all of
// that step, and the threads meet twice per layer. Otherwise all threads share every product, so
// that memory is read once.
//
// Every row is computed by the kernels that serve single operators, in their order: the result
// has the same bits as one call per operator.
#pragma once

#include "activation.h"
#include "attention.h"
#include "attention_prefill.h"
#include "decoder_model.h"
#include "linear_pack.h"
#include "norm.h"
#include "rotary.h"

namespace VLLM_ISA {

using vllm_cpu::DecoderLaunch;
using vllm_cpu::DecoderLayer;
using vllm_cpu::DecoderModel;
using vllm_cpu::DecoderStatus;

constexpr int64_t kCachedLayerBytes = 4 << 20;
constexpr int64_t kOwnRows = 64;     // most rows that one thread takes through a step at a time
constexpr int64_t kSharedRows = 1024;  // and that all threads together do

inline int64_t weight_bytes(const LinearWeight& w) {
  return vllm_cpu::num_panels(w) * vllm_cpu::panel_words(w) * 4;
}

template <typename T>
int64_t layer_bytes(const DecoderModel<T>& model) {
  const DecoderLayer<T>& layer = model.layers[0];
  return weight_bytes(*layer.qkv) + weight_bytes(*layer.output) + weight_bytes(*layer.gate_up) +
         weight_bytes(*layer.down);
}

template <typename T>
bool is_cached(const DecoderModel<T>& model) {
  return layer_bytes(model) <= kCachedLayerBytes;
}

// Whether one thread is done before another would pay for being woken: at most some 100 us.
template <typename T>
bool is_small(const DecoderModel<T>& model, const DecoderLaunch& launch) {
  int64_t num_keys = 0;
  for (int64_t b = 0; b < launch.num_requests; ++b) num_keys += launch.seq_lens[b];
  const int64_t words = layer_bytes(model) / (4 * kPanel);
  // Cycles, about: as share_out counts them; attention reads a vector of a key and a value.
  const int64_t cycles = words * (8 + 4 * launch.num_tokens) +
                         num_keys * model.num_heads * model.head_size / 16;
  return cycles * model.num_layers < 400000;
}

// Where the activations of a launch are in the scratch memory.
template <typename T>
struct DecoderBuffers {
  T* residual;  // [T, hidden]: the residual stream
  T* hidden;    // [T, hidden]: what the last block put out; then its norm
  T* qkv;       // [T, (H + 2 G) * D]
  T* attended;  // [T, H * D]
  T* mlp;       // [rows of mlp_rows, 3 * I]
  int64_t bytes;

  static int64_t mlp_rows(const DecoderModel<T>& model, int64_t num_tokens, int num_threads) {
    if (is_cached(model)) return kOwnRows * num_threads;
    return num_tokens < kSharedRows ? num_tokens : kSharedRows;
  }

  // scratch: an address; 0 only measures.
  DecoderBuffers(const DecoderModel<T>& model, int64_t num_tokens, int num_threads,
                 uintptr_t scratch)
      : bytes(0) {
    const auto take = [&](int64_t count) {
      T* const at = reinterpret_cast<T*>(scratch + bytes);
      bytes += aligned(count * int64_t{sizeof(T)});
      return at;
    };
    const int64_t q_size = model.num_heads * model.head_size;
    residual = take(num_tokens * model.hidden_size);
    hidden = take(num_tokens * model.hidden_size);
    qkv = take(num_tokens * (q_size + 2 * model.num_kv_heads * model.head_size));
    attended = take(num_tokens * q_size);
    mlp = take(mlp_rows(model, num_tokens, num_threads) * 3 * model.intermediate_size);
  }
};

// Bytes for any launch of at most num_tokens.
template <typename T>
int64_t decoder_scratch_bytes(const DecoderModel<T>& model, int64_t num_tokens, int num_threads) {
  return DecoderBuffers<T>(model, num_tokens, num_threads, 0).bytes;
}

template <typename T>
class DecoderPass {
 public:
  DecoderPass(const DecoderModel<T>& model, DecoderLaunch& launch, int num_threads)
      : model_(model),
        launch_(launch),
        num_threads_(num_threads),
        q_size_(model.num_heads * model.head_size),
        kv_size_(model.num_kv_heads * model.head_size),
        buffers_(model, launch.num_tokens, num_threads,
                 reinterpret_cast<uintptr_t>(launch.scratch)) {}

  DecoderStatus run() {
    check();
    for (int64_t i = 0; i <= model_.num_layers && status_ == DecoderStatus::kDone; ++i) {
      run_rows(i);
      if (i < model_.num_layers && status_ == DecoderStatus::kDone) attend(model_.layers[i]);
    }
    return status_;
  }

 private:
  // From any thread; the last one stays.
  void fail(DecoderStatus status, int64_t index) {
    __atomic_store_n(&launch_.bad_index, index, __ATOMIC_RELAXED);
    __atomic_store_n(&status_, status, __ATOMIC_RELAXED);
  }

  void check() {
    const int64_t num_slots = model_.num_blocks * model_.block_size;
    const int64_t num_decodes = launch_.num_decodes;
    if (num_decodes < launch_.num_requests && launch_.query_start_loc[num_decodes] != num_decodes) {
      fail(DecoderStatus::kBadStart, num_decodes);  // rows between would be of no request
    }
    for (int64_t t = launch_.num_tokens - 1; t >= 0; --t) {
      const int64_t id = launch_.input_ids[t], position = launch_.positions[t];
      if (launch_.slot_mapping[t] >= num_slots) fail(DecoderStatus::kBadSlot, t);
      if (position < 0 || position >= model_.max_positions) fail(DecoderStatus::kBadPosition, t);
      if (id < 0 || id >= model_.vocab_size) fail(DecoderStatus::kBadToken, t);
    }
  }

  // Everything from the attention of layer i - 1 (or the token ids) to that of layer i (or the
  // result), for all rows.
  void run_rows(int64_t i) {
    const int64_t rows = launch_.num_tokens;
    if (num_threads_ > 1 && is_cached(model_) && rows >= 2 * kMaxTileRows * num_threads_) {
      const int64_t per_thread = ceil_div(rows, kOwnRows * num_threads_);
      const int64_t num_groups = per_thread * num_threads_;
      parallel_for(num_groups, 1, num_threads_, [&](int64_t group, int64_t, int worker) {
        run_group(i, rows * group / num_groups, rows * (group + 1) / num_groups, 1,
                  worker * kOwnRows);
      });
      return;
    }
    const int64_t step = is_cached(model_) ? kOwnRows : kSharedRows;
    for (int64_t begin = 0; begin < rows; begin += step) {
      run_group(i, begin, begin + step < rows ? begin + step : rows, num_threads_, 0);
    }
  }

  // The same for rows [begin, end), whose MLP uses the buffer from row mlp_row on.
  void run_group(int64_t i, int64_t begin, int64_t end, int num_threads, int64_t mlp_row) {
    const int64_t hidden = model_.hidden_size, rows = end - begin;
    T* const x = buffers_.hidden + begin * hidden;
    T* const residual = buffers_.residual + begin * hidden;
    const auto norm = [&](const T* weight, T* out) {
      for_rows(rows, 2 * hidden, num_threads, [&](int64_t row) {
        add_rms_norm_row(x + row * hidden, residual + row * hidden, weight, out + row * hidden,
                         hidden, model_.norm_eps);
      });
    };
    if (i == 0) {
      embed(begin, rows, num_threads);
    } else {
      const DecoderLayer<T>& layer = model_.layers[i - 1];
      multiply_by(*layer.output, buffers_.attended + begin * q_size_, layer.output_bias, x, rows,
                  num_threads);
      norm(layer.attention_norm, x);
      run_mlp(layer, x, rows, num_threads, mlp_row);
      if (i == model_.num_layers) {
        return norm(model_.final_norm, static_cast<T*>(launch_.out) + begin * hidden);
      }
      norm(model_.layers[i].input_norm, x);
    }
    const DecoderLayer<T>& layer = model_.layers[i];
    const int64_t qkv_size = q_size_ + 2 * kv_size_;
    multiply_by(*layer.qkv, x, layer.qkv_bias, buffers_.qkv + begin * qkv_size, rows, num_threads);
    for_rows(rows, qkv_size, num_threads, [&](int64_t row) { place(layer, begin + row); });
  }

  // No second thread before each has work for about a microsecond: a team wakes fast.
  template <typename Body>
  static void for_rows(int64_t rows, int64_t elements_per_row, int num_threads, Body body) {
    parallel_rows(rows, 2 * elements_per_row, num_threads, body);
  }

  void multiply_by(const LinearWeight& weight, const T* x, const T* bias, T* out, int64_t rows,
                   int num_threads) {
    if (linear<T>(weight, x, bias, out, rows, weight.in_features, num_threads) != 0) {
      fail(DecoderStatus::kNoMemory, 0);
    }
  }

  void embed(int64_t begin, int64_t rows, int num_threads) {
    const int64_t hidden = model_.hidden_size;
    for_rows(rows, 12 * hidden, num_threads, [&](int64_t row) {
      const int64_t id = launch_.input_ids[begin + row];
      T* const residual = buffers_.residual + (begin + row) * hidden;
      if (model_.embedding != nullptr) {
        __builtin_memcpy(residual, model_.embedding + id * hidden, hidden * sizeof(T));
      } else {
        unpack_row(*model_.packed_embedding, id, residual);
      }
      rms_norm_row(residual, model_.layers[0].input_norm, buffers_.hidden + (begin + row) * hidden,
                   hidden, model_.norm_eps);
    });
  }

  // Brings the heads of a token to where attention looks for them.
  void place(const DecoderLayer<T>& layer, int64_t t) {
    const int64_t head_size = model_.head_size, half = model_.rot_dim / 2;
    T* const query = buffers_.qkv + t * (q_size_ + 2 * kv_size_);
    T* const key = query + q_size_;
    const float* const cos = model_.cos_sin + launch_.positions[t] * model_.rot_dim;
    const auto finish = [&](T* head, const T* weight) {
      if (weight != nullptr) rms_norm_row(head, weight, head, head_size, model_.norm_eps);
      rotate_neox(head, cos, cos + half, half);
    };
    for (T* head = query; head < key; head += head_size) finish(head, layer.query_norm);
    for (T* head = key; head < key + kv_size_; head += head_size) finish(head, layer.key_norm);
    const int64_t slot = launch_.slot_mapping[t];
    if (slot < 0) return;
    __builtin_memcpy(layer.key_cache + slot * kv_size_, key, kv_size_ * sizeof(T));
    __builtin_memcpy(layer.value_cache + slot * kv_size_, key + kv_size_, kv_size_ * sizeof(T));
  }

  void run_mlp(const DecoderLayer<T>& layer, T* x, int64_t rows, int num_threads,
               int64_t mlp_row) {
    const int64_t size = model_.intermediate_size;
    T* const gate_up = buffers_.mlp + mlp_row * 3 * size;
    T* const act = gate_up + rows * 2 * size;
    multiply_by(*layer.gate_up, x, layer.gate_up_bias, gate_up, rows, num_threads);
    for_rows(rows, 4 * size, num_threads, [&](int64_t row) {
      silu_and_mul_row(gate_up + row * 2 * size, act + row * size, size);
    });
    multiply_by(*layer.down, act, layer.down_bias, x, rows, num_threads);
  }

  // What the arguments of both attention kernels have in common.
  template <typename Args>
  Args attention_args(const DecoderLayer<T>& layer, int64_t first, int64_t count) const {
    Args args = {};
    args.query = buffers_.qkv;
    args.key_cache = layer.key_cache;
    args.value_cache = layer.value_cache;
    args.block_tables = launch_.block_tables + first * launch_.table_stride;
    args.seq_lens = launch_.seq_lens + first;
    args.out = buffers_.attended;
    args.num_requests = count;
    args.num_heads = model_.num_heads;
    args.num_kv_heads = model_.num_kv_heads;
    args.head_size = model_.head_size;
    args.num_blocks = model_.num_blocks;
    args.block_size = model_.block_size;
    args.max_blocks = launch_.max_blocks;
    args.query_stride = q_size_ + 2 * kv_size_;
    args.table_stride = launch_.table_stride;
    args.scale = layer.scale;
    args.sliding_window = layer.sliding_window;
    return args;
  }

  void attend(const DecoderLayer<T>& layer) {
    const int64_t num_decodes = launch_.num_decodes;
    const int64_t num_prefills = launch_.num_requests - num_decodes;
    const auto report = [&](int64_t bad, int64_t first) {
      if (bad == -2) fail(DecoderStatus::kNoMemory, 0);
      if (bad >= 0) fail(DecoderStatus::kBadRequest, first + bad);
    };
    if (num_prefills > 0) {
      // Its rows are counted from the first token of the launch, those of the decodes included.
      auto args = attention_args<vllm_cpu::PrefillArgs<T>>(layer, num_decodes, num_prefills);
      args.query_start_loc = launch_.query_start_loc + num_decodes;
      args.num_tokens = launch_.num_tokens;
      report(paged_attention_prefill(args, num_threads_), num_decodes);
    }
    if (num_decodes > 0) {
      report(paged_attention_decode(
                 attention_args<vllm_cpu::DecodeArgs<T>>(layer, 0, num_decodes), num_threads_),
             0);
    }
  }

  const DecoderModel<T>& model_;
  DecoderLaunch& launch_;
  const int num_threads_;
  const int64_t q_size_, kv_size_;
  const DecoderBuffers<T> buffers_;
  DecoderStatus status_ = DecoderStatus::kDone;
};

// Writes launch.out. Any other status than kDone: its content is undefined, and so is that of the
// caches in the slots of the launch.
template <typename T>
int64_t decoder_forward(const DecoderModel<T>& model, DecoderLaunch& launch, int num_threads) {
  if (is_small(model, launch)) num_threads = 1;
  DecoderPass<T> pass(model, launch, num_threads);
  DecoderStatus status = DecoderStatus::kDone;
  team(num_threads, [&] { status = pass.run(); });
  return static_cast<int64_t>(status);
}

}  // namespace VLLM_ISA
