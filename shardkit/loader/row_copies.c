/* Copies of many rows in one call, during which other threads run.
 *
 * What gather.py does with numpy, ctypes and slices, for the places that it has checked: each row lies at an absolute
 * address inside a verified block that the caller keeps alive. A loop in Python would take the interpreter back after
 * every row; here it is let go once per call. Optional: without this module gather.py copies by itself.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define WORTH_LETTING_GO (1 << 15) /* bytes; a shorter copy is over before another thread has begun */
#define AHEAD 2048              /* bytes of the next row that are asked for while one is copied */
#define LONG (1 << 14)          /* bytes of a row that is worth asking ahead for inside of it */
#define PART 2048               /* bytes that are asked for at a time, two parts before they are read */

/* An int64 array of a caller, as (values, number); 0 on success. */
static int borrow(PyObject *array, Py_buffer *held, const char *name)
{
    if (PyObject_GetBuffer(array, held, PyBUF_SIMPLE) < 0)
        return -1;
    if (held->len % 8 || (uintptr_t)held->buf % 8) {
        PyBuffer_Release(held);
        PyErr_Format(PyExc_ValueError, "%s: expected contiguous, aligned int64 values", name);
        return -1;
    }
    return 0;
}

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

static PyObject *copy_rows(PyObject *self, PyObject *args)
{
    PyObject *target_object, *addresses_object;
    Py_ssize_t size;
    Py_buffer target, addresses;
    if (!PyArg_ParseTuple(args, "OOn:copy_rows", &target_object, &addresses_object, &size))
        return NULL;
    if (PyObject_GetBuffer(target_object, &target, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (borrow(addresses_object, &addresses, "addresses") < 0) {
        PyBuffer_Release(&target);
        return NULL;
    }
    const int64_t *from = addresses.buf;
    const Py_ssize_t rows = addresses.len / 8;
    char *to = target.buf;
    if (size < 0 || (size && rows > PY_SSIZE_T_MAX / size) || target.len != rows * size) {
        PyErr_Format(PyExc_ValueError, "a target of %zd bytes for %zd rows of %zd", target.len, rows, size);
    } else {
        PyThreadState *let_go = target.len >= WORTH_LETTING_GO ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t row = 0; row < rows; row++) {
            if (row + 1 < rows)
                ask_for((const char *)(intptr_t)from[row + 1], size);
            copy(to + row * size, (const char *)(intptr_t)from[row], size);
        }
        if (let_go)
            PyEval_RestoreThread(let_go);
    }
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&target);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* (addresses, sizes) of the arguments: as many of the one as of the other; 0 on success. */
static int borrow_spans(PyObject *args, Py_buffer *addresses, Py_buffer *sizes)
{
    PyObject *addresses_object, *sizes_object;
    if (!PyArg_ParseTuple(args, "OO", &addresses_object, &sizes_object))
        return -1;
    if (borrow(addresses_object, addresses, "addresses") < 0)
        return -1;
    if (borrow(sizes_object, sizes, "sizes") < 0) {
        PyBuffer_Release(addresses);
        return -1;
    }
    if (addresses->len != sizes->len) {
        PyErr_Format(PyExc_ValueError, "%zd addresses and %zd sizes", addresses->len / 8, sizes->len / 8);
        PyBuffer_Release(sizes);
        PyBuffer_Release(addresses);
        return -1;
    }
    return 0;
}

/* The same behind a target that can be written to; 0 on success. */
static int borrow_target_and_spans(PyObject *args, Py_buffer *target, Py_buffer *addresses, Py_buffer *sizes)
{
    if (PyTuple_GET_SIZE(args) != 3) {
        PyErr_SetString(PyExc_TypeError, "expected target, addresses, sizes");
        return -1;
    }
    PyObject *spans = PyTuple_GetSlice(args, 1, 3);
    const int failed = !spans || borrow_spans(spans, addresses, sizes) < 0;
    Py_XDECREF(spans);
    if (failed)
        return -1;
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(args, 0), target, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(sizes);
        PyBuffer_Release(addresses);
        return -1;
    }
    return 0;
}

static PyObject *copy_spans(PyObject *self, PyObject *args)
{
    Py_buffer target, addresses, sizes;
    if (borrow_target_and_spans(args, &target, &addresses, &sizes) < 0)
        return NULL;
    const int64_t *from = addresses.buf, *size = sizes.buf;
    const Py_ssize_t rows = addresses.len / 8;
    Py_ssize_t left = target.len;
    for (Py_ssize_t row = 0; row < rows && left >= 0; row++)
        left = size[row] < 0 || size[row] > left ? -1 : left - (Py_ssize_t)size[row];
    if (left) {
        PyErr_Format(PyExc_ValueError, "a target of %zd bytes for rows of another sum", target.len);
    } else {
        char *to = target.buf;
        PyThreadState *let_go = target.len >= WORTH_LETTING_GO ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t row = 0; row < rows; to += size[row++])
            copy(to, (const char *)(intptr_t)from[row], (Py_ssize_t)size[row]);
        if (let_go)
            PyEval_RestoreThread(let_go);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&addresses);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* A list of new bytes objects of these sizes, not filled; nobody else sees them yet. Sets *total. */
static PyObject *empty_bytes(const int64_t *size, Py_ssize_t rows, Py_ssize_t *total)
{
    PyObject *list = PyList_New(rows);
    *total = 0;
    for (Py_ssize_t row = 0; list && row < rows; row++) {
        PyObject *one = NULL;
        if (size[row] < 0)
            PyErr_Format(PyExc_ValueError, "row %zd: a size of %lld bytes", row, (long long)size[row]);
        else
            one = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size[row]);
        if (!one) {
            Py_CLEAR(list);
            break;
        }
        *total += (Py_ssize_t)size[row];
        PyList_SET_ITEM(list, row, one);
    }
    return list;
}

static PyObject *bytes_at(PyObject *self, PyObject *args)
{
    Py_buffer addresses, sizes;
    Py_ssize_t total;
    if (borrow_spans(args, &addresses, &sizes) < 0)
        return NULL;
    const int64_t *from = addresses.buf, *size = sizes.buf;
    const Py_ssize_t rows = addresses.len / 8;
    PyObject *list = empty_bytes(size, rows, &total);
    char **to = list ? PyMem_Malloc((size_t)(rows ? rows : 1) * sizeof *to) : NULL;
    if (list && !to) {
        PyErr_NoMemory();
        Py_CLEAR(list);
    }
    if (list) {
        for (Py_ssize_t row = 0; row < rows; row++)
            to[row] = PyBytes_AS_STRING(PyList_GET_ITEM(list, row));
        PyThreadState *let_go = total >= WORTH_LETTING_GO ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t row = 0; row < rows; row++)
            copy(to[row], (const char *)(intptr_t)from[row], (Py_ssize_t)size[row]);
        if (let_go)
            PyEval_RestoreThread(let_go);
    }
    PyMem_Free(to);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&addresses);
    return list;
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

/* Texts that are ASCII, as most are, need no decoder: a new str of that size is filled while others run. */
static PyObject *texts_at(PyObject *self, PyObject *args)
{
    Py_buffer addresses, sizes;
    if (borrow_spans(args, &addresses, &sizes) < 0)
        return NULL;
    const int64_t *from = addresses.buf, *size = sizes.buf;
    const Py_ssize_t rows = addresses.len / 8;
    PyObject *list = PyList_New(rows);
    void **to = list ? PyMem_Calloc((size_t)(rows ? rows : 1), sizeof *to) : NULL; /* NULL: is decoded */
    if (list && !to) {
        PyErr_NoMemory();
        Py_CLEAR(list);
    }
    if (list) {
        PyThreadState *let_go = PyEval_SaveThread();
        for (Py_ssize_t row = 0; row < rows; row++) /* one character is a str that exists already */
            to[row] = size[row] > 1 && is_ascii((const char *)(intptr_t)from[row], size[row]) ? to : NULL;
        PyEval_RestoreThread(let_go);
    }
    for (Py_ssize_t row = 0; list && row < rows; row++) {
        PyObject *one = NULL;
        if (size[row] < 0)
            PyErr_Format(PyExc_ValueError, "row %zd: a size of %lld bytes", row, (long long)size[row]);
        else if (to[row])
            one = PyUnicode_New((Py_ssize_t)size[row], 127);
        else
            one = PyUnicode_DecodeUTF8((const char *)(intptr_t)from[row], (Py_ssize_t)size[row], "strict");
        if (!one) {
            Py_CLEAR(list);
            break;
        }
        to[row] = to[row] ? PyUnicode_DATA(one) : NULL;
        PyList_SET_ITEM(list, row, one);
    }
    if (list) {
        PyThreadState *let_go = PyEval_SaveThread();
        for (Py_ssize_t row = 0; row < rows; row++)
            if (to[row])
                copy(to[row], (const char *)(intptr_t)from[row], (Py_ssize_t)size[row]);
        PyEval_RestoreThread(let_go);
    }
    PyMem_Free(to);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&addresses);
    return list;
}

#define MOST_DIGITS 18 /* of any so many digits the value fits int64 */
#define FAR_AHEAD 8    /* rows: each lies somewhere else in memory */

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
    Py_buffer target, addresses, sizes;
    int all = 0;
    if (borrow_target_and_spans(args, &target, &addresses, &sizes) < 0)
        return NULL;
    if (target.len != addresses.len || (uintptr_t)target.buf % 8) {
        PyErr_Format(PyExc_ValueError, "a target of %zd bytes for %zd rows", target.len, addresses.len / 8);
    } else {
        const int64_t *from = addresses.buf, *size = sizes.buf;
        const Py_ssize_t rows = addresses.len / 8;
        int64_t *value = target.buf;
        Py_ssize_t row = 0;
        PyThreadState *let_go = PyEval_SaveThread();
        for (; row < rows; row++) {
            if (row + FAR_AHEAD < rows)
                ask_for((const char *)(intptr_t)from[row + FAR_AHEAD], 1);
            if (parse_decimal((const char *)(intptr_t)from[row], size[row], value + row) < 0)
                break;
        }
        PyEval_RestoreThread(let_go);
        all = row == rows;
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&addresses);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(all);
}

static PyMethodDef functions[] = {
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(target, addresses, size): the row of `size` bytes at each address, end to end into `target`."},
    {"copy_spans", copy_spans, METH_VARARGS,
     "copy_spans(target, addresses, sizes): rows of any sizes, end to end into `target`."},
    {"bytes_at", bytes_at, METH_VARARGS, "bytes_at(addresses, sizes): a list of the bytes at each address."},
    {"texts_at", texts_at, METH_VARARGS,
     "texts_at(addresses, sizes): a list of the UTF-8 text at each address, as str."},
    {"decimals_at", decimals_at, METH_VARARGS,
     "decimals_at(target, addresses, sizes): the int64 values of canonical decimals; whether all of them are."},
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
    .m_name = "row_copies",
    .m_doc = "Copies of many rows in one call, during which other threads run.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_row_copies(void) { return PyModuleDef_Init(&definition); }
