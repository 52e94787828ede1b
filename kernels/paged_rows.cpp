// Attention of single rows over pages; see paged_rows.py. bfloat16.cpp stands before it.
#include <algorithm>
#include <cmath>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads() { return 1; }
#endif

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));

#define INLINE __attribute__((always_inline)) static inline

INLINE F load(const float* x) {
  F y;
  std::memcpy(&y, x, sizeof y);
  return y;
}

INLINE F load(const uint16_t* x) {
  H half;
  std::memcpy(&half, x, sizeof half);
  const U bits = __builtin_convertvector(half, U) << 16;
  F y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

INLINE void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }

INLINE void put(float* to, float x) { *to = x; }

INLINE void put(uint16_t* to, float x) { *to = rounded(x); }

INLINE float total(F x) {
  F8 a, b;
  std::memcpy(&a, &x, 32);
  std::memcpy(&b, (const char*)&x + 32, 32);
  a += b;
  F4 c, d;
  std::memcpy(&c, &a, 16);
  std::memcpy(&d, (const char*)&a + 16, 16);
  c += d;
  return (c[0] + c[1]) + (c[2] + c[3]);
}

INLINE float largest(F x) {
  float y = x[0];
  for (int i = 1; i < 16; ++i) y = x[i] > y ? x[i] : y;
  return y;
}

// e^x of x <= 0, after Cody and Waite: 2^n e^r with |r| <= ln(2) / 2; 0 below the normal numbers.
INLINE F power_of_e(F x) {
  const F lowest = F{} - 87.0f;
  const F y = x < lowest ? lowest : x;
  // Adding this number rounds to whole ones.
  const float magic = 12582912.0f;
  const F n = (y * 1.44269504f + magic) - magic;
  const F r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = r * 1.9875691e-4f + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0000001e-1f;
  p = p * r * r + r + 1.0f;
  const I exponent = (__builtin_convertvector(n, I) + 127) << 23;
  F scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return x < lowest ? F{} : p * scale;
}

constexpr int KEYS = 16;

// Scores of up to G heads with 16 keys; k: where each lies.
template <int G, typename T>
INLINE void scores(const float* q, const T* const* k, int keys, int64_t D, float* out) {
  for (int j = 0; j < keys; ++j) {
    F sums[G] = {};
    for (int64_t d = 0; d < D; d += 16) {
      const F key = load(k[j] + d);
      for (int g = 0; g < G; ++g) sums[g] += load(q + g * D + d) * key;
    }
    for (int g = 0; g < G; ++g) out[g * KEYS + j] = total(sums[g]);
  }
}

// acc += weights of up to G heads times the values of 16 keys, W vectors of them at a time.
template <int G, int W, typename T>
INLINE void values(
    const float* weights, const T* const* v, int keys, int64_t d, int64_t Dv, float* acc) {
  F sums[G][W];
  for (int g = 0; g < G; ++g)
    for (int w = 0; w < W; ++w) sums[g][w] = load(acc + g * Dv + d + 16 * w);
  for (int j = 0; j < keys; ++j)
    for (int w = 0; w < W; ++w) {
      const F value = load(v[j] + d + 16 * w);
      for (int g = 0; g < G; ++g) sums[g][w] += weights[g * KEYS + j] * value;
    }
  for (int g = 0; g < G; ++g)
    for (int w = 0; w < W; ++w) store(acc + g * Dv + d + 16 * w, sums[g][w]);
}

template <int G, typename T>
INLINE void all_values(
    const float* weights, const T* const* v, int keys, int64_t Dv, float* acc) {
  int64_t d = 0;
  for (; d + 64 <= Dv; d += 64) values<G, 4>(weights, v, keys, d, Dv, acc);
  for (; d < Dv; d += 16) values<G, 1>(weights, v, keys, d, Dv, acc);
}

struct Sizes {
  int64_t members, q_heads, k_heads, D, Dv, block_size, blocks, table_width, table_stride;
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
};

struct Task {
  int64_t member, head, low, high;
};

// One key head of one row over some of its keys; acc [G, Dv], top [G], sum [G].
template <typename T>
static bool part(
    const Sizes& n, const Task& task, const T* q, const T* k, const T* v, const int32_t* table,
    float scale, float softcap, float* acc, float* top, float* sum) {
  const int64_t G = n.q_heads / n.k_heads;
  std::vector<float> wide(G * n.D), weights(G * KEYS);
  for (int64_t i = 0; i < G * n.D; i += 16) store(&wide[i], load(q + i) * scale);
  std::fill(acc, acc + G * n.Dv, 0.0f);
  std::fill(top, top + G, -INFINITY);
  std::fill(sum, sum + G, 0.0f);
  const T* keys_at[KEYS];
  const T* values_at[KEYS];
  for (int64_t at = task.low; at < task.high; at += KEYS) {
    const int keys = (int)std::min<int64_t>(KEYS, task.high - at);
    for (int j = 0; j < keys; ++j) {
      const int64_t place = (at + j) / n.block_size, slot = (at + j) % n.block_size;
      if (place >= n.table_width) return false;
      const int64_t block = table[place];
      if (block < 0 || block >= n.blocks) return false;
      keys_at[j] = k + block * n.k_block + slot * n.k_slot + task.head * n.k_head;
      values_at[j] = v + block * n.v_block + slot * n.v_slot + task.head * n.v_head;
      // They come while the keys are multiplied.
      for (int64_t d = 0; d < n.Dv; d += 64 / sizeof(T)) __builtin_prefetch(values_at[j] + d);
    }
    std::fill(weights.begin(), weights.end(), -INFINITY);
    int64_t g = 0;
    for (; g + 4 <= G; g += 4) scores<4>(&wide[g * n.D], keys_at, keys, n.D, &weights[g * KEYS]);
    for (; g + 2 <= G; g += 2) scores<2>(&wide[g * n.D], keys_at, keys, n.D, &weights[g * KEYS]);
    for (; g < G; ++g) scores<1>(&wide[g * n.D], keys_at, keys, n.D, &weights[g * KEYS]);
    for (g = 0; g < G; ++g) {
      float* row = &weights[g * KEYS];
      if (softcap > 0)
        for (int j = 0; j < keys; ++j) row[j] = softcap * std::tanh(row[j] / softcap);
      const F score = load(row);
      const float high = largest(score);
      if (high > top[g]) {
        const float rescale = std::exp(top[g] - high);
        sum[g] *= rescale;
        for (int64_t d = 0; d < n.Dv; ++d) acc[g * n.Dv + d] *= rescale;
        top[g] = high;
      }
      const F weight = power_of_e(score - top[g]);
      sum[g] += total(weight);
      store(row, weight);
    }
    for (g = 0; g + 4 <= G; g += 4)
      all_values<4>(&weights[g * KEYS], values_at, keys, n.Dv, acc + g * n.Dv);
    for (; g + 2 <= G; g += 2)
      all_values<2>(&weights[g * KEYS], values_at, keys, n.Dv, acc + g * n.Dv);
    for (; g < G; ++g) all_values<1>(&weights[g * KEYS], values_at, keys, n.Dv, acc + g * n.Dv);
  }
  return true;
}

// members [M, 4]: sequence, row, low, high. Returns whether every block was one of the pages.
template <typename T>
static int run(
    const Sizes& n, const T* q, const T* k, const T* v, const int32_t* tables,
    const int64_t* members, T* out, float* lse, float scale, float softcap) {
  const int64_t G = n.q_heads / n.k_heads;
  int64_t keys = 0;
  for (int64_t m = 0; m < n.members; ++m) keys += members[4 * m + 3] - members[4 * m + 2];
  // Some parts per thread, none too short.
  const int64_t wanted = keys * n.k_heads / (4 * omp_get_max_threads());
  const int64_t longest = std::max<int64_t>(256, (wanted + KEYS - 1) / KEYS * KEYS);
  std::vector<Task> tasks;
  std::vector<int64_t> first;
  for (int64_t m = 0; m < n.members; ++m)
    for (int64_t head = 0; head < n.k_heads; ++head) {
      first.push_back((int64_t)tasks.size());
      const int64_t high = members[4 * m + 3];
      for (int64_t low = members[4 * m + 2]; low < high; low += longest)
        tasks.push_back({m, head, low, std::min(high, low + longest)});
    }
  first.push_back((int64_t)tasks.size());
  const int64_t count = (int64_t)tasks.size(), width = G * (n.Dv + 2);
  std::vector<float> partial(count * width);
  int known = 1;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) {
    const Task& task = tasks[i];
    const int64_t* member = members + 4 * task.member;
    const T* row = q + (member[1] * n.q_heads + task.head * G) * n.D;
    float* acc = &partial[i * width];
    float* top = acc + G * n.Dv;
    if (!part(n, task, row, k, v, tables + member[0] * n.table_stride, scale, softcap, acc, top,
              top + G)) {
#pragma omp atomic write
      known = 0;
    }
  }
  if (!known) return 0;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n.members * n.k_heads; ++i) {
    const int64_t row = members[4 * (i / n.k_heads) + 1];
    for (int64_t g = 0; g < G; ++g) {
      float top = -INFINITY, sum = 0;
      for (int64_t j = first[i]; j < first[i + 1]; ++j)
        top = std::max(top, partial[j * width + G * n.Dv + g]);
      const int64_t head = row * n.q_heads + i % n.k_heads * G + g;
      std::vector<float> acc(n.Dv);
      for (int64_t j = first[i]; j < first[i + 1]; ++j) {
        const float* other = &partial[j * width];
        const float share = std::exp(other[G * n.Dv + g] - top);
        sum += share * other[G * n.Dv + G + g];
        for (int64_t d = 0; d < n.Dv; ++d) acc[d] += share * other[g * n.Dv + d];
      }
      for (int64_t d = 0; d < n.Dv; ++d) put(out + head * n.Dv + d, acc[d] / sum);
      lse[head] = top + std::log(sum);
    }
  }
  return 1;
}

extern "C" int paged_rows(
    const void* q, const void* k, const void* v, const void* tables, const void* members, void* out,
    void* lse, const Sizes* sizes, double scale, double softcap, int64_t bytes) {
  const auto* table = (const int32_t*)tables;
  const auto* which = (const int64_t*)members;
  if (bytes == 4)
    return run(*sizes, (const float*)q, (const float*)k, (const float*)v, table, which, (float*)out,
               (float*)lse, (float)scale, (float)softcap);
  return run(*sizes, (const uint16_t*)q, (const uint16_t*)k, (const uint16_t*)v, table, which,
             (uint16_t*)out, (float*)lse, (float)scale, (float)softcap);
}
