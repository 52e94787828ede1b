// bfloat16 as its bits, to and from float.
#include <cstdint>
#include <cstring>

static inline float widened(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

static inline uint16_t rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // To nearest even; a NaN stays one.
  bits = x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
  return uint16_t(bits >> 16);
}
