// Copies past the caches, of what is not read again soon: a line that is written as a whole need not be read first.
#pragma once

#if !defined(__aarch64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

constexpr long kLine = 64;

#if defined(__aarch64__)

// Cores that see a long run of stores write it past their caches by themselves.
inline void stream_copy(void* to, const void* from, long bytes) { std::memcpy(to, from, bytes); }

inline void end_streams() {}

#else

// What whole lines of `to` get goes to memory at once; whoever reads it in another thread waits for `end_streams`.
inline void stream_copy(void* to, const void* from, long bytes) {
    if (reinterpret_cast<uintptr_t>(to) % kLine != 0 || bytes % kLine != 0) {
        std::memcpy(to, from, bytes);
        return;
    }
    char* at = static_cast<char*>(to);
    const char* source = static_cast<const char*>(from);
    for (long i = 0; i < bytes; i += kLine) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + kLine / 2));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(at + i), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(at + i + kLine / 2), high);
    }
}

inline void end_streams() { _mm_sfence(); }

#endif
