# The C types of what `events.py` names, for Cython, which compiles it as `compiled`.
cimport cython

cdef Py_ssize_t LARGE_READ_BYTES, _SIZE_DIGITS, _ID_DIGITS, _MAX_ID, _MAX_OUT_BYTES, _SHORT_TEXT
cdef list _SIZE_LINES


@cython.final
cdef class ChunkReader:
    cdef object _parse
    cdef public object take
    cdef public bint between_chunks


@cython.locals(raw=cython.p_const_uchar, end=Py_ssize_t, parts=list, at=Py_ssize_t, i=Py_ssize_t, size=Py_ssize_t,
               digit=Py_ssize_t, stop=Py_ssize_t, body=bytes)
cpdef bytes unchunked(bytes data)


@cython.final
cdef class Pump:
    cdef object _reply, _scanner, _client, _write, _done, _waiter
    cdef EventMatcher _matcher
    cdef Flusher _flusher
    cdef Py_ssize_t _counted
    cdef bint _ended
    cdef public object on_tokens, error, failure
    cdef public bint blocked, over
    cdef public bytes out

    @cython.locals(out=bytes, tokens=Py_ssize_t)
    cpdef chunk(self, bytes data)

    @cython.locals(out=bytes)
    cpdef flush(self)

    cdef _send(self, bytes out)
    cdef _stir(self)


@cython.final
cdef class EventMatcher:
    cdef public Py_ssize_t tokens, printed
    cdef public object ids
    cdef public bytes last_text, text_before
    cdef public bint between_events
    cdef object _add_id
    cdef bint _want_ids, _drops_empty
    cdef bytes _head, _mid, _tail, _head_out, _end_out

    @cython.locals(tokens=Py_ssize_t, printed=Py_ssize_t, kept=Py_ssize_t, out=list, at=Py_ssize_t, end=Py_ssize_t,
                   last_text=bytes, text_before=bytes)
    cpdef bytes match(self, bytes raw)

    @cython.locals(data=cython.p_const_uchar, end=Py_ssize_t, text_at=Py_ssize_t, stop=Py_ssize_t, limit=Py_ssize_t,
                   text=bytes)
    cdef Py_ssize_t _take(self, bytes raw, Py_ssize_t at, list out) except -2

    @cython.locals(data=cython.p_const_uchar, end=Py_ssize_t, first=Py_ssize_t, value=Py_ssize_t)
    cdef Py_ssize_t _take_ids(self, bytes raw, Py_ssize_t at) except -2


@cython.final
cdef class Flusher:
    cdef object _call_soon, __weakref__
    cdef list _due

    cpdef add(self, Pump pump)

    @cython.locals(due=list, pump=Pump)
    cpdef flush(self)


@cython.final
cdef class PartWriter:
    cdef object _send, _write_other
    cdef public bint open, chunked
    cdef public bytes head

    @cython.locals(size=Py_ssize_t)
    cpdef write(self, bytes body)


@cython.locals(data=cython.p_const_uchar, kinds=cython.p_const_uchar, end=Py_ssize_t, i=Py_ssize_t, after=Py_ssize_t)
cpdef count_pairs(bytes text, bytes class_of, Py_ssize_t classes, Py_ssize_t before, long long[::1] counts)


@cython.locals(
    data=cython.p_const_uchar,
    kinds=cython.p_const_uchar,
    end=Py_ssize_t,
    i=Py_ssize_t,
    after=Py_ssize_t,
    pair=Py_ssize_t,
    first=double,
    second=double,
)
cpdef tuple weigh_pairs(
    bytes text, bytes class_of, Py_ssize_t classes, Py_ssize_t before, double[::1] weights, Py_ssize_t size
)


@cython.locals(found=list, i=Py_ssize_t, value="long long")
cpdef list grown_counts(const long long[::1] now, long long[::1] known, Py_ssize_t end)
