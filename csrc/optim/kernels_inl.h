// SPDX-License-Identifier: Apache-2.0
//
// The one source of all variants. Included by kernels_<isa>.cpp inside an unnamed namespace, after its vector type
// V; no include guard and no includes of its own, so that nothing in here can be shared between instruction sets.
//
// V: kWidth lanes of float in V::reg; V::half holds as many 16-bit values. Operation order is that of torch's
// fused CPU steps (AdamW, Adam) and of its plain ones (SGD, Adagrad), so that results agree with them bit for bit
// on normal input.

constexpr std::size_t kBlock = 32;  // elements per turn: a full cache line of the 16-bit types

template <DType G>
inline V::reg load_grad(const void* grad, std::size_t i) {
  if constexpr (G == DType::f32) return V::load(static_cast<const float*>(grad) + i);
  if constexpr (G == DType::bf16) return V::load_bf16(static_cast<const std::uint16_t*>(grad) + i);
  if constexpr (G == DType::f16) return V::load_fp16(static_cast<const std::uint16_t*>(grad) + i);
}

template <bool Stream>
inline void put(float* to, V::reg value) {
  if constexpr (Stream) {
    V::stream(to, value);
  } else {
    V::store(to, value);
  }
}

// The arguments in registers: the compiler must assume that a store through a float* changes a StepArgs, and would
// load and broadcast each of them anew for every vector.
struct Factors {
  explicit Factors(const StepArgs& a)
      : weight(a.weight),
        grad(a.grad),
        state0(a.state[0]),
        state1(a.state[1]),
        state2(a.state[2]),
        grad_scale(V::set(a.grad_scale)),
        l2(V::set(a.l2)),
        decay(V::set(a.decay)),
        step(V::set(a.step)),
        lerp(V::set(a.lerp)),
        beta1(V::set(a.beta1)),
        grad_share1(V::set(a.grad_share1)),
        beta2(V::set(a.beta2)),
        grad_share2(V::set(a.grad_share2)),
        root_scale(V::set(a.root_scale)),
        root_reciprocal(V::set(1.0f / a.root_scale)),
        eps(V::set(a.eps)),
        largest(V::set(FLT_MAX)),
        has_l2(a.l2 != 0),
        lerp_from_grad(a.lerp_from_grad),
        nesterov(a.nesterov),
        first(a.first) {}

  float* const weight;
  const void* const grad;
  float *const state0, *const state1, *const state2;
  const V::reg grad_scale, l2, decay, step, lerp, beta1, grad_share1, beta2, grad_share2, root_scale,
      root_reciprocal, eps, largest;
  const bool has_l2, lerp_from_grad, nesterov, first;
};

// x / c for x >= 0 and a constant c: the quotient from the reciprocal, corrected by its remainder (Markstein
// 1990). Leaves the divider, the scarcest unit of an AdamW step, to the one true division. Infinity has no
// remainder: any finite one keeps it infinite.
inline V::reg divide_by_root_scale(const Factors& f, V::reg x) {
  const V::reg quotient = V::mul(x, f.root_reciprocal);
  const V::reg remainder = V::min_or_bound(V::fnma(quotient, f.root_scale, x), f.largest);
  return V::fma(remainder, f.root_reciprocal, quotient);
}

// The moments of Adam at element i.
struct Moments {
  V::reg first, second;
};

template <Rule R, bool Stream>
inline Moments update_moments(const Factors& f, std::size_t i, V::reg g) {
  // m + w (g - m), with the rounding that torch's lerp has on either side of w = 0.5.
  const V::reg old = V::load(f.state0 + i);
  const V::reg m = V::fma(f.lerp, V::sub(g, old), f.lerp_from_grad ? g : old);
  V::reg v = V::mul(V::load(f.state1 + i), f.beta2);
  v = V::fma(V::mul(f.grad_share2, g), g, v);
  put<Stream>(f.state0 + i, m);
  put<Stream>(f.state1 + i, v);
  if constexpr (R == Rule::adam_amsgrad) {
    v = V::max_or_nan(V::load(f.state2 + i), v);
    put<Stream>(f.state2 + i, v);
  }
  return {m, v};
}

inline V::reg adam_weight(const Factors& f, V::reg p, V::reg m, V::reg root) {
  const V::reg denominator = V::add(divide_by_root_scale(f, root), f.eps);
  return V::add(V::mul(p, f.decay), V::div(V::mul(f.step, m), denominator));
}

// One vector at element i: reads everything, writes weight and state, returns the new weight.
template <Rule R, DType G, bool Stream>
inline V::reg update(const Factors& f, std::size_t i) {
  V::reg p = V::load(f.weight + i);
  V::reg g = V::mul(load_grad<G>(f.grad, i), f.grad_scale);
  if (R != Rule::lion && f.has_l2) g = V::fma(p, f.l2, g);
  if constexpr (R == Rule::adam || R == Rule::adam_amsgrad) {
    const Moments moments = update_moments<R, Stream>(f, i, g);
    p = adam_weight(f, p, moments.first, V::sqrt(moments.second));
  } else if constexpr (R == Rule::sgd) {
    p = V::fma(g, f.step, p);
  } else if constexpr (R == Rule::sgd_momentum) {
    V::reg buffer = g;
    if (!f.first) buffer = V::fma(g, f.grad_share1, V::mul(V::load(f.state0 + i), f.beta1));
    put<Stream>(f.state0 + i, buffer);
    p = V::fma(f.nesterov ? V::fma(buffer, f.beta1, g) : buffer, f.step, p);
  } else if constexpr (R == Rule::lion) {
    p = V::mul(p, f.decay);
    const V::reg m = V::load(f.state0 + i);
    const V::reg direction = V::fma(f.grad_share1, g, V::mul(f.beta1, m));
    put<Stream>(f.state0 + i, V::fma(f.grad_share2, g, V::mul(f.beta2, m)));
    p = V::fma(V::sign(direction), f.step, p);
  } else {
    static_assert(R == Rule::adagrad);
    const V::reg sum = V::fma(g, g, V::load(f.state0 + i));
    put<Stream>(f.state0 + i, sum);
    p = V::add(p, V::div(V::mul(f.step, g), V::add(V::sqrt(sum), f.eps)));
  }
  put<Stream>(f.weight + i, p);
  return p;
}

// `compute(i)` for every vector of whole blocks, and the copy of what it returns.
template <DType C, class Compute>
inline void with_copy(std::uint16_t* copy, std::size_t begin, std::size_t end, bool stream,
                      const Compute& compute) {
  for (std::size_t i = begin; i < end; i += kBlock) {
    [[maybe_unused]] V::half halves[kBlock / V::kWidth] = {};
    for (std::size_t u = 0; u < kBlock / V::kWidth; ++u) {
      const V::reg p = compute(i + u * V::kWidth);
      if constexpr (C == DType::bf16) halves[u] = V::to_bf16(p);
      if constexpr (C == DType::f16) halves[u] = V::to_fp16(p);
    }
    if constexpr (C == DType::none) continue;
    for (std::size_t u = 0; u < kBlock / V::kWidth; ++u) {  // together: one line leaves the write buffers at once
      if (stream) {
        V::stream_half(copy + i + u * V::kWidth, halves[u]);
      } else {
        V::store_half(copy + i + u * V::kWidth, halves[u]);
      }
    }
  }
}

// Elements between two calls for roots: enough to hide the call, few enough to stay in the first cache.
constexpr std::size_t kRoots = 1024;

// Adam with the roots of somebody else: moments, all roots of a stretch, weights.
template <Rule R, DType G, bool Stream, DType C>
void with_foreign_roots(const StepArgs& a, const Factors& f, std::size_t begin, std::size_t end,
                        bool stream_copy) {
  alignas(64) float roots[kRoots];
  for (std::size_t at = begin; at < end; at += kRoots) {
    const std::size_t stop = end - at < kRoots ? end : at + kRoots;
    for (std::size_t i = at; i < stop; i += V::kWidth) {
      V::reg g = V::mul(load_grad<G>(f.grad, i), f.grad_scale);
      if (f.has_l2) g = V::fma(V::load(f.weight + i), f.l2, g);
      V::store(roots + (i - at), update_moments<R, false>(f, i, g).second);
    }
    a.roots(static_cast<int>(stop - at), roots, roots, a.roots_mode);
    with_copy<C>(a.copy, at, stop, stream_copy, [&](std::size_t i) {
      const V::reg p = adam_weight(f, V::load(f.weight + i), V::load(f.state0 + i), V::load(roots + (i - at)));
      put<Stream>(f.weight + i, p);
      return p;
    });
  }
}

template <Rule R, DType G, bool Stream, DType C>
void whole_blocks(const StepArgs& a, std::size_t begin, std::size_t end, bool stream_copy) {
  const Factors f(a);
  if constexpr (R == Rule::adam || R == Rule::adam_amsgrad) {
    if (a.roots != nullptr) return with_foreign_roots<R, G, Stream, C>(a, f, begin, end, stream_copy);
  }
  with_copy<C>(a.copy, begin, end, stream_copy, [&](std::size_t i) { return update<R, G, Stream>(f, i); });
}

template <Rule R, DType G, bool Stream>
void blocks(const StepArgs& a, std::size_t begin, std::size_t end, bool stream_copy) {
  if (a.copy == nullptr) return whole_blocks<R, G, Stream, DType::none>(a, begin, end, false);
  if (a.copy_type == DType::f16) return whole_blocks<R, G, Stream, DType::f16>(a, begin, end, stream_copy);
  whole_blocks<R, G, Stream, DType::bf16>(a, begin, end, stream_copy);
}

inline bool lines_up(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 64 == 0; }

template <Rule R, DType G>
void step_as(const StepArgs& a, std::size_t begin, std::size_t end) {
  const std::size_t middle = begin + (end - begin) / kBlock * kBlock;
  bool aligned = lines_up(a.weight + begin);
  for (const float* state : a.state) aligned = aligned && (state == nullptr || lines_up(state + begin));
  const bool stream_copy = (a.stream & kStreamOut) != 0 && a.copy != nullptr && lines_up(a.copy + begin);
  if ((a.stream & kStreamState) != 0 && aligned) {
    blocks<R, G, true>(a, begin, middle, stream_copy);
  } else {
    blocks<R, G, false>(a, begin, middle, stream_copy);
  }
  if (a.stream != 0) V::fence();
  const std::size_t rest = end - middle;
  if (rest == 0) return;
  // The tail: the same vector code over a padded copy. Zeros are harmless in every rule.
  float weight[kBlock] = {}, state[3][kBlock] = {};
  alignas(64) unsigned char grad[kBlock * sizeof(float)] = {};
  std::uint16_t copy[kBlock] = {};
  constexpr std::size_t grad_size = G == DType::f32 ? 4 : 2;
  StepArgs t = a;
  std::memcpy(weight, a.weight + middle, rest * sizeof(float));
  std::memcpy(grad, static_cast<const unsigned char*>(a.grad) + middle * grad_size, rest * grad_size);
  t.weight = weight;
  t.grad = grad;
  for (int k = 0; k < 3; ++k) {
    if (a.state[k] == nullptr) continue;
    std::memcpy(state[k], a.state[k] + middle, rest * sizeof(float));
    t.state[k] = state[k];
  }
  if (a.copy != nullptr) t.copy = copy;
  blocks<R, G, false>(t, 0, kBlock, false);
  std::memcpy(a.weight + middle, weight, rest * sizeof(float));
  for (int k = 0; k < 3; ++k) {
    if (a.state[k] != nullptr) std::memcpy(a.state[k] + middle, state[k], rest * sizeof(float));
  }
  if (a.copy != nullptr) std::memcpy(a.copy + middle, copy, rest * sizeof(std::uint16_t));
}

template <Rule R>
void step_rule(const StepArgs& a, std::size_t begin, std::size_t end) {
  switch (a.grad_type) {
    case DType::bf16:
      return step_as<R, DType::bf16>(a, begin, end);
    case DType::f16:
      return step_as<R, DType::f16>(a, begin, end);
    default:
      return step_as<R, DType::f32>(a, begin, end);
  }
}

void step(const StepArgs& a, std::size_t begin, std::size_t end) {
  const V::DefaultRounding rounding;
  switch (a.rule) {
    case Rule::adam:
      return step_rule<Rule::adam>(a, begin, end);
    case Rule::adam_amsgrad:
      return step_rule<Rule::adam_amsgrad>(a, begin, end);
    case Rule::sgd:
      return step_rule<Rule::sgd>(a, begin, end);
    case Rule::sgd_momentum:
      return step_rule<Rule::sgd_momentum>(a, begin, end);
    case Rule::lion:
      return step_rule<Rule::lion>(a, begin, end);
    case Rule::adagrad:
      return step_rule<Rule::adagrad>(a, begin, end);
  }
}

constexpr std::size_t kLanes = 16;

// Squares of floats are exact in double, so a fused and a separate multiplication add up to the same bits.
template <DType G>
double squared_norm_as(const void* data, std::size_t begin, std::size_t end) {
  typedef float floats __attribute__((vector_size(4 * sizeof(float))));
  typedef double doubles __attribute__((vector_size(4 * sizeof(double))));
  doubles sums[kLanes / 4] = {};
  for (std::size_t i = begin; i < end; i += kLanes) {
    float block[kLanes] = {};
    if (end - i >= kLanes) {
      for (std::size_t u = 0; u < kLanes; u += V::kWidth) V::store(block + u, load_grad<G>(data, i + u));
    } else {
      alignas(64) unsigned char padded[kLanes * sizeof(float)] = {};
      constexpr std::size_t size = G == DType::f32 ? 4 : 2;
      std::memcpy(padded, static_cast<const unsigned char*>(data) + i * size, (end - i) * size);
      for (std::size_t u = 0; u < kLanes; u += V::kWidth) V::store(block + u, load_grad<G>(padded, u));
    }
    for (std::size_t k = 0; k < kLanes / 4; ++k) {
      floats four;
      std::memcpy(&four, block + 4 * k, sizeof four);
      const doubles wide = __builtin_convertvector(four, doubles);
      sums[k] += wide * wide;
    }
  }
  const doubles total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return (total[0] + total[1]) + (total[2] + total[3]);
}

double squared_norm(const void* data, DType type, std::size_t begin, std::size_t end) {
  const V::DefaultRounding rounding;
  if (type == DType::bf16) return squared_norm_as<DType::bf16>(data, begin, end);
  if (type == DType::f16) return squared_norm_as<DType::f16>(data, begin, end);
  return squared_norm_as<DType::f32>(data, begin, end);
}

// An exponent of all ones, on the bits: plain loops that compilers vectorise.
template <class T, T Mask>
bool exponent_full(const T* data, std::size_t begin, std::size_t end) {
  constexpr std::size_t turn = 1024;
  for (std::size_t i = begin; i < end; i += turn) {
    const std::size_t stop = end - i < turn ? end : i + turn;
    T found = 0;
    for (std::size_t k = i; k < stop; ++k) found = static_cast<T>(found | ((data[k] & Mask) == Mask ? 1 : 0));
    if (found != 0) return true;
  }
  return false;
}

bool nonfinite(const void* data, DType type, std::size_t begin, std::size_t end) {
  const auto* halves = static_cast<const std::uint16_t*>(data);
  if (type == DType::bf16) return exponent_full<std::uint16_t, 0x7f80>(halves, begin, end);
  if (type == DType::f16) return exponent_full<std::uint16_t, 0x7c00>(halves, begin, end);
  return exponent_full<std::uint32_t, 0x7f800000>(static_cast<const std::uint32_t*>(data), begin, end);
}

template <DType G, bool Stream>
void bandwidth_as(const StepArgs& a, std::size_t begin, std::size_t end) {
  const V::reg half = V::set(0.5f);
  for (std::size_t i = begin; i + kBlock <= end; i += kBlock) {
    V::half halves[kBlock / V::kWidth] = {};
    for (std::size_t u = 0; u < kBlock / V::kWidth; ++u) {
      const std::size_t k = i + u * V::kWidth;
      const V::reg g = load_grad<G>(a.grad, k);
      const V::reg p = V::fma(half, V::load(a.weight + k), g);
      put<Stream>(a.weight + k, p);
      put<Stream>(a.state[0] + k, V::fma(half, V::load(a.state[0] + k), g));
      put<Stream>(a.state[1] + k, V::fma(half, V::load(a.state[1] + k), g));
      if (a.copy != nullptr) halves[u] = V::to_bf16(p);
    }
    if (a.copy == nullptr) continue;
    for (std::size_t u = 0; u < kBlock / V::kWidth; ++u) V::store_half(a.copy + i + u * V::kWidth, halves[u]);
  }
  if (Stream) V::fence();
}

void bandwidth(const StepArgs& a, std::size_t begin, std::size_t end) {
  const bool bf16 = a.grad_type == DType::bf16;
  if ((a.stream & kStreamState) != 0) {
    bf16 ? bandwidth_as<DType::bf16, true>(a, begin, end) : bandwidth_as<DType::f32, true>(a, begin, end);
  } else {
    bf16 ? bandwidth_as<DType::bf16, false>(a, begin, end) : bandwidth_as<DType::f32, false>(a, begin, end);
  }
}
