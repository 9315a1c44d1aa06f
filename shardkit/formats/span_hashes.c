/* XXH3-64 of many spans of memory in one call, during which other threads run.
 *
 * The xxhash package hashes one buffer per call and takes the interpreter back after each; a thread that verifies blocks
 * then waits as long for the interpreter as it hashes. Memory is asked for ahead besides, across the borders of pages,
 * where processors do not. Written from the description of the algorithm (xxHash, doc/xxhash_spec.md), for inputs of
 * more than 240 bytes, with the default secret and no seed; tests compare it with the package. Optional: without this
 * module digest.py calls the package.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define STRIPE 64
#define STRIPES 16 /* of a block: (bytes of the secret - STRIPE) / 8 */
#define LANES 8
#define SECRET 192
#define SHORTEST 241
#define AHEAD 1024     /* bytes that are asked for into the nearest cache */
#define FAR_AHEAD 3072 /* and into the next one, which can wait for more of them at a time */

static const uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu, PRIME64_3 = 0x165667B19E3779F9u,
                      PRIME64_4 = 0x85EBCA77C2B2AE63u, PRIME64_5 = 0x27D4EB2F165667C5u;
static const uint64_t PRIME_MX = 0x165667919E3779F9u;

static const unsigned char secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "bytes are read as little-endian numbers"
#endif

#if defined(__GNUC__) || defined(__clang__)
#define ASK_FOR(place) (__builtin_prefetch((place) + AHEAD), __builtin_prefetch((place) + FAR_AHEAD, 0, 2))
#else
#define ASK_FOR(place) ((void)(place))
#endif

static inline uint64_t number(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline void add_stripe(uint64_t *restrict lanes, const unsigned char *restrict from,
                              const unsigned char *restrict key)
{
    uint64_t value[LANES], keyed[LANES];
    memcpy(value, from, STRIPE);
    memcpy(keyed, key, STRIPE);
    for (int lane = 0; lane < LANES; lane++)
        keyed[lane] ^= value[lane];
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] += value[lane ^ 1] + (keyed[lane] & 0xFFFFFFFFu) * (keyed[lane] >> 32);
}

static inline void scramble(uint64_t *restrict lanes, const unsigned char *restrict key)
{
    uint64_t keys[LANES];
    memcpy(keys, key, STRIPE);
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = (lanes[lane] ^ (lanes[lane] >> 47) ^ keys[lane]) * PRIME32_1;
}

static uint64_t folded(uint64_t a, uint64_t b)
{
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu), middle1 = (a >> 32) * (b & 0xFFFFFFFFu),
             middle2 = (a & 0xFFFFFFFFu) * (b >> 32), high = (a >> 32) * (b >> 32);
    uint64_t carry = (low >> 32) + (middle1 & 0xFFFFFFFFu) + middle2;
    return ((carry << 32) | (low & 0xFFFFFFFFu)) ^ (high + (middle1 >> 32) + (carry >> 32));
#endif
}

/* All of an input into the lanes, with a way to add a stripe and a way to scramble; `lanes` is what they take. */
#define ADD_BLOCKS(add, scramble)                                                      \
    const int64_t block = STRIPE * STRIPES, blocks = (size - 1) / block;               \
    for (int64_t done = 0; done < blocks; done++, from += block) {                     \
        for (int stripe = 0; stripe < STRIPES; stripe++) {                             \
            ASK_FOR(from + stripe * STRIPE);                                           \
            add(from + stripe * STRIPE, secret + 8 * stripe);                          \
        }                                                                              \
        scramble(secret + SECRET - STRIPE);                                            \
    }                                                                                  \
    const int64_t left = size - blocks * block, stripes = (left - 1) / STRIPE;         \
    for (int64_t stripe = 0; stripe < stripes; stripe++)                               \
        add(from + stripe * STRIPE, secret + 8 * stripe);                              \
    add(from + left - STRIPE, secret + SECRET - STRIPE - 7)

static void add_plainly(uint64_t *lanes, const unsigned char *from, int64_t size)
{
#define ADD(at, key) add_stripe(lanes, at, key)
#define SCRAMBLE(key) scramble(lanes, key)
    ADD_BLOCKS(ADD, SCRAMBLE);
#undef ADD
#undef SCRAMBLE
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define BY_PROCESSOR

__attribute__((target("avx2"))) static void add_by_avx2(uint64_t *lanes, const unsigned char *from, int64_t size)
{
    const __m256i prime = _mm256_set1_epi64x((int64_t)PRIME32_1);
    __m256i held[2] = {_mm256_loadu_si256((__m256i *)lanes), _mm256_loadu_si256((__m256i *)lanes + 1)};
#define ADD(at, key)                                                                                                    \
    for (int half = 0; half < 2; half++) {                                                                              \
        const __m256i value = _mm256_loadu_si256((const __m256i *)(at) + half),                                         \
                      keyed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)(key) + half)),               \
                      product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)),                                  \
                      swapped = _mm256_shuffle_epi32(value, 0x4E);                                                      \
        held[half] = _mm256_add_epi64(held[half], _mm256_add_epi64(product, swapped));                                  \
    }
#define SCRAMBLE(key)                                                                                                   \
    for (int half = 0; half < 2; half++) {                                                                              \
        const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(held[half], _mm256_srli_epi64(held[half], 47)),         \
                                               _mm256_loadu_si256((const __m256i *)(key) + half)),                      \
                      high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);                                     \
        held[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));                     \
    }
    ADD_BLOCKS(ADD, SCRAMBLE);
#undef ADD
#undef SCRAMBLE
    _mm256_storeu_si256((__m256i *)lanes, held[0]);
    _mm256_storeu_si256((__m256i *)lanes + 1, held[1]);
}

__attribute__((target("avx512f"))) static void add_by_avx512(uint64_t *lanes, const unsigned char *from, int64_t size)
{
    const __m512i prime = _mm512_set1_epi64((int64_t)PRIME32_1);
    __m512i held = _mm512_loadu_si512(lanes);
#define ADD(at, key)                                                                                                    \
    do {                                                                                                                \
        const __m512i value = _mm512_loadu_si512(at), keyed = _mm512_xor_si512(value, _mm512_loadu_si512(key)),         \
                      product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)),                                  \
                      swapped = _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E);                                       \
        held = _mm512_add_epi64(held, _mm512_add_epi64(product, swapped));                                              \
    } while (0)
#define SCRAMBLE(key)                                                                                                   \
    do {                                                                                                                \
        const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(held, _mm512_srli_epi64(held, 47)),                     \
                                               _mm512_loadu_si512(key)),                                                \
                      high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);                                     \
        held = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));                           \
    } while (0)
    ADD_BLOCKS(ADD, SCRAMBLE);
#undef ADD
#undef SCRAMBLE
    _mm512_storeu_si512(lanes, held);
}
#endif

typedef void (*way)(uint64_t *, const unsigned char *, int64_t);

/* Ways to add blocks, the widest that this processor knows last; returns how many. */
static int ways_here(way *found)
{
    int ways = 0;
    found[ways++] = add_plainly;
#if defined(BY_PROCESSOR)
    if (__builtin_cpu_supports("avx2"))
        found[ways++] = add_by_avx2;
    if (__builtin_cpu_supports("avx512f"))
        found[ways++] = add_by_avx512;
#endif
    return ways;
}

static uint64_t xxh3(way add_blocks, const unsigned char *from, int64_t size)
{
    uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    add_blocks(lanes, from, size);
    uint64_t hash = (uint64_t)size * PRIME64_1;
    for (int pair = 0; pair < LANES / 2; pair++) {
        const unsigned char *key = secret + 11 + 16 * pair;
        hash += folded(lanes[2 * pair] ^ number(key), lanes[2 * pair + 1] ^ number(key + 8));
    }
    hash = (hash ^ (hash >> 37)) * PRIME_MX;
    return hash ^ (hash >> 32);
}

static PyObject *xxh3_spans(PyObject *self, PyObject *args)
{
    Py_buffer hashes, addresses, sizes;
    way found[3];
    const int ways = ways_here(found);
    int wanted = ways - 1;
    if (!PyArg_ParseTuple(args, "w*y*y*|i:xxh3_spans", &hashes, &addresses, &sizes, &wanted))
        return NULL;
    const Py_ssize_t spans = hashes.len / 8;
    const int64_t *from = addresses.buf, *size = sizes.buf;
    int fits = hashes.len % 8 == 0 && addresses.len == hashes.len && sizes.len == hashes.len &&
               ((uintptr_t)hashes.buf | (uintptr_t)from | (uintptr_t)size) % 8 == 0 && wanted >= 0 && wanted < ways;
    for (Py_ssize_t span = 0; fits && span < spans; span++)
        fits = size[span] >= SHORTEST;
    if (fits) {
        uint64_t *to = hashes.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t span = 0; span < spans; span++)
            to[span] = xxh3(found[wanted], (const unsigned char *)(intptr_t)from[span], size[span]);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&hashes);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "expected as many aligned hashes, addresses and sizes above 240");
    Py_RETURN_NONE;
}

static PyObject *ways(PyObject *self, PyObject *ignored)
{
    way found[3];
    return PyLong_FromLong(ways_here(found));
}

static PyMethodDef functions[] = {
    {"xxh3_spans", xxh3_spans, METH_VARARGS,
     "xxh3_spans(hashes, addresses, sizes, way=ways() - 1): XXH3-64 of the bytes at each address, into `hashes`."},
    {"ways", ways, METH_NOARGS, "ways(): in how many ways this processor can do it; all give the same hashes."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "span_hashes",
    .m_doc = "XXH3-64 of many spans of memory in one call, during which other threads run.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_span_hashes(void) { return PyModuleDef_Init(&definition); }
