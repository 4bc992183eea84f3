# cython: language_level=3, boundscheck=False, wraparound=False
"""The twin of `reference.py`, name by name; what is done and why is said there."""

from array import array

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcmp, memcpy

cdef enum:
    SIZE_DIGITS = 8
    ID_DIGITS = 10
    MAX_ID = 0xFFFFFFFF


cdef inline int hex_digit(char c) noexcept:
    if c'0' <= c <= c'9':
        return c - c'0'
    c |= 0x20
    return c - c'a' + 10 if c'a' <= c <= c'f' else -1


cdef Py_ssize_t chunk_at(const char* data, Py_ssize_t size, Py_ssize_t at, Py_ssize_t* start) noexcept:
    """Length of the whole chunk at `at`, and where its body starts; 0 if there is no such chunk, or it is the last."""
    cdef Py_ssize_t length = 0, i = at
    while i < size and i - at < SIZE_DIGITS and hex_digit(data[i]) >= 0:
        length = length * 16 + hex_digit(data[i])
        i += 1
    if i == at or size - i < length + 4 or data[i] != c'\r' or data[i + 1] != c'\n':
        return 0
    start[0] = i + 2
    i += length + 2
    return length if data[i] == c'\r' and data[i + 1] == c'\n' else 0


def unchunked(bytes data not None):
    cdef const char* raw = PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), at = 0, start = 0, length, total = 0
    while at < size:
        length = chunk_at(raw, size, at, &start)
        if length == 0:
            return None
        total += length
        at = start + length + 2
    if total == 0:
        return None
    cdef bytes body = PyBytes_FromStringAndSize(NULL, total)
    cdef char* out = PyBytes_AS_STRING(body)
    at = 0
    while at < size:
        length = chunk_at(raw, size, at, &start)
        memcpy(out, raw + start, length)
        out += length
        at = start + length + 2
    return body


cdef bint next_id(const char* data, Py_ssize_t* at, Py_ssize_t end, unsigned long long* value) noexcept:
    """Read the id at `at`, which moves behind it and its comma; False if there is none, or a comma without a next."""
    cdef Py_ssize_t first = at[0], i = at[0]
    value[0] = 0
    while i < end and i - first <= ID_DIGITS and c'0' <= data[i] <= c'9':
        value[0] = value[0] * 10 + (data[i] - c'0')
        i += 1
    if i == first or i - first > ID_DIGITS or value[0] > MAX_ID:
        return False
    at[0] = i + 1
    return i == end or (data[i] == c',' and i + 1 < end)


cdef class EventMatcher:
    cdef public object tokens, printed, ids, end
    cdef public list parts
    cdef public bint want_ids
    cdef bint same_head
    cdef bytes head, mid, tail, head_out, end_out

    def __init__(self, bint want_ids):
        self.tokens = self.printed = 0
        self.ids = array("I")
        self.end = None
        self.parts = []
        self.want_ids = want_ids
        self.forget()

    def learn(
        self,
        bytes head not None,
        bytes mid not None,
        bytes tail not None,
        bytes head_out not None,
        bytes end_out not None,
    ):
        self.head, self.mid, self.tail = head, mid, tail
        self.head_out, self.end_out = head_out, end_out
        self.same_head = head_out == head

    def forget(self):
        self.learn(b"", b"\n", b"", b"", b"")

    def match(self, bytes raw not None):
        if self.end is not None or self.parts:
            return None
        cdef const char* data = PyBytes_AS_STRING(raw)
        cdef Py_ssize_t n_head = PyBytes_GET_SIZE(self.head), n_mid = PyBytes_GET_SIZE(self.mid)
        cdef Py_ssize_t n_tail = PyBytes_GET_SIZE(self.tail), ids_end = PyBytes_GET_SIZE(raw) - n_tail
        if ids_end < n_head + n_mid or memcmp(data, PyBytes_AS_STRING(self.head), n_head) != 0:
            return None
        cdef Py_ssize_t stop = n_head
        while data[stop] != c'"':
            if data[stop] == c'\n' or stop + n_mid == ids_end:
                return None
            stop += 1
        cdef Py_ssize_t ids_at = stop + n_mid
        if ids_at > ids_end or memcmp(data + stop, PyBytes_AS_STRING(self.mid), n_mid) != 0:
            return None
        if memcmp(data + ids_end, PyBytes_AS_STRING(self.tail), n_tail) != 0:
            return None
        cdef Py_ssize_t at = ids_at, found = 0
        cdef unsigned long long value
        while at < ids_end:
            if not next_id(data, &at, ids_end, &value):
                return None
            found += 1
        at = ids_at
        while at < ids_end:
            next_id(data, &at, ids_end, &value)
            self.ids.append(value)
        self.tokens += found
        if stop > n_head:
            self.printed = self.tokens
        if self.want_ids:
            return raw if self.same_head else self.head_out + raw[n_head:]
        cdef Py_ssize_t n_out = PyBytes_GET_SIZE(self.head_out), n_end = PyBytes_GET_SIZE(self.end_out)
        cdef bytes relayed = PyBytes_FromStringAndSize(NULL, n_out + stop - n_head + n_end)
        cdef char* out = PyBytes_AS_STRING(relayed)
        memcpy(out, PyBytes_AS_STRING(self.head_out), n_out)
        memcpy(out + n_out, data + n_head, stop - n_head)
        memcpy(out + n_out + stop - n_head, PyBytes_AS_STRING(self.end_out), n_end)
        return relayed
