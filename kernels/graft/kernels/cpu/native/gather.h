// Copies the numbers of a row that lie in a range, in their order. Which ones do cannot be
// predicted, so no version branches on a single number.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace graft {

// into: the numbers of z that are at least `lowest` and less than `below`, of which there are as
// many as is returned; it has space for 16 more than z has, and what is behind them is of no use.
inline std::int64_t gather(const float* z, std::int64_t count, float lowest, float below,
                           float* into) {
    std::int64_t kept = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 low = _mm512_set1_ps(lowest), high = _mm512_set1_ps(below);
    for (; i + 16 <= count; i += 16) {
        const __m512 values = _mm512_loadu_ps(z + i);
        const __mmask16 least = _mm512_cmp_ps_mask(values, low, _CMP_GE_OQ);
        const __mmask16 inside = _mm512_mask_cmp_ps_mask(least, values, high, _CMP_LT_OQ);
        _mm512_storeu_ps(into + kept, _mm512_maskz_compress_ps(inside, values));
        kept += __builtin_popcount(inside);
    }
#elif defined(__AVX2__)
    const __m256 low = _mm256_set1_ps(lowest), high = _mm256_set1_ps(below);
    for (; i + 8 <= count; i += 8) {
        const __m256 values = _mm256_loadu_ps(z + i);
        const __m256 inside = _mm256_and_ps(_mm256_cmp_ps(values, low, _CMP_GE_OQ),
                                            _mm256_cmp_ps(values, high, _CMP_LT_OQ));
        unsigned bits = unsigned(_mm256_movemask_ps(inside));
        if (bits == 0xFF) {
            _mm256_storeu_ps(into + kept, values);
            kept += 8;
            continue;
        }
        for (; bits; bits &= bits - 1) into[kept++] = z[i + __builtin_ctz(bits)];
    }
#endif
    for (; i < count; ++i) {
        into[kept] = z[i];
        kept += int(z[i] >= lowest) & int(z[i] < below);
    }
    return kept;
}

}  // namespace graft
