// Philox4x32-10, the random words of the noise, for 16 counters at a time.
//
// Written with intrinsics because compilers give up on the 64-bit products of the plain loop where
// it is inlined into something larger.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace graft {

constexpr int kBlocks = 16;          // counters at a time
constexpr int kGroup = 4 * kBlocks;  // tokens they serve
constexpr std::uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr std::uint32_t kPhiloxK0 = 0x9E3779B9u, kPhiloxK1 = 0xBB67AE85u;

#if defined(__AVX2__)

// A lane is 64 bits wide, holds one counter's word in its lower half and anything in its upper one,
// which the product does not read.
#if defined(__AVX512F__)

using Words = __m512i;
constexpr int kWide = 8;
inline Words each(std::uint32_t word) { return _mm512_set1_epi64(word); }
inline Words counters(std::uint32_t first) {
    return _mm512_add_epi64(each(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Words times(Words a, Words b) { return _mm512_mul_epu32(a, b); }
inline Words exclusive_or(Words a, Words b) { return _mm512_xor_si512(a, b); }
inline Words upper_half(Words a) { return _mm512_srli_epi64(a, 32); }
inline Words pair(Words low, Words high) {
    return _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64(high, 32));
}
inline void store_words(Words x01, Words x23, std::uint32_t* words) {
    const Words even = _mm512_unpacklo_epi64(x01, x23), odd = _mm512_unpackhi_epi64(x01, x23);
    const Words low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const Words high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(words, _mm512_permutex2var_epi64(even, low, odd));
    _mm512_storeu_si512(words + 16, _mm512_permutex2var_epi64(even, high, odd));
}

#else

using Words = __m256i;
constexpr int kWide = 4;
inline Words each(std::uint32_t word) { return _mm256_set1_epi64x(word); }
inline Words counters(std::uint32_t first) {
    return _mm256_add_epi64(each(first), _mm256_setr_epi64x(0, 1, 2, 3));
}
inline Words times(Words a, Words b) { return _mm256_mul_epu32(a, b); }
inline Words exclusive_or(Words a, Words b) { return _mm256_xor_si256(a, b); }
inline Words upper_half(Words a) { return _mm256_srli_epi64(a, 32); }
inline Words pair(Words low, Words high) {
    return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA);
}
inline void store_words(Words x01, Words x23, std::uint32_t* words) {
    const Words even = _mm256_unpacklo_epi64(x01, x23), odd = _mm256_unpackhi_epi64(x01, x23);
    Words* to = reinterpret_cast<Words*>(words);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
}

#endif

struct Counters {
    Words x0, x1, x2, x3;

    Counters(std::uint32_t first, std::uint32_t position)
        : x0(counters(first)), x1(each(position)), x2(each(0)), x3(each(0)) {}

    void turn(Words k0, Words k1) {
        const Words product0 = times(x0, each(kPhiloxM0)), product1 = times(x2, each(kPhiloxM1));
        x0 = exclusive_or(exclusive_or(upper_half(product1), x1), k0);
        x1 = product1;
        x2 = exclusive_or(exclusive_or(upper_half(product0), x3), k1);
        x3 = product0;
    }

    void store(std::uint32_t* words) const { store_words(pair(x0, x1), pair(x2, x3), words); }
};

// words[4 * i + w] is word w of Philox4x32-10 at counter (first + i, position, 0, 0).
inline void philox_group(std::uint64_t seed, std::uint32_t first, std::uint32_t position,
                         std::uint32_t* words) {
    for (int i = 0; i < kBlocks; i += 2 * kWide) {  // two at a time hide the products' latency
        Counters a(first + std::uint32_t(i), position);
        Counters b(first + std::uint32_t(i + kWide), position);
        std::uint32_t k0 = std::uint32_t(seed), k1 = std::uint32_t(seed >> 32);
        for (int round = 0; round < 10; ++round) {
            a.turn(each(k0), each(k1));
            b.turn(each(k0), each(k1));
            k0 += kPhiloxK0;
            k1 += kPhiloxK1;
        }
        a.store(words + 4 * i);
        b.store(words + 4 * (i + kWide));
    }
}

#else

inline void philox_group(std::uint64_t seed, std::uint32_t first, std::uint32_t position,
                         std::uint32_t* words) {
    std::uint32_t x0[kBlocks], x1[kBlocks], x2[kBlocks], x3[kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
        x0[i] = first + std::uint32_t(i);
        x1[i] = position;
        x2[i] = 0;
        x3[i] = 0;
    }
    std::uint32_t k0 = std::uint32_t(seed), k1 = std::uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < kBlocks; ++i) {
            const std::uint64_t product0 = std::uint64_t(x0[i]) * kPhiloxM0;
            const std::uint64_t product1 = std::uint64_t(x2[i]) * kPhiloxM1;
            x0[i] = std::uint32_t(product1 >> 32) ^ x1[i] ^ k0;
            x1[i] = std::uint32_t(product1);
            x2[i] = std::uint32_t(product0 >> 32) ^ x3[i] ^ k1;
            x3[i] = std::uint32_t(product0);
        }
        k0 += kPhiloxK0;
        k1 += kPhiloxK1;
    }
    for (int i = 0; i < kBlocks; ++i) {
        words[4 * i] = x0[i];
        words[4 * i + 1] = x1[i];
        words[4 * i + 2] = x2[i];
        words[4 * i + 3] = x3[i];
    }
}

#endif

}  // namespace graft
