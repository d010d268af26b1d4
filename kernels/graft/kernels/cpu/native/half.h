// float16 to float32, exact.
#pragma once

#include "simd.h"

namespace graft {

inline float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t(half & 0x8000) << 16;
    const int exponent = (half >> 10) & 31;
    const std::uint32_t fraction = half & 1023;
    std::uint32_t bits;
    if (exponent == 0) {
        const float small = float(fraction) * 0x1p-24f;
        std::memcpy(&bits, &small, 4);
    } else if (exponent == 31) {
        bits = 0x7F800000 | (fraction << 13);
    } else {
        bits = std::uint32_t(exponent + 112) << 23 | fraction << 13;
    }
    bits |= sign;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline F16 load_half16(const std::uint16_t* p) {
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#elif defined(__AVX2__)
    const auto* parts = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(parts)), _mm256_cvtph_ps(_mm_loadu_si128(parts + 1))};
#else
    return each_lane([=](int i) { return half_to_float(p[i]); });
#endif
}

}  // namespace graft
