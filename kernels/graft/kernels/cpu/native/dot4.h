// Sixteen sums of four products of bytes: exact, so every build gives the same.
#pragma once

#include "simd.h"

namespace graft {

// Four weights each of 16 outputs. Nibbles hold 0..15; bytes hold the weight + 128.
struct W16 {
#if defined(__AVX512F__)
    __m512i v;
#elif defined(__AVX2__)
    __m256i lo, hi;
#else
    std::uint8_t v[64];
#endif
};

struct I16 {
#if defined(__AVX512F__)
    __m512i v;
#elif defined(__AVX2__)
    __m256i lo, hi;
#else
    std::int32_t v[kLanes];
#endif
};

#if defined(__AVX512F__)

inline W16 load_weights(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline W16 low_nibbles(W16 w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
inline W16 high_nibbles(W16 w) {
    return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(15))};
}
inline I16 set_int16(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// The instruction takes weights + 128; the 128s are taken back by where the sum starts.
inline I16 start_bytes(std::int32_t sum_of_x) { return set_int16(-128 * sum_of_x); }
inline I16 dot_nibbles(I16 sum, W16 w, const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(four))};
}
inline I16 dot_bytes(I16 sum, W16 w, const std::int8_t* x) { return dot_nibbles(sum, w, x); }

#elif defined(__AVX2__)

inline W16 load_weights(const std::uint8_t* p) {
    const auto* parts = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(parts), _mm256_loadu_si256(parts + 1)};
}
inline W16 low_nibbles(W16 w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
inline W16 high_nibbles(W16 w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(w.lo, 4), mask),
            _mm256_and_si256(_mm256_srli_epi16(w.hi, 4), mask)};
}
inline I16 set_int16(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I16 start_bytes(std::int32_t) { return set_int16(0); }
// Pairs of products stay below 2^15: 2 * 15 * 127 for nibbles, 2 * 128 * 127 for bytes.
inline __m256i add_products(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline __m256i four_of(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
inline I16 dot_nibbles(I16 sum, W16 w, const std::int8_t* x) {
    const __m256i four = four_of(x);
    return {add_products(sum.lo, w.lo, four), add_products(sum.hi, w.hi, four)};
}
inline __m256i dot_signed(__m256i sum, __m256i biased, __m256i four) {
    const __m256i w = _mm256_xor_si256(biased, _mm256_set1_epi8(-128));
    return add_products(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
}
inline I16 dot_bytes(I16 sum, W16 w, const std::int8_t* x) {
    const __m256i four = four_of(x);
    return {dot_signed(sum.lo, w.lo, four), dot_signed(sum.hi, w.hi, four)};
}

#else

inline W16 load_weights(const std::uint8_t* p) {
    W16 w;
    std::memcpy(w.v, p, 64);
    return w;
}
inline W16 low_nibbles(W16 w) {
    for (auto& byte : w.v) byte = byte & 15;
    return w;
}
inline W16 high_nibbles(W16 w) {
    for (auto& byte : w.v) byte = byte >> 4;
    return w;
}
inline I16 set_int16(std::int32_t x) {
    I16 out;
    for (auto& lane : out.v) lane = x;
    return out;
}
inline F16 to_float(I16 a) {
    return each_lane([&](int i) { return float(a.v[i]); });
}
inline I16 start_bytes(std::int32_t sum_of_x) { return set_int16(-128 * sum_of_x); }
inline I16 dot_nibbles(I16 sum, W16 w, const std::int8_t* x) {
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < 4; ++i) sum.v[lane] += int(w.v[4 * lane + i]) * int(x[i]);
    }
    return sum;
}
inline I16 dot_bytes(I16 sum, W16 w, const std::int8_t* x) { return dot_nibbles(sum, w, x); }

#endif

}  // namespace graft
