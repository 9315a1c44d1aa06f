/* What the loader does to bytes, without the interpreter: read and hash blocks, copy rows out of them.
 *
 * A thread that takes the interpreter back after every block or row waits for it as long as it works; here it is let go
 * once per call. The caller (block_loading.py, gather.py) has checked where everything lies and keeps it alive. Numbers
 * of a caller are read once, while the interpreter is held: nobody changes them between the check and the copy.
 * Optional: without this module block_loading.py and gather.py do the same with os.preadv, xxhash and numpy.
 *
 * XXH3-64 is written from the description of the algorithm (xxHash, doc/xxhash_spec.md) for inputs of more than 240
 * bytes, with the default secret and no seed; tests compare it with the package.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- XXH3-64 */

#define STRIPE 64
#define STRIPES 16 /* of a block: (bytes of the secret - STRIPE) / 8 */
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

enum { INTACT, DIFFERENT, UNREADABLE };

/* `size` bytes of a file from `offset` on into memory, and whether they hash to what they should. */
static char load(way add_blocks, int file, int64_t offset, unsigned char *to, int64_t size, uint64_t hash)
{
    for (int64_t done = 0; done < size;) {
        const ssize_t got = pread(file, to + done, (size_t)(size - done), (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return UNREADABLE;
        done += got;
    }
    return xxh3(add_blocks, to, size) == hash ? INTACT : DIFFERENT;
}

#define COLD_NS 20000 /* and one for each byte: longer than any read from memory */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Disks are faster when asked for many blocks at a time; the system reads those that are asked for while this thread waits. */
static void ask_disk(const int64_t *file, const int64_t *offset, const int64_t *size, Py_ssize_t blocks)
{
#ifdef POSIX_FADV_WILLNEED
    for (Py_ssize_t n = 0; n < blocks; n++)
        (void)posix_fadvise((int)file[n], (off_t)offset[n], (off_t)size[n], POSIX_FADV_WILLNEED);
#else
    (void)file, (void)offset, (void)size, (void)blocks;
#endif
}

static PyObject *load_blocks(PyObject *self, PyObject *args)
{
    PyObject *arrays[5];
    way found[2];
    const int ways = ways_here(found);
    int wanted = ways - 1;
    Table table;
    if (!PyArg_ParseTuple(args, "OOOOO|i:load_blocks", &arrays[0], &arrays[1], &arrays[2], &arrays[3], &arrays[4], &wanted))
        return NULL;
    if (copy_table(arrays, 5, &table) < 0)
        return NULL;
    const Py_ssize_t rows = table.rows;
    const int64_t *file = table.numbers, *offset = file + rows, *address = offset + rows, *size = address + rows,
                  *hash = size + rows;
    int fits = wanted >= 0 && wanted < ways;
    for (Py_ssize_t row = 0; fits && row < rows; row++)
        fits = size[row] >= SHORTEST && offset[row] >= 0 && file[row] >= 0 && file[row] <= INT32_MAX;
    PyObject *states = fits ? PyBytes_FromStringAndSize(NULL, rows) : NULL;
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "expected blocks of more than 240 bytes in open files");
    if (states) {
        char *state = PyBytes_AS_STRING(states);
        Py_BEGIN_ALLOW_THREADS
        int asked = 0;
        for (Py_ssize_t row = 0; row < rows; row++) {
            const int64_t started = asked ? 0 : now_ns();
            state[row] = load(found[wanted], (int)file[row], offset[row], (unsigned char *)(intptr_t)address[row],
                              size[row], (uint64_t)hash[row]);
            if (!asked && (asked = now_ns() - started > COLD_NS + size[row]))
                ask_disk(file + row + 1, offset + row + 1, size + row + 1, rows - row - 1);
        }
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(table.numbers);
    return states;
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
#define LONG (1 << 14)          /* bytes of a row that is worth asking ahead for inside of it */
#define PART 2048               /* bytes that are asked for at a time, two parts before they are read */

static void ask_for(const char *row, Py_ssize_t size)
{
#if defined(__GNUC__) || defined(__clang__)
    for (Py_ssize_t at = 0; at < size && at < AHEAD; at += 64)
        __builtin_prefetch(row + at);
#else
    (void)row, (void)size;
#endif
}

/* Processors look ahead to the end of a page only, and not at all for what is written. */
static void copy(char *to, const char *from, Py_ssize_t size)
{
#if defined(__GNUC__) || defined(__clang__)
    if (size >= LONG)
        for (; size > 3 * PART; to += PART, from += PART, size -= PART) {
            for (Py_ssize_t at = 0; at < PART; at += 64) {
                __builtin_prefetch(from + 2 * PART + at, 0, 2);
                __builtin_prefetch(to + PART + at, 1);
            }
            memcpy(to, from, PART);
        }
#endif
    memcpy(to, from, (size_t)size);
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
            copy(to, (const char *)(intptr_t)from[row], size);
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
#define FACTS 4            /* of a field of a block, after its rows: addresses of values, ends and data; bytes between rows */
#define DECIMAL_PITCH (-8) /* between rows that lie in their block as decimal texts */

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
        which[n] = field[0] + row[n] * field[3];
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
        PyObject *target = PyList_GetItem(list, targets->count); /* another thread may have made it shorter */
        if (!target || PyObject_GetBuffer(target, one, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) {
            release_targets(targets);
            return -1;
        }
        targets->size += one->len;
    }
    return 0;
}

static PyObject *gather_rows(PyObject *self, PyObject *args)
{
    PyObject *list, *facts_object, *arrays[2];
    Py_ssize_t column;
    Py_buffer facts;
    Targets targets;
    Table table;
    int state = -1;
    if (!PyArg_ParseTuple(args, "O!OOOn:gather_rows", &PyList_Type, &list, &facts_object, &arrays[0], &arrays[1], &column))
        return NULL;
    if (copy_table(arrays, 2, &table) < 0)
        return NULL;
    if (hold_targets(list, &targets) < 0)
        goto no_targets;
    if (PyObject_GetBuffer(facts_object, &facts, PyBUF_C_CONTIGUOUS) < 0)
        goto no_facts;
    const Py_ssize_t rows = table.rows, size = rows ? targets.size / rows : 0;
    int fits = facts.ndim == 2 && facts.itemsize == 8 && column >= 0 && column < (facts.shape[1] - 1) / FACTS &&
               size * rows == targets.size;
    for (Py_ssize_t n = 0; fits && n < targets.count; n++)
        fits = size ? targets.held[n].len % size == 0 : targets.held[n].len == 0;
    if (!fits)
        PyErr_Format(PyExc_ValueError, "targets of %zd bytes for %zd rows of field %zd", targets.size, rows, column);
    else if ((state = find_rows(&table, &facts, column)) == COPIED && size) {
        PyThreadState *let_go = targets.size >= WORTH_LETTING_GO ? PyEval_SaveThread() : NULL;
        const int64_t *from = table.numbers;
        for (Py_ssize_t n = 0; n < targets.count; n++) {
            const Py_ssize_t some = targets.held[n].len / size;
            copy_each(targets.held[n].buf, from, some, NULL, size);
            from += some;
        }
        if (let_go)
            PyEval_RestoreThread(let_go);
    }
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

/* New objects of these sizes that nobody else sees yet are filled while others run. Texts that are ASCII, as most are,
 * need no decoder; `to` is NULL for those that were decoded. */
static PyObject *objects_at(PyObject *args, int text)
{
    Table table;
    if (copy_spans_of(args, &table) < 0)
        return NULL;
    const Py_ssize_t rows = table.rows;
    const int64_t *from = table.numbers, *size = from + rows;
    PyObject *list = PyList_New(rows);
    char **to = list ? PyMem_Calloc((size_t)(rows ? rows : 1), sizeof *to) : NULL;
    if (list && !to) {
        PyErr_NoMemory();
        Py_CLEAR(list);
    }
    if (list && text) {
        PyThreadState *let_go = PyEval_SaveThread();
        for (Py_ssize_t row = 0; row < rows; row++) /* one character is a str that exists already */
            to[row] = size[row] > 1 && is_ascii((const char *)(intptr_t)from[row], size[row]) ? (char *)to : NULL;
        PyEval_RestoreThread(let_go);
    }
    for (Py_ssize_t row = 0; list && row < rows; row++) {
        const char *source = (const char *)(intptr_t)from[row];
        PyObject *one;
        if (!text)
            one = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size[row]);
        else if (to[row])
            one = PyUnicode_New((Py_ssize_t)size[row], 127);
        else
            one = PyUnicode_DecodeUTF8(source, (Py_ssize_t)size[row], "strict");
        if (!one) {
            Py_CLEAR(list);
            break;
        }
        if (!text)
            to[row] = PyBytes_AS_STRING(one);
        else if (to[row])
            to[row] = PyUnicode_DATA(one);
        PyList_SET_ITEM(list, row, one);
    }
    if (list) {
        PyThreadState *let_go = PyEval_SaveThread();
        for (Py_ssize_t row = 0; row < rows; row++)
            if (to[row] && size[row])
                copy(to[row], (const char *)(intptr_t)from[row], (Py_ssize_t)size[row]);
        PyEval_RestoreThread(let_go);
    }
    PyMem_Free(to);
    PyMem_Free(table.numbers);
    return list;
}

static PyObject *bytes_at(PyObject *self, PyObject *args) { return objects_at(args, 0); }

static PyObject *texts_at(PyObject *self, PyObject *args) { return objects_at(args, 1); }

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

static PyMethodDef functions[] = {
    {"load_blocks", load_blocks, METH_VARARGS,
     "load_blocks(files, offsets, addresses, sizes, hashes, way=ways() - 1): read each block to its address; one byte each:\n"
     "0 where it hashes to what it should, 1 where it does not, 2 where it could not be read."},
    {"ways", ways, METH_NOARGS, "ways(): in how many ways this processor can hash; all give the same hashes."},
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(target, addresses, size or sizes): the row at each address, end to end into `target`."},
    {"gather_rows", gather_rows, METH_VARARGS,
     "gather_rows(targets, facts, which, rows, column): rows of blocks, of one field, end to end into a list of targets; 0 if done."},
    {"bytes_at", bytes_at, METH_VARARGS, "bytes_at(addresses, sizes): a list of the bytes at each address."},
    {"texts_at", texts_at, METH_VARARGS,
     "texts_at(addresses, sizes): a list of the UTF-8 text at each address, as str."},
    {"decimals_at", decimals_at, METH_VARARGS,
     "decimals_at(addresses, sizes): the int64 values of canonical decimals as bytes; None where one of them is not."},
    {NULL, NULL, 0, NULL},
};

static int add_constants(PyObject *module) { return PyModule_AddIntMacro(module, COPIED); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_constants},
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
