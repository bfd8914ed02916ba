// Chooses the experts of a token, and computes their weights.
#pragma once

#include "moe_args.h"
#include "simd.h"

namespace VLLM_ISA {

using vllm_cpu::Routing;

// The chosen experts of each token, laid out as in `choice_bytes`; the strides are the distances in
// elements from one token to the next.
struct Choices {
  int64_t* ids;
  float* weights;
  int64_t ids_stride, weights_stride;
};

inline Choices choices_at(void* row, int64_t top_k) {
  int64_t* const ids = static_cast<int64_t*>(row);
  const int64_t bytes = vllm_cpu::choice_bytes(top_k);
  return {ids, reinterpret_cast<float*>(ids + top_k), bytes / 8, bytes / 4};
}

struct ChoiceOptions {
  Routing routing;
  int64_t num_experts, top_k;
  // Number of equally large groups of experts, and of the groups from which a token may choose; 0:
  // one group.
  int64_t num_groups, top_groups;
  const float* bias;  // [num_experts]: added to the scores for the choice only; or null
  float scale;        // factor of the weights
  // For kSparseMixer: an expert with logit y is near a chosen expert with logit x if x - y is at
  // most this fraction of the larger of x and |y|.
  float tolerance;
  const float* scales;  // [num_experts]: factor of the weight of each expert; or null
};

VLLM_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

// Chooses the experts of one token from its logits.
template <typename L>
class ExpertChoice {
 public:
  ExpertChoice(const L* logits, const ChoiceOptions& options) : logits_(logits), options_(options) {
    const Routing routing = options.routing;
    is_softmax_ = routing == Routing::kSoftmax || routing == Routing::kSoftmaxOfChosen;
    if (!is_softmax_ || (routing == Routing::kSoftmaxOfChosen && options.bias == nullptr)) return;
    Vec largest = splat(-__builtin_inff()), sum = {};
    for_each_vector(options.num_experts, [&](int64_t e, int64_t count) {
      const Vec logit = load(logits + e, count);
      for (int64_t lane = 0; lane < count; ++lane) {
        if (logit[lane] > largest[lane]) largest[lane] = logit[lane];
      }
    });
    largest_ = max_lanes(largest);
    for_each_vector(options.num_experts, [&](int64_t e, int64_t count) {
      const Vec part = exp(load(logits + e, count) - largest_);
      for (int64_t lane = 0; lane < count; ++lane) sum[lane] += part[lane];
    });
    total_ = sum_lanes(sum);
  }

  // Chooses top_k experts. Among equal scores the first expert is chosen; NaN is chosen last.
  void choose(const Choices& to) const {
    const int64_t k = options_.top_k;
    float keys[vllm_cpu::kMaxTopK + 1];
    int64_t ids[vllm_cpu::kMaxTopK + 1];
    bool is_open[vllm_cpu::kMaxExpertGroups];
    const bool has_groups = options_.top_groups < options_.num_groups;
    if (has_groups) open_groups(is_open);
    const int64_t group = has_groups ? options_.num_experts / options_.num_groups : 1;
    int64_t num = 0;
    for_each_key([&](int64_t e, float key) {
      if (has_groups && !is_open[e / group]) key = -__builtin_inff();
      int64_t at = num;
      for (; at > 0 && key > keys[at - 1]; --at) keys[at] = keys[at - 1], ids[at] = ids[at - 1];
      keys[at] = key, ids[at] = e;
      if (num < k) ++num;
    });
    float weights[vllm_cpu::kMaxTopK];
    if (options_.routing == Routing::kSparseMixer) {
      weigh_sparsely(ids, weights);
    } else {
      weigh(ids, weights);
    }
    for (int64_t j = 0; j < k && options_.scales != nullptr; ++j) {
      weights[j] *= options_.scales[ids[j]];
    }
    // Written at the end, because the result may overwrite the logits.
    for (int64_t j = 0; j < k; ++j) to.ids[j] = ids[j], to.weights[j] = weights[j];
  }

 private:
  // Calls body(expert, score for the choice) for all experts.
  template <class Body>
  void for_each_key(Body body) const {
    const float* const bias = options_.bias;
    for_each_vector(options_.num_experts, [&](int64_t e, int64_t count) {
      Vec key = load(logits_ + e, count);
      if (bias != nullptr) {
        const Vec score = is_softmax_ ? exp(key - largest_) / total_ : sigmoid(key);
        key = (key == key ? score : key) + load(bias + e, count);
      }
      for (int64_t lane = 0; lane < count; ++lane) {
        body(e + lane, key[lane] == key[lane] ? key[lane] : -__builtin_inff());
      }
    });
  }

  // Marks the groups with the highest scores as open: only their experts can be chosen. The score
  // of a group is the score of its best expert or, with a bias, the sum of its two best scores.
  void open_groups(bool* is_open) const {
    const int64_t num_groups = options_.num_groups, size = options_.num_experts / num_groups;
    float best[vllm_cpu::kMaxExpertGroups], second[vllm_cpu::kMaxExpertGroups];
    for (int64_t g = 0; g < num_groups; ++g) {
      best[g] = second[g] = -__builtin_inff();
      is_open[g] = false;
    }
    for_each_key([&](int64_t e, float key) {
      const int64_t g = e / size;
      if (key > best[g]) {
        second[g] = best[g];
        best[g] = key;
      } else if (key > second[g]) {
        second[g] = key;
      }
    });
    for (int64_t left = options_.top_groups; left > 0; --left) {
      int64_t chosen = -1;
      float top = 0;
      for (int64_t g = 0; g < num_groups; ++g) {
        const float rank = options_.bias != nullptr && size > 1 ? best[g] + second[g] : best[g];
        if (!is_open[g] && (chosen < 0 || rank > top)) chosen = g, top = rank;
      }
      is_open[chosen] = true;
    }
  }

  void weigh(const int64_t* ids, float* weights) const {
    const Routing routing = options_.routing;
    const int64_t k = options_.top_k;
    float largest = largest_, total = 0;
    if (routing == Routing::kSoftmaxOfChosen) {
      largest = to_float(logits_[ids[0]]);
      for (int64_t j = 1; j < k; ++j) {
        const float logit = to_float(logits_[ids[j]]);
        if (logit > largest) largest = logit;
      }
    }
    for (int64_t j = 0; j < k; ++j) {
      const Vec logit = splat(to_float(logits_[ids[j]]));
      weights[j] = is_softmax_ ? exp(logit - largest)[0] : sigmoid(logit)[0];
      total += weights[j];
    }
    if (routing == Routing::kSoftmax) total = total_;
    if (routing == Routing::kSigmoid) total = 1;
    for (int64_t j = 0; j < k; ++j) weights[j] = options_.scale * weights[j] / total;
  }

  // Computes the weights of the chosen experts with SparseMixer (Liu et al. 2024, arXiv
  // 2409.12136).
  void weigh_sparsely(const int64_t* ids, float* weights) const {
    for (int64_t j = 0; j < options_.top_k; ++j) {
      const Vec largest = splat(to_float(logits_[ids[j]]));
      Vec sum = {};
      for_each_vector(options_.num_experts, [&](int64_t e, int64_t count) {
        const Vec logit = load(logits_ + e, count);
        const Vec distance = (largest - logit) / max(largest, max(logit, -logit));
        const Vec part = exp(logit - largest);
        for (int64_t lane = 0; lane < count; ++lane) {
          // `!(a > b)` is also true for 0 / 0.
          bool is_near = !(distance[lane] > options_.tolerance);
          for (int64_t i = 0; i < j; ++i) is_near = is_near && ids[i] != e + lane;
          if (is_near) sum[lane] += part[lane];
        }
      });
      weights[j] = options_.scale / sum_lanes(sum);
    }
  }

  const L* const logits_;
  const ChoiceOptions& options_;
  bool is_softmax_;
  float largest_ = 0, total_ = 0;  // largest logit, and sum of e^(logit - largest), for a softmax
                                   // over all experts
};

}  // namespace VLLM_ISA
