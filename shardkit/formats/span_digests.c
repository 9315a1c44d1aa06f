/* SHA-256 of several buffers, two at a time, in one call during which other threads run.
 *
 * The instructions for SHA-256 wait for their own results: a processor does two independent digests in little more than
 * the time of one, if they are interleaved, which hashlib has no call for. A build makes a digest of every block and of
 * every source file, all independent. FIPS 180-4; tests compare it with hashlib. Optional: without this module, or on a
 * processor without these instructions, digest.py calls hashlib.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#include <immintrin.h>
#define HAS_INSTRUCTIONS

#define BLOCK 64
#define LANES 2
#define INSIDE static inline __attribute__((always_inline, target("sha,sse4.1,ssse3")))

static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
/* The initial values, in the order in which the instructions hold them: F E B A, H G D C, lowest first. */
static const uint32_t initial[2][4] = {{0x9b05688c, 0x510e527f, 0xbb67ae85, 0x6a09e667},
                                       {0x5be0cd19, 0x1f83d9ab, 0xa54ff53a, 0x3c6ef372}};

/* One digest under way. */
typedef struct {
    uint32_t state[2][4];
    const unsigned char *from; /* whole blocks that are left */
    int64_t blocks;
    unsigned char end[2 * BLOCK]; /* the last bytes, and the padding */
    int64_t end_blocks;           /* 0 once they are `from` */
    Py_ssize_t which;             /* of the buffers; -1: there is none left for this lane */
} digest;

/* `blocks` whole blocks of each of the first `lanes` digests, which the compiler knows to be one or two. */
INSIDE void add_blocks(digest *under_way, int lanes, int64_t blocks)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i low[LANES], high[LANES];
    for (int lane = 0; lane < lanes; lane++) {
        low[lane] = _mm_loadu_si128((const __m128i *)under_way[lane].state[0]);
        high[lane] = _mm_loadu_si128((const __m128i *)under_way[lane].state[1]);
    }
    for (int64_t block = 0; block < blocks; block++) {
        __m128i words[LANES][4], low_before[LANES], high_before[LANES];
        for (int lane = 0; lane < lanes; lane++) {
            const unsigned char *from = under_way[lane].from + block * BLOCK;
            for (int four = 0; four < 4; four++)
                words[lane][four] =
                    _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)from + four), big_endian);
            low_before[lane] = low[lane];
            high_before[lane] = high[lane];
        }
#pragma GCC unroll 16
        for (int four = 0; four < 16; four++) {
            const __m128i constant = _mm_loadu_si128((const __m128i *)constants + four);
            for (int lane = 0; lane < lanes; lane++) {
                __m128i *const word = words[lane];
                const __m128i sum = _mm_add_epi32(word[four & 3], constant);
                high[lane] = _mm_sha256rnds2_epu32(high[lane], low[lane], sum);
                low[lane] = _mm_sha256rnds2_epu32(low[lane], high[lane], _mm_shuffle_epi32(sum, 0x0E));
                if (four < 12) {
                    const __m128i last = word[(four + 3) & 3],
                                  middle = _mm_alignr_epi8(last, word[(four + 2) & 3], 4),
                                  first = _mm_sha256msg1_epu32(word[four & 3], word[(four + 1) & 3]);
                    word[four & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(first, middle), last);
                }
            }
        }
        for (int lane = 0; lane < lanes; lane++) {
            low[lane] = _mm_add_epi32(low[lane], low_before[lane]);
            high[lane] = _mm_add_epi32(high[lane], high_before[lane]);
        }
    }
    for (int lane = 0; lane < lanes; lane++) {
        _mm_storeu_si128((__m128i *)under_way[lane].state[0], low[lane]);
        _mm_storeu_si128((__m128i *)under_way[lane].state[1], high[lane]);
        under_way[lane].from += blocks * BLOCK;
        under_way[lane].blocks -= blocks;
    }
}

__attribute__((target("sha,sse4.1,ssse3"))) static void add_to_one(digest *one, int64_t blocks)
{
    add_blocks(one, 1, blocks);
}

__attribute__((target("sha,sse4.1,ssse3"))) static void add_to_two(digest *two, int64_t blocks)
{
    add_blocks(two, 2, blocks);
}

static void big_endian_32(unsigned char *to, uint32_t value)
{
    for (int byte = 0; byte < 4; byte++)
        to[byte] = (unsigned char)(value >> (24 - 8 * byte));
}

static void begin(digest *one, const unsigned char *from, int64_t size, Py_ssize_t which)
{
    const int64_t rest = size % BLOCK;
    memcpy(one->state, initial, sizeof one->state);
    one->from = from;
    one->blocks = size / BLOCK;
    one->end_blocks = rest + 9 > BLOCK ? 2 : 1;
    one->which = which;
    memset(one->end, 0, sizeof one->end);
    if (rest)
        memcpy(one->end, from + size - rest, (size_t)rest);
    one->end[rest] = 0x80;
    big_endian_32(one->end + one->end_blocks * BLOCK - 8, (uint32_t)((uint64_t)size >> 29));
    big_endian_32(one->end + one->end_blocks * BLOCK - 4, (uint32_t)((uint64_t)size << 3));
}

static void finish(const digest *one, unsigned char *to)
{
    const uint32_t *low = one->state[0], *high = one->state[1];
    const uint32_t values[8] = {low[3], low[2], high[3], high[2], low[1], low[0], high[1], high[0]};
    for (int word = 0; word < 8; word++)
        big_endian_32(to + 4 * word, values[word]);
}

/* Digests of all buffers, 32 bytes each, one after the other in `to`. */
static void digests_of(const Py_buffer *buffers, Py_ssize_t number, unsigned char *to)
{
    digest lane[LANES];
    Py_ssize_t next = 0;
    lane[0].which = lane[1].which = -1;
    lane[0].blocks = lane[1].blocks = lane[0].end_blocks = lane[1].end_blocks = 0;
    for (;;) {
        for (int i = 0; i < LANES; i++)
            while (lane[i].blocks == 0) {
                if (lane[i].end_blocks) {
                    lane[i].from = lane[i].end;
                    lane[i].blocks = lane[i].end_blocks;
                    lane[i].end_blocks = 0;
                    break;
                }
                if (lane[i].which >= 0)
                    finish(&lane[i], to + 32 * lane[i].which);
                lane[i].which = -1;
                if (next == number)
                    break;
                begin(&lane[i], buffers[next].buf, buffers[next].len, next);
                next++;
            }
        if (lane[0].blocks && lane[1].blocks)
            add_to_two(lane, lane[0].blocks < lane[1].blocks ? lane[0].blocks : lane[1].blocks);
        else if (lane[0].blocks)
            add_to_one(&lane[0], lane[0].blocks);
        else if (lane[1].blocks)
            add_to_one(&lane[1], lane[1].blocks);
        else
            return;
    }
}

static int knows_instructions(void)
{
    unsigned int a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) && __builtin_cpu_supports("sse4.1") &&
           __builtin_cpu_supports("ssse3");
}
#endif

static PyObject *sha256_each(PyObject *self, PyObject *pieces)
{
#if defined(HAS_INSTRUCTIONS)
    PyObject *list = PySequence_List(pieces), *found = NULL;
    if (!list)
        return NULL;
    const Py_ssize_t number = PyList_GET_SIZE(list);
    Py_ssize_t held = 0;
    Py_buffer *buffers = PyMem_Calloc((size_t)(number ? number : 1), sizeof *buffers);
    unsigned char *digests = PyMem_Malloc((size_t)(number ? number : 1) * 32);
    if (!buffers || !digests)
        PyErr_NoMemory();
    else
        while (held < number && PyObject_GetBuffer(PyList_GET_ITEM(list, held), &buffers[held], PyBUF_C_CONTIGUOUS) == 0)
            held++;
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        digests_of(buffers, number, digests);
        Py_END_ALLOW_THREADS
        found = PyList_New(number);
        for (Py_ssize_t i = 0; found && i < number; i++) {
            PyObject *one = PyBytes_FromStringAndSize((const char *)digests + 32 * i, 32);
            if (!one)
                Py_CLEAR(found);
            else
                PyList_SET_ITEM(found, i, one);
        }
    }
    while (held)
        PyBuffer_Release(&buffers[--held]);
    PyMem_Free(buffers);
    PyMem_Free(digests);
    Py_DECREF(list);
    return found;
#else
    PyErr_SetString(PyExc_NotImplementedError, "compiled for a processor without instructions for SHA-256");
    return NULL;
#endif
}

static PyMethodDef functions[] = {
    {"sha256_each", sha256_each, METH_O, "sha256_each(pieces): a list of the SHA-256 of each buffer, 32 bytes."},
    {NULL, NULL, 0, NULL},
};

static int refuse_other_processors(PyObject *module)
{
#if defined(HAS_INSTRUCTIONS)
    if (knows_instructions())
        return 0;
#endif
    PyErr_SetString(PyExc_ImportError, "this processor has no instructions for SHA-256");
    return -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, refuse_other_processors},
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "span_digests",
    .m_doc = "SHA-256 of several buffers, two at a time, in one call during which other threads run.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_span_digests(void) { return PyModuleDef_Init(&definition); }
