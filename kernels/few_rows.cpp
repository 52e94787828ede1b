// Linears of few rows; few_rows.py says when. bfloat16.cpp stands before it.
#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"), always_inline)) inline

// How many inputs are multiplied at once, and how.
struct Float {
  using Number = float;
  using Vector = __m512;
  static constexpr int64_t step = 16;
  AVX512 static Vector load(const float* x) { return _mm512_loadu_ps(x); }
  AVX512 static Vector load(const float* x, int64_t left) {
    return _mm512_maskz_loadu_ps((1u << left) - 1, x);
  }
  AVX512 static __m512 add(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
  static float wide(float x) { return x; }
  static float narrow(float x) { return x; }
};

struct BFloat16 {
  using Number = uint16_t;
  using Vector = __m512bh;
  static constexpr int64_t step = 32;
  AVX512 static Vector load(const uint16_t* x) { return (__m512bh)_mm512_loadu_si512(x); }
  AVX512 static Vector load(const uint16_t* x, int64_t left) {
    return (__m512bh)_mm512_maskz_loadu_epi16((1u << left) - 1, x);
  }
  AVX512 static __m512 add(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
  static float wide(uint16_t x) { return widened(x); }
  static uint16_t narrow(float x) { return rounded(x); }
};

// R rows of x [R, K] with L rows of w [L, K]; y [R, N]: one sum for each pair.
template <typename T, int R, int L>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"), noinline)) void block(
    const typename T::Number* x, const typename T::Number* w, const typename T::Number* bias,
    typename T::Number* y, int64_t N, int64_t K) {
  __m512 sums[R][L];
  for (int r = 0; r < R; ++r)
    for (int l = 0; l < L; ++l) sums[r][l] = _mm512_setzero_ps();
  typename T::Vector weights[L];
  int64_t k = 0;
  for (; k + T::step <= K; k += T::step) {
    for (int l = 0; l < L; ++l) {
      weights[l] = T::load(w + l * K + k);
      // The same place in the rows that come next.
      _mm_prefetch((const char*)(w + (l + L) * K + k), _MM_HINT_T0);
    }
    for (int r = 0; r < R; ++r) {
      const typename T::Vector row = T::load(x + r * K + k);
      for (int l = 0; l < L; ++l) sums[r][l] = T::add(sums[r][l], weights[l], row);
    }
  }
  // Masked loads are slower, so only what is left has them.
  if (k < K) {
    for (int l = 0; l < L; ++l) weights[l] = T::load(w + l * K + k, K - k);
    for (int r = 0; r < R; ++r) {
      const typename T::Vector row = T::load(x + r * K + k, K - k);
      for (int l = 0; l < L; ++l) sums[r][l] = T::add(sums[r][l], weights[l], row);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int l = 0; l < L; ++l) {
      const float sum = _mm512_reduce_add_ps(sums[r][l]);
      y[r * N + l] = T::narrow(bias ? sum + T::wide(bias[l]) : sum);
    }
}

template <typename T, int R>
void rows(
    const void* x, const void* w, const void* bias, void* y, int64_t N, int64_t K, int64_t n) {
  using Number = typename T::Number;
  const auto* from = (const Number*)w + n * K;
  const auto* b = bias ? (const Number*)bias + n : nullptr;
  auto* to = (Number*)y + n;
  if (n + 1 < N)
    block<T, R, 2>((const Number*)x, from, b, to, N, K);
  else
    block<T, R, 1>((const Number*)x, from, b, to, N, K);
}

using Rows = void (*)(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t);
template <typename T>
static const Rows of[] = {nullptr,    rows<T, 1>, rows<T, 2>, rows<T, 3>, rows<T, 4>,
                          rows<T, 5>, rows<T, 6>, rows<T, 7>, rows<T, 8>};

// Bytes of the numbers there is a kernel for, added up: 4, 6, or 0.
extern "C" int usable() {
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return 0;
  return __builtin_cpu_supports("avx512bf16") ? 6 : 4;
}

extern "C" void few_rows_linear(
    const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N, int64_t K,
    int64_t bytes) {
  const Rows run = bytes == 4 ? of<Float>[M] : of<BFloat16>[M];
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; n += 2) run(x, w, bias, y, N, K, n);
}
#else
extern "C" int usable() { return 0; }
#endif
