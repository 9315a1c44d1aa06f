/* SHA-256 (FIPS 180-4) by the SHA instructions of x86-64 and ARM64. On other processors the caller uses hashlib. */
#ifndef SHARDKIT_SHA256_H
#define SHARDKIT_SHA256_H
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#define SHA256_BYTES 32
#define SHA256_CHUNK 64 /* bytes compressed at a time */

/* A message stored in several pieces of memory, and how far it has been hashed. */
typedef struct {
    uint32_t state[8];
    const struct iovec *pieces; /* the first one has unread bytes */
    int64_t count;
    size_t skip;               /* bytes read of the first piece */
    const unsigned char *next; /* chunks to compress next */
    int64_t chunks;
    uint64_t size; /* bytes of the whole message */
    int is_padded;
    unsigned char edge[2 * SHA256_CHUNK]; /* a chunk of several pieces, or the padded end */
} Sha256;

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#include <immintrin.h>
#define SHA256_TARGET __attribute__((target("sha,sse4.1")))
typedef __m128i Words;
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__)) && (defined(__GNUC__) || defined(__clang__))
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#define SHA256_HWCAP (1 << 6) /* HWCAP_SHA2 */
#endif
#if defined(__clang__)
#define SHA256_TARGET __attribute__((target("sha2")))
#else
#define SHA256_TARGET __attribute__((target("+crypto")))
#endif
typedef uint32x4_t Words;
#endif

#if defined(SHA256_TARGET)
#define SHA256_INLINE SHA256_TARGET __attribute__((always_inline)) static inline
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

static const uint32_t sha256_keys[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

#if defined(__x86_64__)
static int sha256_is_here(void)
{
    unsigned a, b = 0, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) && __builtin_cpu_supports("sse4.1");
}

/* The instructions take the eight words of a state as ABEF and CDGH. */
SHA256_INLINE void load_state(const uint32_t *state, Words *one, Words *other)
{
    const Words first = _mm_shuffle_epi32(_mm_loadu_si128((const Words *)state), 0xB1),
                second = _mm_shuffle_epi32(_mm_loadu_si128((const Words *)state + 1), 0x1B);
    *one = _mm_alignr_epi8(first, second, 8), *other = _mm_blend_epi16(second, first, 0xF0);
}

SHA256_INLINE void store_state(uint32_t *state, Words one, Words other)
{
    const Words first = _mm_shuffle_epi32(one, 0x1B), second = _mm_shuffle_epi32(other, 0xB1);
    _mm_storeu_si128((Words *)state, _mm_blend_epi16(first, second, 0xF0));
    _mm_storeu_si128((Words *)state + 1, _mm_alignr_epi8(second, first, 8));
}

SHA256_INLINE Words add_words(Words a, Words b) { return _mm_add_epi32(a, b); }

SHA256_INLINE Words load_words(const unsigned char *from)
{
    const Words big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    return _mm_shuffle_epi8(_mm_loadu_si128((const Words *)from), big_endian);
}

SHA256_INLINE void four_rounds(Words *one, Words *other, Words words, int n)
{
    const Words keyed = _mm_add_epi32(words, _mm_loadu_si128((const Words *)(sha256_keys + 4 * n)));
    *other = _mm_sha256rnds2_epu32(*other, *one, keyed);
    *one = _mm_sha256rnds2_epu32(*one, *other, _mm_shuffle_epi32(keyed, 0x0E));
}

/* Words 16 to 19 of the schedule, from the sixteen before them. */
SHA256_INLINE Words schedule(Words a, Words b, Words c, Words d)
{
    return _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(a, b), _mm_alignr_epi8(d, c, 4)), d);
}
#else
static int sha256_is_here(void)
{
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & SHA256_HWCAP) != 0;
#else
    return 1; /* on all ARM64 processors of Apple */
#endif
}

SHA256_INLINE void load_state(const uint32_t *state, Words *one, Words *other)
{
    *one = vld1q_u32(state), *other = vld1q_u32(state + 4);
}

SHA256_INLINE void store_state(uint32_t *state, Words one, Words other)
{
    vst1q_u32(state, one), vst1q_u32(state + 4, other);
}

SHA256_INLINE Words add_words(Words a, Words b) { return vaddq_u32(a, b); }

SHA256_INLINE Words load_words(const unsigned char *from)
{
    return vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(from)));
}

SHA256_INLINE void four_rounds(Words *one, Words *other, Words words, int n)
{
    const Words keyed = vaddq_u32(words, vld1q_u32(sha256_keys + 4 * n)), before = *one;
    *one = vsha256hq_u32(before, *other, keyed);
    *other = vsha256h2q_u32(*other, before, keyed);
}

/* Words 16 to 19 of the schedule, from the sixteen before them. */
SHA256_INLINE Words schedule(Words a, Words b, Words c, Words d)
{
    return vsha256su1q_u32(vsha256su0q_u32(a, b), c, d);
}
#endif

/* Compress all chunks of a message that are there. */
SHA256_TARGET static void compress(Sha256 *message)
{
    Words one, other, words[4];
    load_state(message->state, &one, &other);
    for (; message->chunks; message->chunks--, message->next += SHA256_CHUNK) {
        const Words old_one = one, old_other = other;
        UNROLLED
        for (int n = 0; n < 4; n++)
            words[n] = load_words(message->next + 16 * n);
        UNROLLED
        for (int n = 0; n < 16; n++) {
            four_rounds(&one, &other, words[n & 3], n);
            if (n < 12)
                words[n & 3] = schedule(words[n & 3], words[(n + 1) & 3], words[(n + 2) & 3], words[(n + 3) & 3]);
        }
        one = add_words(one, old_one), other = add_words(other, old_other);
    }
    store_state(message->state, one, other);
}
#else
static int sha256_is_here(void) { return 0; }
static void compress(Sha256 *message) { message->chunks = 0; }
#endif

static void sha256_begin(Sha256 *self, const struct iovec *pieces, int64_t count)
{
    static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memset(self, 0, sizeof *self);
    memcpy(self->state, initial, sizeof initial);
    self->pieces = pieces, self->count = count;
    for (int64_t n = 0; n < count; n++)
        self->size += pieces[n].iov_len;
}

/* Find the next chunks: 0 at the end of the message. */
static int sha256_has_chunks(Sha256 *self)
{
    size_t held = 0; /* bytes of a chunk that several pieces share */
    for (; self->count; self->pieces++, self->count--, self->skip = 0) {
        const unsigned char *from = (const unsigned char *)self->pieces->iov_base + self->skip;
        const size_t bytes = self->pieces->iov_len - self->skip, room = SHA256_CHUNK - held;
        if (!held && bytes >= SHA256_CHUNK) {
            self->next = from, self->chunks = (int64_t)(bytes / SHA256_CHUNK);
            self->skip += (size_t)self->chunks * SHA256_CHUNK;
            return 1;
        }
        const size_t some = bytes < room ? bytes : room;
        if (some)
            memcpy(self->edge + held, from, some);
        held += some;
        if (held == SHA256_CHUNK) {
            self->skip += some, self->next = self->edge, self->chunks = 1;
            return 1;
        }
    }
    if (self->is_padded)
        return 0;
    const size_t end = held + 9 <= SHA256_CHUNK ? SHA256_CHUNK : 2 * SHA256_CHUNK;
    memset(self->edge + held, 0, end - held);
    self->edge[held] = 0x80;
    for (int n = 0; n < 8; n++)
        self->edge[end - 1 - (size_t)n] = (unsigned char)(self->size * 8 >> 8 * n);
    self->is_padded = 1, self->next = self->edge, self->chunks = (int64_t)(end / SHA256_CHUNK);
    return 1;
}

/* Whether pieces of memory are a message of this digest. */
static int sha256_is(const unsigned char *digest, const struct iovec *pieces, int64_t count)
{
    Sha256 hash;
    unsigned char differs = 0;
    sha256_begin(&hash, pieces, count);
    while (sha256_has_chunks(&hash))
        compress(&hash);
    for (int n = 0; n < SHA256_BYTES; n++)
        differs |= (unsigned char)(digest[n] ^ (hash.state[n / 4] >> (24 - 8 * (n % 4))));
    return !differs;
}

#endif
