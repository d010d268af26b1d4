// Turns 16 rows of 16 floats into 16 columns. Moves bits, computes nothing.
#pragma once

#include "simd.h"

namespace graft {

// out[k * stride + r] = rows[r][k] for r, k in 0..15. Each k writes 16 floats, in order of k.
inline void transpose16(const float* const rows[kLanes], float* out, std::int64_t stride) {
#if defined(__AVX512F__)
    __m512 a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(rows[i]);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // a[i + c]: column c of each 128-bit part, rows i..i+3
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xEE);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
    for (int c = 0; c < 4; ++c) {
        const __m512 even_top = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
        const __m512 odd_top = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xDD);
        const __m512 even_low = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        const __m512 odd_low = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xDD);
        b[c] = _mm512_shuffle_f32x4(even_top, even_low, 0x88);
        b[4 + c] = _mm512_shuffle_f32x4(odd_top, odd_low, 0x88);
        b[8 + c] = _mm512_shuffle_f32x4(even_top, even_low, 0xDD);
        b[12 + c] = _mm512_shuffle_f32x4(odd_top, odd_low, 0xDD);
    }
    for (int k = 0; k < 16; ++k) _mm512_storeu_ps(out + k * stride, b[k]);
#elif defined(__AVX2__)
    alignas(32) float block[kLanes][kLanes];
    for (int r = 0; r < 16; r += 8) {
        for (int k = 0; k < 16; k += 8) {
            __m256 a[8], b[8];
            for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(rows[r + i] + k);
            for (int i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
            }
            for (int i = 0; i < 8; i += 4) {
                a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
                a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
                a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
                a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
            }
            for (int c = 0; c < 4; ++c) {
                _mm256_store_ps(&block[k + c][r], _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
                _mm256_store_ps(&block[k + 4 + c][r],
                                _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
            }
        }
    }
    for (int k = 0; k < 16; ++k) store16(out + k * stride, load16(block[k]));
#else
    for (int k = 0; k < 16; ++k) {
        for (int r = 0; r < 16; ++r) out[k * stride + r] = rows[r][k];
    }
#endif
}

}  // namespace graft
