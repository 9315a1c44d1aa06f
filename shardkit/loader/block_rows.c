/* What the loader does to bytes, without the interpreter: read and hash blocks, copy rows out of them.
 *
 * A thread that takes the interpreter back after every block or row waits for it as long as it works; here it is released
 * once per call, for several blocks or all rows of some steps. load_queue.py decides which thread loads which blocks.
 * The caller has checked all addresses and keeps the memory alive. Numbers of a caller are read once, so that no thread
 * changes them between the check and the use.
 * Optional: without this module plain_rows.py copies rows with numpy, and formats/reading.py reads and hashes blocks.
 *
 * XXH3-64 is written from the description of the algorithm (xxHash, doc/xxhash_spec.md) for inputs of more than 240
 * bytes, with the default secret and no seed; tests compare it with the package. SHA-256 is in sha256.h.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "sha256.h"

/* ---- XXH3-64 */

#define STRIPE 64
#define STRIPES 16 /* of a block: (bytes of the secret - STRIPE) / 8 */
#define BLOCK_BYTES (STRIPE * STRIPES)
#define LANES 8
#define SECRET 192
#define SHORTEST 241
#define HASH_AHEAD 1024     /* bytes that are asked for into the nearest cache */
#define HASH_FAR_AHEAD 3072 /* and into the next one, which can wait for more of them at a time */

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
#define ASK_FOR(place) (__builtin_prefetch((place) + HASH_AHEAD), __builtin_prefetch((place) + HASH_FAR_AHEAD, 0, 2))
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

static void add_plainly(uint64_t *lanes, const unsigned char *from, int64_t blocks)
{
    for (int64_t done = 0; done < blocks; done++, from += BLOCK_BYTES) {
        for (int stripe = 0; stripe < STRIPES; stripe++) {
            ASK_FOR(from + stripe * STRIPE);
            add_stripe(lanes, from + stripe * STRIPE, secret + 8 * stripe);
        }
        scramble(lanes, secret + SECRET - STRIPE);
    }
}

/* By AVX2, at four times the rate. AVX-512 is faster in the nearest cache only, where no block is that was just read. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define BY_PROCESSOR

__attribute__((target("avx2"))) static inline __m256i half_of(const unsigned char *at, int half)
{
    return _mm256_loadu_si256((const __m256i *)at + half);
}

__attribute__((target("avx2"))) static void add_by_avx2(uint64_t *lanes, const unsigned char *from, int64_t blocks)
{
    const __m256i prime = _mm256_set1_epi64x((int64_t)PRIME32_1);
    __m256i held[2] = {_mm256_loadu_si256((__m256i *)lanes), _mm256_loadu_si256((__m256i *)lanes + 1)};
    for (int64_t done = 0; done < blocks; done++, from += BLOCK_BYTES) {
        for (int stripe = 0; stripe < STRIPES; stripe++) {
            ASK_FOR(from + stripe * STRIPE);
            for (int half = 0; half < 2; half++) {
                const __m256i value = half_of(from + stripe * STRIPE, half),
                              keyed = _mm256_xor_si256(value, half_of(secret + 8 * stripe, half)),
                              product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)),
                              swapped = _mm256_shuffle_epi32(value, 0x4E);
                held[half] = _mm256_add_epi64(held[half], _mm256_add_epi64(product, swapped));
            }
        }
        for (int half = 0; half < 2; half++) { /* scramble */
            const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(held[half], _mm256_srli_epi64(held[half], 47)),
                                                   half_of(secret + SECRET - STRIPE, half)),
                          high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            held[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
    _mm256_storeu_si256((__m256i *)lanes, held[0]);
    _mm256_storeu_si256((__m256i *)lanes + 1, held[1]);
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
#endif
    return ways;
}

/* Of pieces that together are an input of SHORTEST bytes or more. */
static uint64_t xxh3(way add_blocks, const struct iovec *pieces, int64_t count)
{
    uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    unsigned char edge[STRIPE + BLOCK_BYTES], *const begins = edge + STRIPE; /* a block of several pieces, and what is before it */
    int64_t size = 0, held = 0;
    for (int64_t n = 0; n < count; n++)
        size += (int64_t)pieces[n].iov_len;
    int64_t left = (size - 1) / BLOCK_BYTES; /* blocks; at least a byte comes after them */
    for (int64_t n = 0; n < count; n++) {
        const unsigned char *from = pieces[n].iov_base;
        int64_t bytes = (int64_t)pieces[n].iov_len;
        while (bytes) {
            const int64_t room = BLOCK_BYTES - held, whole = bytes / BLOCK_BYTES, blocks = whole < left ? whole : left;
            if (!held && blocks) {
                add_blocks(lanes, from, blocks);
                left -= blocks, from += blocks * BLOCK_BYTES, bytes -= blocks * BLOCK_BYTES;
                memcpy(edge, from - STRIPE, STRIPE);
                continue;
            }
            const int64_t some = bytes < room ? bytes : room;
            memcpy(begins + held, from, (size_t)some);
            held += some, from += some, bytes -= some;
            if (held == BLOCK_BYTES && left) {
                add_blocks(lanes, begins, 1);
                memcpy(edge, edge + BLOCK_BYTES, STRIPE);
                left--, held = 0;
            }
        }
    }
    for (int64_t stripe = 0; stripe < (held - 1) / STRIPE; stripe++)
        add_stripe(lanes, begins + stripe * STRIPE, secret + 8 * stripe);
    add_stripe(lanes, edge + held, secret + SECRET - STRIPE - 7);
    uint64_t hash = (uint64_t)size * PRIME64_1;
    for (int pair = 0; pair < LANES / 2; pair++) {
        const unsigned char *key = secret + 11 + 16 * pair;
        hash += folded(lanes[2 * pair] ^ number(key), lanes[2 * pair + 1] ^ number(key + 8));
    }
    hash = (hash ^ (hash >> 37)) * PRIME_MX;
    return hash ^ (hash >> 32);
}

/* ---- reading */

/* Own copies of some int64 arrays of equal length, which callers give as one after the other: 0 on success. */
typedef struct {
    Py_ssize_t rows;
    int64_t *numbers; /* rows of the first array, of the second, … */
} Table;

static int copy_table(PyObject *const *arrays, int count, Table *table)
{
    table->numbers = NULL;
    for (int which = 0; which < count; which++) {
        Py_buffer held;
        if (PyObject_GetBuffer(arrays[which], &held, PyBUF_SIMPLE) < 0)
            goto failed;
        if (which == 0) {
            table->rows = held.len / 8;
            table->numbers = PyMem_Malloc((size_t)(held.len ? held.len : 8) * (size_t)count);
        }
        const int fits = held.len == table->rows * 8;
        if (table->numbers && fits)
            memcpy(table->numbers + which * table->rows, held.buf, (size_t)held.len);
        PyBuffer_Release(&held);
        if (!table->numbers || !fits) {
            if (table->numbers)
                PyErr_SetString(PyExc_ValueError, "expected as many int64 values in each array");
            else
                PyErr_NoMemory();
            goto failed;
        }
    }
    return 0;
failed:
    PyMem_Free(table->numbers);
    return -1;
}

/* ---- jobs: blocks to load */

#define FACTS 4             /* of a field of a block, after its rows: addresses of values, ends and data; bytes between rows */
#define DECIMAL_PITCH (-8)  /* between rows that are stored as decimal texts */
#define PLACED_PITCH (-24)  /* between rows of one size at arbitrary offsets in the data */
#define OBJECT_PITCH (-16)  /* between rows that were read into bytes objects: the place of the data holds their tuple */
/* int64 numbers of a job; load_queue.py names them too */
enum { DESCRIPTOR, OFFSET, SIZE, ADDRESS, HASH, AFTER, SLOT, BLOCK, LAYOUT, RAW_SIZE, DIGEST, ROOM, TOOK, JOB, ROWS = JOB, STARTS };
#define COLD_NS 20000       /* and one for each byte: longer than any read from memory */
#define PIECES_AT_ONCE 16   /* of a block that are read in one call */
#define MOST_OBJECTS 256    /* of a block */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* of Linux from 5.14 on; others refuse it */
#endif

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Read pieces one after the other from some place of a file: 0 if all are there. */
static int read_pieces(int file, int64_t offset, const struct iovec *pieces, int64_t count)
{
    size_t skip = 0; /* bytes of the first piece that are there */
    while (count) {
        struct iovec some[PIECES_AT_ONCE];
        const int these = count < PIECES_AT_ONCE ? (int)count : PIECES_AT_ONCE;
        memcpy(some, pieces, (size_t)these * sizeof *some);
        some->iov_base = (char *)some->iov_base + skip, some->iov_len -= skip;
        const ssize_t got = preadv(file, some, these, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -1;
        offset += got;
        for (skip += (size_t)got; count && skip >= pieces->iov_len; count--)
            skip -= pieces++->iov_len;
    }
    return 0;
}

/* Touch the pages that a piece fills. All pages of new memory at once take two thirds of the time of one after the other. */
static void touch(const struct iovec *piece)
{
    const uintptr_t rest = (uintptr_t)sysconf(_SC_PAGESIZE) - 1, begin = ((uintptr_t)piece->iov_base + rest) & ~rest,
                    end = ((uintptr_t)piece->iov_base + piece->iov_len) & ~rest;
    if (begin < end)
        (void)madvise((void *)begin, end - begin, MADV_POPULATE_WRITE);
}

/* ---- opening: what a verified block holds, decompressed, and where its fields lie */

#define MOST_WINDOW (8 << 20) /* bytes; more only as many as a frame holds */
#define MOST_RATIO (1 << 16)
#define MOST_KEPT (8 << 20) /* bytes of compressed blocks that a thread keeps room for */

static struct { /* of the system's libzstd; `make` is NULL where there is none */
    void *(*make)(void);
    size_t (*end)(void *);
    size_t (*decompress)(void *, void *, size_t, const void *, size_t);
    unsigned long long (*content_size)(const void *, size_t);
    size_t (*frame_size)(const void *, size_t);
} zstd;

static void find_zstd(void)
{
    if (zstd.make)
        return;
#if defined(__APPLE__)
    void *library = dlopen("libzstd.1.dylib", RTLD_NOW | RTLD_LOCAL);
#else
    void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
#endif
    if (!library)
        return;
    *(void **)&zstd.end = dlsym(library, "ZSTD_freeDCtx");
    *(void **)&zstd.decompress = dlsym(library, "ZSTD_decompressDCtx");
    *(void **)&zstd.content_size = dlsym(library, "ZSTD_getFrameContentSize");
    *(void **)&zstd.frame_size = dlsym(library, "ZSTD_findFrameCompressedSize");
    if (zstd.end && zstd.decompress && zstd.content_size && zstd.frame_size)
        *(void **)&zstd.make = dlsym(library, "ZSTD_createDCtx");
}

/* What a thread needs to open compressed blocks; it is freed when the thread ends. */
typedef struct {
    void *context;
    unsigned char *stored;
    int64_t room;
} Scratch;

static pthread_key_t scratch_key;

static void release_scratch(void *held)
{
    Scratch *scratch = held;
    if (scratch->context)
        zstd.end(scratch->context);
    free(scratch->stored), free(scratch);
}

/* The scratch of this thread; NULL without memory. */
static Scratch *own_scratch(void)
{
    Scratch *scratch = pthread_getspecific(scratch_key);
    if (!scratch && (scratch = calloc(1, sizeof *scratch)) && pthread_setspecific(scratch_key, scratch)) {
        free(scratch);
        scratch = NULL;
    }
    return scratch;
}

/* Exactly one frame, of so many bytes in it, to `to`: 0 if it is one. formats/compression.py refuses what is refused here. */
static int open_frame(Scratch *scratch, const unsigned char *frame, int64_t size, unsigned char *to, int64_t raw)
{
    if (size < 6 || raw > size * MOST_RATIO || frame[4] & 3) /* or a dictionary */
        return -1;
    const int64_t window = frame[4] & 32 ? raw : (int64_t)(8 + (frame[5] & 7)) << (7 + (frame[5] >> 3));
    if (window > MOST_WINDOW && window > raw)
        return -1;
    if (zstd.content_size(frame, (size_t)size) != (unsigned long long)raw || zstd.frame_size(frame, (size_t)size) != (size_t)size)
        return -1;
    if (!scratch->context && !(scratch->context = zstd.make()))
        return -1;
    return zstd.decompress(scratch->context, to, (size_t)raw, frame, (size_t)size) == (size_t)raw ? 0 : -1;
}

/* Messages of Arrow that have the metadata of one another but for numbers (formats/arrow_reading.py, message_layout). */
enum { HEAD, PADDING, ROWS_AT, BODY_AT, NODES_AT, NODES, BUFFERS_AT, BUFFERS, FIELDS, LAYOUT_NUMBERS };
enum { EMPTY, EMPTIES, VALUES, DATA, ITEM, NODE, FIELD_NUMBERS };
#define MOST_OFFSET ((int64_t)1 << 40)
#define MOST_ROWS ((int64_t)1 << 31) /* of a block */

static int64_t padded(int64_t size, int64_t to) { return (size + to - 1) / to * to; }
static int64_t signed_at(const unsigned char *place) { return (int64_t)number(place); }
static const unsigned char *buffer_numbers(const int64_t *layout, const unsigned char *message, int64_t which)
{
    return message + layout[BUFFERS_AT] + 16 * which;
}

/* Whether a message is one of this layout, and its numbers are those of the job and lie inside of it. */
static int is_of_layout(const int64_t *layout, const int64_t *job, const unsigned char *message)
{
    const int64_t *per_row = layout + LAYOUT_NUMBERS, head = layout[HEAD], body = job[SIZE] - head, rows = job[ROWS];
    const unsigned char *like = (const unsigned char *)(per_row + layout[NODES] + FIELD_NUMBERS * layout[FIELDS]),
                        *mask = like + padded(head, 8);
    unsigned char differs = 0;
    if (body < 0 || rows < 1 || rows > MOST_ROWS)
        return 0;
    for (int64_t at = 0; at < head; at++)
        differs |= (unsigned char)((message[at] ^ like[at]) & mask[at]);
    if (differs || signed_at(message + layout[ROWS_AT]) != rows || signed_at(message + layout[BODY_AT]) != body || body % 8)
        return 0;
    for (int64_t node = 0; node < layout[NODES]; node++)
        if (per_row[node] >= 0 && signed_at(message + layout[NODES_AT] + 16 * node) != rows * per_row[node])
            return 0;
    int64_t end = 0, raw = head;
    for (int64_t which = 0; which < layout[BUFFERS]; which++) {
        const unsigned char *numbers = buffer_numbers(layout, message, which);
        const int64_t offset = signed_at(numbers), length = signed_at(numbers + 8);
        if (offset < end || offset % 8 || offset > body || length < 0 || length > body - offset)
            return 0;
        end = offset + length;
        if (job[RAW_SIZE] && length) {
            const int64_t declared = length < 8 ? -2 : signed_at(message + head + offset);
            if (declared < -1 || declared > job[RAW_SIZE])
                return 0;
            raw += padded(declared < 0 ? length - 8 : declared, 8);
        }
    }
    return !job[RAW_SIZE] || raw == job[RAW_SIZE];
}

/* A buffer that holds so many bytes, or less than 64 more, decompressed to `to` where messages are compressed; NULL: it does not. */
static unsigned char *open_buffer(Scratch *scratch, const int64_t *layout, const int64_t *job, unsigned char *message,
                                  int64_t which, int64_t expected, unsigned char *to, int64_t room)
{
    const unsigned char *numbers = buffer_numbers(layout, message, which);
    unsigned char *stored = message + layout[HEAD] + signed_at(numbers);
    int64_t length = signed_at(numbers + 8);
    const int is_packed = job[RAW_SIZE] && length;
    const int64_t raw = !is_packed ? length : signed_at(stored) < 0 ? length - 8 : signed_at(stored);
    if (raw < expected || raw >= expected + 64)
        return NULL;
    if (!job[RAW_SIZE])
        return stored;
    if (raw > room)
        return NULL;
    if (is_packed && signed_at(stored) >= 0)
        return open_frame(scratch, stored + 8, length - 8, to, raw) ? NULL : to;
    if (is_packed)
        memcpy(to, stored + 8, (size_t)raw);
    return to;
}

/* From numbers of items to bytes, if they ascend from 0; the last one, or -1. */
static int64_t settle_offsets(int64_t *offsets, int64_t rows, int64_t item)
{
    int falls = offsets[0] != 0;
    for (int64_t row = 0; row < rows; row++)
        falls |= offsets[row + 1] < offsets[row];
    const int64_t last = offsets[rows];
    if (falls || last > MOST_OFFSET)
        return -1;
    for (int64_t row = 1; item > 1 && row <= rows; row++)
        offsets[row] *= item;
    return last;
}

/* Open a message to `to` and write the facts of its fields to the job: 0 if all is well. */
static int open_message(Scratch *scratch, int64_t *job, unsigned char *message, unsigned char *to)
{
    const int64_t *layout = (const int64_t *)(intptr_t)job[LAYOUT], rows = job[ROWS], room = job[RAW_SIZE] + layout[PADDING];
    const int64_t *field = layout + LAYOUT_NUMBERS + layout[NODES];
    int64_t *facts = job + JOB, at = 0;
    if (!is_of_layout(layout, job, message))
        return -1;
    *facts++ = rows;
    for (int64_t n = 0; n < layout[FIELDS]; n++, field += FIELD_NUMBERS, facts += FACTS) {
        int64_t expected = field[DATA] < 0 ? rows * field[ITEM] : 8 * (rows + 1);
        for (int64_t which = field[EMPTY]; which < field[EMPTY] + field[EMPTIES]; which++)
            if (signed_at(buffer_numbers(layout, message, which) + 8))
                return -1;
        unsigned char *values = open_buffer(scratch, layout, job, message, field[VALUES], expected, to + at, room - at);
        if (!values)
            return -1;
        at += padded(expected + 63, 64);
        facts[0] = (int64_t)(intptr_t)values, facts[1] = facts[2] = 0, facts[3] = field[ITEM];
        if (field[DATA] < 0)
            continue;
        int64_t *offsets = (int64_t *)values;
        const int64_t items = settle_offsets(offsets, rows, field[ITEM]);
        if (items < 0 || (field[NODE] >= 0 && (signed_at(message + layout[NODES_AT] + 16 * field[NODE]) != items ||
                                               signed_at(buffer_numbers(layout, message, field[DATA] - 1) + 8))))
            return -1;
        expected = offsets[rows];
        unsigned char *data = open_buffer(scratch, layout, job, message, field[DATA], expected, to + at, room - at);
        if (!data)
            return -1;
        at += padded(expected + 63, 64);
        facts[1] = facts[0] + 8, facts[2] = (int64_t)(intptr_t)data, facts[3] = 8;
    }
    return 0;
}

/* Of a tar: minus the number of fields whose members have a header, where the first field's rows begin, and of each of them
 * where rows begin behind the header, the header, and its bytes. */
enum { MINUS_HEADERS, FIRST_STARTS, HEADERS };
enum { ROW_STARTS, HEADER, HEADER_BYTES, HEADER_NUMBERS };

static int is_message(const int64_t *job) { return job[LAYOUT] && ((const int64_t *)(intptr_t)job[LAYOUT])[0] > 0; }

/* Whether each row of a block has the header that its type calls for; where it lies was checked with the index. */
static int has_headers(const int64_t *job, const unsigned char *block)
{
    const int64_t *layout = (const int64_t *)(intptr_t)job[LAYOUT], *one = layout + HEADERS;
    const int64_t first = (job[STARTS] - layout[FIRST_STARTS]) / 8;
    for (int64_t n = 0; n < -layout[MINUS_HEADERS]; n++, one += HEADER_NUMBERS) {
        const int64_t *starts = (const int64_t *)(intptr_t)one[ROW_STARTS] + first;
        for (int64_t row = 0; row < job[ROWS]; row++)
            if (memcmp(block + starts[row] - one[HEADER_BYTES], (const char *)(intptr_t)one[HEADER], (size_t)one[HEADER_BYTES]))
                return 0;
    }
    return 1;
}

/* Open a verified block: 0 if it holds what its job says; the facts of a message are then in the job. */
static int open_block(Scratch *scratch, int64_t *job, unsigned char *stored, unsigned char *to)
{
    if (is_message(job))
        return open_message(scratch, job, stored, to);
    return job[LAYOUT] && !has_headers(job, to) ? -1 : 0;
}

/* Room for compressed bytes; NULL without memory. */
static unsigned char *room_for(Scratch *scratch, int64_t size)
{
    if (size > scratch->room || scratch->room > MOST_KEPT) {
        free(scratch->stored);
        scratch->stored = malloc((size_t)size);
        scratch->room = scratch->stored ? size : 0;
    }
    return scratch->stored;
}

/* Where a row of a block begins and ends in it; of `field`, the facts of one. */
static int64_t row_start(const int64_t *field, int64_t row) { return ((const int64_t *)(intptr_t)field[0])[row]; }
static int64_t row_end(const int64_t *field, int64_t row) { return ((const int64_t *)(intptr_t)field[1])[row]; }

/* The facts of the field whose rows are read into objects; NULL: no field, or several. */
static int64_t *object_field(int64_t *job, int64_t width)
{
    int64_t *found = NULL, *field = job + JOB + 1;
    for (int64_t n = 0; 1 + FACTS * (n + 1) <= width; n++, field += FACTS)
        if (field[3] == OBJECT_PITCH) {
            if (found)
                return NULL;
            found = field;
        }
    return found;
}

/* A job that is loaded without the interpreter. */
typedef struct {
    int64_t *numbers, count; /* the job; number of pieces */
    struct iovec *pieces;    /* memory of the whole block, in order */
} Job;

static void add_piece(Job *job, void *begin, int64_t size)
{
    if (size)
        job->pieces[job->count++] = (struct iovec){begin, (size_t)size};
}

/* Cut a block into objects and, at the job's address, the bytes between them: 0, or -1 if they do not fit its rows. */
static int cut_block(Job *job, const int64_t *field, PyObject *objects)
{
    const int64_t rows = job->numbers[ROWS], size = job->numbers[SIZE];
    char *between = (char *)(intptr_t)job->numbers[ADDRESS];
    int64_t at = 0;
    if (!PyTuple_Check(objects) || PyTuple_GET_SIZE(objects) != rows || rows > MOST_OBJECTS)
        return -1;
    if (!(job->pieces = malloc((size_t)(2 * rows + 1) * sizeof *job->pieces)))
        return -1;
    for (int64_t row = 0; row < rows; row++) {
        PyObject *one = PyTuple_GET_ITEM(objects, row);
        const int64_t start = row_start(field, row), end = row_end(field, row);
        if (start < at || end < start || end > size || !PyBytes_Check(one) || PyBytes_GET_SIZE(one) != end - start)
            return -1;
        add_piece(job, between, start - at);
        add_piece(job, PyBytes_AS_STRING(one), end - start);
        between += start - at, at = end;
    }
    add_piece(job, between, size - at);
    return 0;
}

/* From offsets in the block to addresses: of the rows of a field, or of the data that its starts and ends refer to. */
static void move_facts(int64_t *job, int64_t width)
{
    int64_t *field = job + JOB + 1;
    for (int64_t n = 0; 1 + FACTS * (n + 1) <= width; n++, field += FACTS)
        if (field[3] != OBJECT_PITCH)
            field[field[1] ? 2 : 0] += job[ADDRESS];
}

/* Read, hash and open a block: 0 if it is what was written. `read_ns` is the duration of the read. */
static int load(Scratch *scratch, way add_blocks, const Job *one, int64_t width, int64_t *read_ns)
{
    int64_t *job = one->numbers;
    unsigned char *to = (unsigned char *)(intptr_t)job[ADDRESS];
    unsigned char *stored = job[RAW_SIZE] ? room_for(scratch, job[SIZE]) : to;
    const struct iovec all = {stored, (size_t)job[SIZE]}, *pieces = one->pieces ? one->pieces : &all;
    const int64_t count = one->pieces ? one->count : 1, started = now_ns();
    if (!stored)
        return -1;
    if (!job[AFTER]) { /* the memory may be new */
        for (int64_t n = 0; one->pieces && n < count; n++)
            touch(&pieces[n]);
        if (!one->pieces)
            touch(&(struct iovec){to, (size_t)job[ROOM]});
    }
    int failed = read_pieces((int)job[DESCRIPTOR], job[OFFSET], pieces, count);
    *read_ns = now_ns() - started;
    if (!failed && job[DIGEST])
        failed = !sha256_is((const unsigned char *)(intptr_t)job[DIGEST], pieces, count);
    else if (!failed)
        failed = xxh3(add_blocks, pieces, count) != (uint64_t)job[HASH];
    if (failed || open_block(scratch, job, stored, to))
        return -1;
    if (!is_message(job))
        move_facts(job, width);
    job[TOOK] = now_ns() - started;
    return 0;
}

static int is_job(const int64_t *job, int64_t width)
{
    const int64_t *layout = (const int64_t *)(intptr_t)job[LAYOUT];
    return job[DESCRIPTOR] >= 0 && job[DESCRIPTOR] <= INT_MAX && job[SIZE] >= SHORTEST && job[OFFSET] >= 0 && job[ROWS] >= 0 && job[ROOM] >= 0 &&
           job[RAW_SIZE] >= 0 && (!job[RAW_SIZE] || (zstd.make && is_message(job))) && (!job[DIGEST] || sha256_is_here()) &&
           (!is_message(job) || 1 + FACTS * layout[FIELDS] == width);
}

/* load_blocks(jobs, objects, way) */
static PyObject *load_blocks(PyObject *self, PyObject *args)
{
    PyObject *jobs_object, *objects, *result = NULL;
    Py_buffer held;
    way found[2];
    const int ways = ways_here(found);
    int wanted = ways - 1, is_cold = 0;
    int64_t loaded = 0, *numbers = NULL;
    Job *jobs = NULL;
    if (!PyArg_ParseTuple(args, "OO!|i:load_blocks", &jobs_object, &PyTuple_Type, &objects, &wanted) ||
        PyObject_GetBuffer(jobs_object, &held, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    int fits = held.ndim == 2 && held.itemsize == 8 && held.shape[1] > JOB && PyTuple_GET_SIZE(objects) == held.shape[0] &&
               wanted >= 0 && wanted < ways;
    const int64_t count = fits ? held.shape[0] : 0, stride = fits ? held.shape[1] : 0, width = stride - JOB;
    Scratch *scratch = own_scratch();
    numbers = PyMem_Malloc((size_t)held.len + 8), jobs = PyMem_Calloc((size_t)count + 1, sizeof *jobs);
    if (!scratch || !numbers || !jobs) {
        PyErr_NoMemory();
        goto done;
    }
    memcpy(numbers, held.buf, (size_t)held.len);
    for (int64_t n = 0; fits && n < count; n++) {
        jobs[n].numbers = numbers + n * stride;
        fits = is_job(jobs[n].numbers, width);
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "expected jobs of blocks of more than 240 bytes, and the objects of each");
        goto done;
    }
    int64_t most = 0; /* jobs before one whose rows do not fit its objects */
    for (const int64_t *field; most < count; most++)
        if ((field = object_field(jobs[most].numbers, width)) && cut_block(&jobs[most], field, PyTuple_GET_ITEM(objects, most)))
            break;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t read_ns = 0; loaded < most && !is_cold; loaded++) {
        if (load(scratch, found[wanted], &jobs[loaded], width, &read_ns))
            break;
        is_cold = read_ns > COLD_NS + jobs[loaded].numbers[SIZE];
    }
    Py_END_ALLOW_THREADS
    memcpy(held.buf, numbers, (size_t)(loaded * stride) * 8);
    result = Py_BuildValue("LO", (long long)loaded, is_cold ? Py_True : Py_False);
done:
    for (int64_t n = 0; jobs && n < count; n++)
        free(jobs[n].pieces);
    PyMem_Free(jobs), PyMem_Free(numbers);
    PyBuffer_Release(&held);
    return result;
}

/* make_objects(job): the tuple of empty bytes objects, whose address the facts then hold; None without such a field, or if
 * rows do not fit the block. */
static PyObject *make_objects(PyObject *self, PyObject *job_object)
{
    Py_buffer held;
    if (PyObject_GetBuffer(job_object, &held, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    int64_t *job = held.buf, *field = held.len > JOB * 8 ? object_field(job, held.len / 8 - JOB) : NULL;
    const int64_t rows = field ? job[ROWS] : -1;
    PyObject *made = rows >= 0 && rows <= MOST_OBJECTS ? PyTuple_New(rows) : Py_NewRef(Py_None);
    for (int64_t row = 0; row < rows && made && made != Py_None; row++) {
        const int64_t size = row_end(field, row) - row_start(field, row);
        PyObject *one = size >= 0 && size <= job[SIZE] ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size) : Py_NewRef(Py_None);
        if (one)
            PyTuple_SET_ITEM(made, row, one);
        else
            Py_CLEAR(made);
    }
    if (made && made != Py_None)
        field[2] = (int64_t)(intptr_t)made;
    PyBuffer_Release(&held);
    return made;
}

static PyObject *ways(PyObject *self, PyObject *ignored)
{
    way found[2];
    return PyLong_FromLong(ways_here(found));
}

/* ---- copying */

#define WORTH_LETTING_GO (1 << 15) /* bytes; a shorter copy is over before another thread has begun */
#define AHEAD 2048              /* bytes of the next row that are asked for while one is copied */
#define SHORT 512               /* bytes of a row */
#define FAR_AHEAD 8             /* rows: each lies somewhere else in memory */

static void ask_for(const char *row, Py_ssize_t size)
{
#if defined(__GNUC__) || defined(__clang__)
    for (Py_ssize_t at = 0; at < size && at < AHEAD; at += 64)
        __builtin_prefetch(row + at);
#else
    (void)row, (void)size;
#endif
}

/* Rows end to end: of one size, or of sizes of their own where those are given. */
static void copy_each(char *to, const int64_t *from, Py_ssize_t rows, const int64_t *sizes, Py_ssize_t same)
{
    const Py_ssize_t next = !sizes && same <= SHORT ? FAR_AHEAD : 1; /* a short copy takes less time than its row to come */
    for (Py_ssize_t row = 0; row < rows; row++) {
        const Py_ssize_t size = sizes ? (Py_ssize_t)sizes[row] : same;
        if (row + next < rows)
            ask_for((const char *)(intptr_t)from[row + next], size);
        if (size)
            memcpy(to, (const char *)(intptr_t)from[row], (size_t)size);
        to += size;
    }
}

/* Rows end to end into a target: all of `size` bytes, or of sizes of their own where those are given. */
static PyObject *copy_rows(PyObject *self, PyObject *args)
{
    PyObject *target_object, *arrays[2] = {NULL, NULL};
    Py_ssize_t same = -1;
    Py_buffer target;
    Table table;
    if (!PyArg_ParseTuple(args, "OOO:copy_rows", &target_object, &arrays[0], &arrays[1]))
        return NULL;
    if (PyLong_Check(arrays[1]) && (same = PyLong_AsSsize_t(arrays[1])) < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "expected rows of 0 bytes or more");
        return NULL;
    }
    if (copy_table(arrays, same < 0 ? 2 : 1, &table) < 0)
        return NULL;
    if (PyObject_GetBuffer(target_object, &target, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) {
        PyMem_Free(table.numbers);
        return NULL;
    }
    const Py_ssize_t rows = table.rows;
    const int64_t *from = table.numbers, *sizes = from + rows;
    Py_ssize_t left = target.len;
    for (Py_ssize_t row = 0; row < rows && left >= 0; row++) {
        const int64_t size = same < 0 ? sizes[row] : same;
        left = size < 0 || size > left ? -1 : left - (Py_ssize_t)size;
    }
    if (left) {
        PyErr_Format(PyExc_ValueError, "a target of %zd bytes for rows of another sum", target.len);
    } else {
        PyThreadState *let_go = target.len >= WORTH_LETTING_GO ? PyEval_SaveThread() : NULL;
        copy_each(target.buf, from, rows, same < 0 ? sizes : NULL, same);
        if (let_go)
            PyEval_RestoreThread(let_go);
    }
    PyBuffer_Release(&target);
    PyMem_Free(table.numbers);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* ---- rows of many blocks */

enum { COPIED, NOT_COPIED };
/* From places, of a block and in it, to addresses; the row of a block in `facts` says how many rows it has and where its fields lie.
 * Not where a row is past the end, or a decimal text: the caller says which. */
static int find_rows(Table *table, const Py_buffer *facts, Py_ssize_t column)
{
    const Py_ssize_t width = facts->shape[1], blocks = facts->shape[0];
    int64_t *which = table->numbers, *row = which + table->rows;
    for (Py_ssize_t n = 0; n < table->rows; n++) {
        if (which[n] < 0 || which[n] >= blocks)
            return NOT_COPIED;
        const int64_t *block = (const int64_t *)facts->buf + which[n] * width;
        const int64_t *field = block + 1 + FACTS * column;
        if (row[n] < 0 || row[n] >= block[0])
            return NOT_COPIED;
        if (field[3] == DECIMAL_PITCH)
            return NOT_COPIED;
        which[n] = field[3] == PLACED_PITCH ? field[2] + row_start(field, row[n]) : field[0] + row[n] * field[3];
    }
    return COPIED;
}

/* Places to fill one after the other; rows do not cross from one into the next. */
typedef struct {
    Py_ssize_t count, size; /* size: bytes of all */
    Py_buffer *held;
} Targets;

static void release_targets(Targets *targets)
{
    while (targets->count)
        PyBuffer_Release(&targets->held[--targets->count]);
    PyMem_Free(targets->held);
}

static int hold_targets(PyObject *list, Targets *targets)
{
    const Py_ssize_t count = PyList_GET_SIZE(list);
    targets->count = targets->size = 0;
    targets->held = PyMem_Calloc((size_t)(count ? count : 1), sizeof *targets->held);
    if (!targets->held) {
        PyErr_NoMemory();
        return -1;
    }
    for (; targets->count < count; targets->count++) {
        Py_buffer *one = &targets->held[targets->count];
        PyObject *target = PySequence_GetItem(list, targets->count); /* held: another thread may have changed the list */
        const int failed = !target || PyObject_GetBuffer(target, one, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0;
        Py_XDECREF(target); /* the buffer holds it from here on */
        if (failed) {
            release_targets(targets);
            return -1;
        }
        targets->size += one->len;
    }
    return 0;
}

static Py_ssize_t bytes_of(const Py_buffer *held, Py_ssize_t count)
{
    Py_ssize_t bytes = 0;
    while (count)
        bytes += held[--count].len;
    return bytes;
}

static PyObject *gather_rows(PyObject *self, PyObject *args)
{
    PyObject *list, *facts_object, *arrays[2], *columns;
    Py_buffer facts;
    Targets targets;
    Table table, found = {0, NULL};
    int state = COPIED, fits = 1;
    if (!PyArg_ParseTuple(args, "O!OOOO!:gather_rows", &PyList_Type, &list, &facts_object, &arrays[0], &arrays[1],
                          &PyTuple_Type, &columns))
        return NULL;
    if (copy_table(arrays, 2, &table) < 0)
        return NULL;
    if (hold_targets(list, &targets) < 0)
        goto no_targets;
    if (PyObject_GetBuffer(facts_object, &facts, PyBUF_C_CONTIGUOUS) < 0)
        goto no_facts;
    const Py_ssize_t rows = table.rows, fields = PyTuple_GET_SIZE(columns), parts = fields ? targets.count / fields : 0;
    found.rows = rows, found.numbers = PyMem_Malloc((size_t)(rows * 16 * fields + 8));
    fits = facts.ndim == 2 && facts.itemsize == 8 && fields && parts * fields == targets.count;
    if (!found.numbers)
        PyErr_NoMemory();
    int64_t *const numbers = found.numbers; /* of each field the addresses of its rows, and as many that are used up */
    for (Py_ssize_t n = 0; numbers && fits && n < fields && state == COPIED; n++) { /* all, before any is copied */
        const Py_ssize_t column = PyLong_AsSsize_t(PyTuple_GET_ITEM(columns, n));
        const Py_buffer *own = targets.held + n * parts;
        const Py_ssize_t bytes = bytes_of(own, parts), size = rows ? bytes / rows : 0;
        fits = !PyErr_Occurred() && column >= 0 && column < (facts.shape[1] - 1) / FACTS && size * rows == bytes;
        for (Py_ssize_t part = 0; fits && part < parts; part++)
            fits = size ? own[part].len % size == 0 : own[part].len == 0;
        if (!fits)
            break;
        found.numbers = numbers + 2 * rows * n;
        memcpy(found.numbers, table.numbers, (size_t)rows * 16);
        state = find_rows(&found, &facts, column);
    }
    if (numbers && fits && state == COPIED && targets.size) {
        PyThreadState *let_go = targets.size >= WORTH_LETTING_GO ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t n = 0; n < fields; n++) {
            const Py_buffer *own = targets.held + n * parts;
            const Py_ssize_t size = bytes_of(own, parts) / rows;
            const int64_t *from = numbers + 2 * rows * n;
            for (Py_ssize_t part = 0; size && part < parts; part++) {
                copy_each(own[part].buf, from, own[part].len / size, NULL, size);
                from += own[part].len / size;
            }
        }
        if (let_go)
            PyEval_RestoreThread(let_go);
    }
    found.numbers = numbers;
    if (!fits && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "targets of %zd bytes for %zd rows of %zd fields", targets.size, rows, fields);
    PyMem_Free(found.numbers);
    PyBuffer_Release(&facts);
no_facts:
    release_targets(&targets);
no_targets:
    PyMem_Free(table.numbers);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(state);
}

/* (addresses, sizes) of the arguments, no size below 0; 0 on success. */
static int copy_spans_of(PyObject *args, Table *table)
{
    PyObject *arrays[2];
    if (!PyArg_ParseTuple(args, "OO", &arrays[0], &arrays[1]) || copy_table(arrays, 2, table) < 0)
        return -1;
    for (Py_ssize_t row = 0; row < table->rows; row++)
        if (table->numbers[table->rows + row] < 0) {
            PyErr_Format(PyExc_ValueError, "row %zd: a size below 0", row);
            PyMem_Free(table->numbers);
            return -1;
        }
    return 0;
}

static int is_ascii(const char *text, int64_t size)
{
    uint64_t seen = 0, word;
    int64_t at = 0;
    for (; at + 8 <= size; at += 8) {
        memcpy(&word, text + at, 8);
        seen |= word;
    }
    for (; at < size; at++)
        seen |= (unsigned char)text[at];
    return !(seen & 0x8080808080808080u);
}

/* What lies at these places as objects. They are new and nobody else sees them yet, so that long ones are filled while
 * others run. Texts that are ASCII, as most are, need no decoder. */
static PyObject *objects_at(const int64_t *from, const int64_t *size, Py_ssize_t rows, int text)
{
    int64_t bytes = 0;
    PyObject *list = PyList_New(rows);
    char **to = list ? PyMem_Calloc((size_t)(rows ? rows : 1), sizeof *to) : NULL; /* NULL where nothing is to be copied */
    if (list && !to) {
        PyErr_NoMemory();
        Py_CLEAR(list);
    }
    for (Py_ssize_t row = 0; list && row < rows; row++) {
        const char *source = (const char *)(intptr_t)from[row];
        PyObject *one;
        if (text && row + 1 < rows)
            ask_for((const char *)(intptr_t)from[row + 1], (Py_ssize_t)size[row + 1]);
        if (!text)
            one = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size[row]);
        else if (size[row] > 1 && is_ascii(source, size[row])) /* one character is a str that exists already */
            one = PyUnicode_New((Py_ssize_t)size[row], 127);
        else
            one = PyUnicode_DecodeUTF8(source, (Py_ssize_t)size[row], "strict");
        if (!one) {
            Py_CLEAR(list);
            break;
        }
        if (!text)
            to[row] = PyBytes_AS_STRING(one);
        else if (size[row] > 1 && PyUnicode_IS_ASCII(one))
            to[row] = PyUnicode_DATA(one);
        bytes += size[row];
        PyList_SET_ITEM(list, row, one);
    }
    if (list) {
        PyThreadState *let_go = bytes >= WORTH_LETTING_GO ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t row = 0; row < rows; row++)
            if (to[row] && size[row])
                memcpy(to[row], (const char *)(intptr_t)from[row], (size_t)size[row]);
        if (let_go)
            PyEval_RestoreThread(let_go);
    }
    PyMem_Free(to);
    return list;
}

static PyObject *bytes_at(PyObject *self, PyObject *args)
{
    Table table;
    if (copy_spans_of(args, &table) < 0)
        return NULL;
    PyObject *list = objects_at(table.numbers, table.numbers + table.rows, table.rows, 0);
    PyMem_Free(table.numbers);
    return list;
}

/* Rows of blocks as objects: those that are objects already, and new ones. */
static PyObject *objects_of(PyObject *self, PyObject *args)
{
    PyObject *facts_object, *arrays[2], *list = NULL;
    Py_buffer facts;
    Py_ssize_t column, news = 0;
    int text, fits;
    Table table;
    if (!PyArg_ParseTuple(args, "OOOnp:objects_of", &facts_object, &arrays[0], &arrays[1], &column, &text) ||
        copy_table(arrays, 2, &table) < 0)
        return NULL;
    if (PyObject_GetBuffer(facts_object, &facts, PyBUF_C_CONTIGUOUS) < 0)
        goto no_facts;
    const Py_ssize_t rows = table.rows;
    int64_t *which = table.numbers, *row = which + rows; /* in their places: addresses and sizes of those that are new */
    PyObject **found = PyMem_Calloc((size_t)(rows + 1), sizeof *found);
    if (!found) {
        PyErr_NoMemory();
        goto no_memory;
    }
    fits = facts.ndim == 2 && facts.itemsize == 8 && column >= 0 && column < (facts.shape[1] - 1) / FACTS;
    for (Py_ssize_t n = 0; fits && n < rows; n++) {
        if (!(fits = which[n] >= 0 && which[n] < facts.shape[0]))
            break;
        const int64_t *block = (const int64_t *)facts.buf + which[n] * facts.shape[1], *field = block + 1 + FACTS * column;
        if (!(fits = row[n] >= 0 && row[n] < block[0]))
            break;
        if (field[3] == OBJECT_PITCH) {
            PyObject *objects = (PyObject *)(intptr_t)field[2];
            if (!(fits = PyTuple_Check(objects) && row[n] < PyTuple_GET_SIZE(objects)))
                break;
            found[n] = PyTuple_GET_ITEM(objects, row[n]);
            continue;
        }
        const int64_t start = row_start(field, row[n]), size = row_end(field, row[n]) - start;
        fits = size >= 0 && field[3] == 8;
        which[news] = field[2] + start, row[news++] = size;
    }
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "expected rows of blocks, and a field of theirs");
    else if ((list = objects_at(which, row, news, text)) && news < rows) {
        PyObject *made = list;
        if ((list = PyList_New(rows)))
            for (Py_ssize_t n = 0, at = 0; n < rows; n++)
                PyList_SET_ITEM(list, n, Py_NewRef(found[n] ? found[n] : PyList_GET_ITEM(made, at++)));
        Py_DECREF(made);
    }
    PyMem_Free(found);
no_memory:
    PyBuffer_Release(&facts);
no_facts:
    PyMem_Free(table.numbers);
    return list;
}

#define MOST_DIGITS 18 /* of any so many digits the value fits int64 */

/* The value of a canonical decimal; 0 on success. */
static int parse_decimal(const char *text, int64_t size, int64_t *value)
{
    const int negative = size > 1 && text[0] == '-';
    int64_t found = 0;
    if (size - negative < 1 || size - negative > MOST_DIGITS || (size > 1 && text[negative] == '0'))
        return -1;
    for (int64_t at = negative; at < size; at++) {
        const unsigned digit = (unsigned char)text[at] - (unsigned)'0';
        if (digit > 9)
            return -1;
        found = found * 10 + digit;
    }
    *value = negative ? -found : found;
    return 0;
}

static PyObject *decimals_at(PyObject *self, PyObject *args)
{
    Table table;
    if (copy_spans_of(args, &table) < 0)
        return NULL;
    const Py_ssize_t rows = table.rows;
    int64_t *from = table.numbers, *size = from + rows;
    Py_ssize_t row = 0;
    PyThreadState *let_go = PyEval_SaveThread();
    for (; row < rows; row++) {
        if (row + FAR_AHEAD < rows)
            ask_for((const char *)(intptr_t)from[row + FAR_AHEAD], 1);
        int64_t value; /* takes the place of the address it was read from */
        if (parse_decimal((const char *)(intptr_t)from[row], size[row], &value) < 0)
            break;
        from[row] = value;
    }
    PyEval_RestoreThread(let_go);
    PyObject *values = NULL;
    if (row == rows)
        values = PyBytes_FromStringAndSize((const char *)from, rows * 8);
    PyMem_Free(table.numbers);
    if (row < rows)
        Py_RETURN_NONE;
    return values;
}

static PyObject *hashes_sha256(PyObject *self, PyObject *ignored) { return PyBool_FromLong(sha256_is_here()); }
static PyObject *opens_zstd(PyObject *self, PyObject *ignored) { return PyBool_FromLong(zstd.make != NULL); }

static PyMethodDef functions[] = {
    {"hashes_sha256", hashes_sha256, METH_NOARGS, "hashes_sha256(): whether jobs may have a SHA-256 digest: the processor has instructions for it."},
    {"opens_zstd", opens_zstd, METH_NOARGS, "opens_zstd(): whether jobs may be compressed: the system has libzstd."},
    {"ways", ways, METH_NOARGS, "ways(): in how many ways this processor can hash; all give the same hashes."},
    {"load_blocks", load_blocks, METH_VARARGS,
     "load_blocks(jobs, objects, way): read, hash and open blocks; (how many, whether the last was not in the page cache)."},
    {"make_objects", make_objects, METH_O, "make_objects(job): a tuple of empty bytes objects for the rows of a field, or None."},
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(target, addresses, size or sizes): the row at each address, end to end into `target`."},
    {"gather_rows", gather_rows, METH_VARARGS,
     "gather_rows(targets, facts, which, rows, columns): rows of blocks, field by field, end to end into a list of targets; 0 if done."},
    {"bytes_at", bytes_at, METH_VARARGS, "bytes_at(addresses, sizes): a list of the bytes at each address."},
    {"objects_of", objects_of, METH_VARARGS,
     "objects_of(facts, which, rows, column, text): a list of the bytes, or the str, of rows of blocks."},
    {"decimals_at", decimals_at, METH_VARARGS,
     "decimals_at(addresses, sizes): the int64 values of canonical decimals as bytes; None where one of them is not."},
    {NULL, NULL, 0, NULL},
};

static int add_names(PyObject *module)
{
    static int has_key;
    find_zstd();
    if (!has_key && pthread_key_create(&scratch_key, release_scratch)) {
        PyErr_NoMemory();
        return -1;
    }
    has_key = 1;
    return PyModule_AddIntMacro(module, COPIED);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_names},
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "block_rows",
    .m_doc = "Reads and hashes blocks and copies rows out of them, while other threads run.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_block_rows(void) { return PyModuleDef_Init(&definition); }
