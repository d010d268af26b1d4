// Sixteen floats at a time, with the same bits on AVX-512, AVX2 and portable builds.
//
// The unit is compiled with -ffp-contract=off: a multiply and an add fuse only where fma() says so.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace graft {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct F16 {
    __m512 v;
};

inline F16 zero16() { return {_mm512_setzero_ps()}; }
inline F16 set16(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store16(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 load_part(const float* p, int n) {
    return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)};
}
inline void store_part(float* p, F16 a, int n) {
    _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v);
}
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// The second operand where either is NaN, as in maxps and minps.
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// value where x >= bound or x is NaN, else 0.
inline F16 zero_below(F16 value, F16 x, F16 bound) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ);
    return {_mm512_maskz_mov_ps(keep, value.v)};
}
// 2^n where the low bits of `biased` hold n, see exp16.
inline F16 power_of_two(F16 biased) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(biased.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23)))};
}

#elif defined(__AVX2__)

struct F16 {
    __m256 lo, hi;
};

inline F16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 set16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store16(float* p, F16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline __m256i lane_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F16 load_part(const float* p, int n) {
    return {_mm256_maskload_ps(p, lane_mask(n)), _mm256_maskload_ps(p + 8, lane_mask(n - 8))};
}
inline void store_part(float* p, F16 a, int n) {
    _mm256_maskstore_ps(p, lane_mask(n), a.lo);
    _mm256_maskstore_ps(p + 8, lane_mask(n - 8), a.hi);
}
inline F16 fma(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 operator+(F16 a, F16 b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F16 operator-(F16 a, F16 b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F16 operator*(F16 a, F16 b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F16 operator/(F16 a, F16 b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 zero_below(F16 value, F16 x, F16 bound) {
    return {_mm256_and_ps(value.lo, _mm256_cmp_ps(x.lo, bound.lo, _CMP_NLT_UQ)),
            _mm256_and_ps(value.hi, _mm256_cmp_ps(x.hi, bound.hi, _CMP_NLT_UQ))};
}
inline __m256 power_of_two8(__m256 biased) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(127 << 23)));
}
inline F16 power_of_two(F16 biased) {
    return {power_of_two8(biased.lo), power_of_two8(biased.hi)};
}

#else

struct F16 {
    float v[kLanes];
};

template <class Fn>
inline F16 each_lane(Fn&& fn) {
    F16 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = fn(i);
    return out;
}

inline F16 zero16() { return each_lane([](int) { return 0.0f; }); }
inline F16 set16(float x) { return each_lane([=](int) { return x; }); }
inline F16 load16(const float* p) { return each_lane([=](int i) { return p[i]; }); }
inline void store16(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 load_part(const float* p, int n) {
    return each_lane([=](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store_part(float* p, F16 a, int n) { std::memcpy(p, a.v, n * sizeof(float)); }
inline F16 fma(F16 a, F16 b, F16 c) {
    return each_lane([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline F16 operator+(F16 a, F16 b) { return each_lane([&](int i) { return a.v[i] + b.v[i]; }); }
inline F16 operator-(F16 a, F16 b) { return each_lane([&](int i) { return a.v[i] - b.v[i]; }); }
inline F16 operator*(F16 a, F16 b) { return each_lane([&](int i) { return a.v[i] * b.v[i]; }); }
inline F16 operator/(F16 a, F16 b) { return each_lane([&](int i) { return a.v[i] / b.v[i]; }); }
inline F16 max(F16 a, F16 b) {
    return each_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 min(F16 a, F16 b) {
    return each_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 zero_below(F16 value, F16 x, F16 bound) {
    return each_lane([&](int i) { return x.v[i] < bound.v[i] ? 0.0f : value.v[i]; });
}
inline F16 power_of_two(F16 biased) {
    return each_lane([&](int i) {
        std::uint32_t bits;
        std::memcpy(&bits, &biased.v[i], 4);
        bits = (bits << 23) + (127u << 23);
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    });
}

#endif

inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Lane i meets lane i + 8, then i + 4, i + 2, i + 1: one order on every build.
inline float sum16(F16 a) {
    alignas(64) float lane[kLanes];
    store16(lane, a);
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lane[i] = lane[i] + lane[i + width];
    }
    return lane[0];
}

inline float max16(F16 a) {
    alignas(64) float lane[kLanes];
    store16(lane, a);
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) {
            lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
        }
    }
    return lane[0];
}

// e^x within 2 units in the last place; 0 below -87, capped above 88. NaN stays NaN.
inline F16 exp16(F16 x) {
    const F16 low = set16(-87.0f), magic = set16(12582912.0f);  // 1.5 * 2^23: rounds to an integer
    const F16 inside = min(set16(88.0f), max(low, x));
    const F16 biased = fma(inside, set16(1.44269504f), magic);
    const F16 n = biased - magic;
    F16 r = fma(n, set16(-0.693145752f), inside);  // ln 2 in two parts, the first one exact
    r = fma(n, set16(-1.42860677e-6f), r);
    F16 p = set16(1.0f / 5040);
    p = fma(p, r, set16(1.0f / 720));
    p = fma(p, r, set16(1.0f / 120));
    p = fma(p, r, set16(1.0f / 24));
    p = fma(p, r, set16(1.0f / 6));
    p = fma(p, r, set16(0.5f));
    p = fma(p, r, set16(1.0f));
    p = fma(p, r, set16(1.0f));
    return zero_below(p * power_of_two(biased), x, low);
}

inline float exp1(float x) {
    alignas(64) float lane[kLanes];
    store16(lane, exp16(set16(x)));
    return lane[0];
}

}  // namespace graft
