# cython: language_level=3, boundscheck=False, wraparound=False
"""The twin of `reference.py`, name by name; what is done and why is said there.

What is called from within this file has a `cdef` method behind its public one: a call of C instead of Python's.
"""

from array import array

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcmp, memcpy

cdef enum:
    SIZE_DIGITS = 7
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


cdef struct Event:
    Py_ssize_t text, stop, ids, ids_end, end  # where each begins, but for the ends


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


cdef inline bint is_at(const char* data, Py_ssize_t size, Py_ssize_t at, bytes what) noexcept:
    return size - at >= PyBytes_GET_SIZE(what) and memcmp(data + at, PyBytes_AS_STRING(what), PyBytes_GET_SIZE(what)) == 0


cdef class EventMatcher:
    cdef public object tokens, printed, ids, end
    cdef public list parts
    cdef public bint want_ids
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

    def forget(self):
        self.learn(b"", b"\n", b"]", b"", b"")

    cdef Py_ssize_t fit(self, const char* data, Py_ssize_t size, Py_ssize_t at, Event* event) noexcept:
        """Take apart the event at `at`: how many ids it has, or -1 if it does not fit."""
        cdef unsigned long long value
        cdef Py_ssize_t ids = 0, i
        if not is_at(data, size, at, self.head):
            return -1
        event.text = i = at + PyBytes_GET_SIZE(self.head)
        while i < size and data[i] != c'"':
            if data[i] == c'\n':
                return -1
            i += 1
        event.stop = i
        if not is_at(data, size, i, self.mid):
            return -1
        event.ids = i = i + PyBytes_GET_SIZE(self.mid)
        while i < size and (c'0' <= data[i] <= c'9' or data[i] == c','):
            i += 1
        event.ids_end = i
        event.end = i + PyBytes_GET_SIZE(self.tail)
        if not is_at(data, size, i, self.tail):
            return -1
        i = event.ids
        while i < event.ids_end:
            if not next_id(data, &i, event.ids_end, &value):
                return -1
            ids += 1
        return ids

    cdef take_ids(self, const char* data, Event* event):
        cdef unsigned long long value
        cdef Py_ssize_t i = event.ids
        while i < event.ids_end:
            next_id(data, &i, event.ids_end, &value)
            self.ids.append(value)

    def match(self, bytes raw not None):
        return self.relayed(raw)

    cdef bytes relayed(self, bytes raw):
        cdef const char* data = PyBytes_AS_STRING(raw)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(raw), at = 0, total = 0, ids = 0, printed = -1, events = 0, n
        cdef Py_ssize_t n_head = PyBytes_GET_SIZE(self.head_out), n_end = PyBytes_GET_SIZE(self.end_out)
        cdef Event event
        if size == 0 or self.end is not None or self.parts:
            return None
        while at < size:
            n = self.fit(data, size, at, &event)
            if n < 0:
                return None
            events += 1
            ids += n
            if event.stop > event.text:
                printed = ids
            total += n_head + (event.end - event.text if self.want_ids else event.stop - event.text + n_end)
            at = event.end
        cdef bytes whole = PyBytes_FromStringAndSize(NULL, total)
        cdef char* out = PyBytes_AS_STRING(whole)
        at = 0
        while at < size:
            if events > 1:  # else it is what `event` holds
                self.fit(data, size, at, &event)
            self.take_ids(data, &event)
            memcpy(out, PyBytes_AS_STRING(self.head_out), n_head)
            out += n_head
            n = (event.end if self.want_ids else event.stop) - event.text
            memcpy(out, data + event.text, n)
            out += n
            if not self.want_ids:
                memcpy(out, PyBytes_AS_STRING(self.end_out), n_end)
                out += n_end
            at = event.end
        if printed >= 0:
            self.printed = self.tokens + printed
        self.tokens += ids
        return whole


cdef class ChunkReader:
    cdef public bint between_chunks
    cdef public object reply

    def __init__(self):
        self.reply = None
        self.between_chunks = False

    def data_received(self, bytes data not None):
        reply = self.reply
        if reply is not None and self.between_chunks:
            body = unchunked(data)
            if body is not None:
                sink = reply.sink
                if isinstance(sink, EventPump):
                    (<EventPump>sink).read(body)
                elif sink is not None:
                    sink.chunk(body)
                else:
                    reply.keep(body)
                return
        self.parse(data)

    def parse(self, data):
        raise NotImplementedError


cdef class EventPump:
    cdef public EventMatcher scanner
    cdef public object on_tokens, write_part, blocked
    cdef public bytes out
    cdef object counted
    cdef Flusher flusher

    def __init__(self, EventMatcher scanner not None, on_tokens, Flusher flusher not None, write_part):
        self.scanner = scanner
        self.on_tokens = on_tokens
        self.flusher = flusher
        self.write_part = write_part
        self.counted = scanner.tokens
        self.blocked = None
        self.out = b""

    def chunk(self, bytes data not None):
        self.read(data)

    def take(self, bytes out not None):
        self.keep(out)

    def flush(self):
        self.write()

    cdef read(self, bytes data):
        cdef bytes out = self.scanner.relayed(data)
        if out is None:
            self.feed(data)
        else:
            self.keep(out)

    cdef keep(self, bytes out):
        tokens = self.scanner.tokens - self.counted
        if tokens:
            self.counted += tokens
            self.on_tokens(tokens)
        if not out:
            return
        if self.out:
            self.out += out
        else:
            self.out = out
            if self.blocked is None:
                self.flusher.add(self)

    cdef write(self):
        cdef bytes out = self.out
        if not out or self.blocked is not None:
            return
        if self.scanner.end is None and self.write_part is not None:
            self.out = b""
            if self.write_part(out):
                return
            self.out = out
        self.send()

    def feed(self, data):
        raise NotImplementedError

    def send(self):
        raise NotImplementedError

    def failed(self, error):
        raise NotImplementedError


cdef class Flusher:
    cdef list due
    cdef object loop
    cdef object __weakref__

    def __init__(self, loop):
        self.loop = loop
        self.due = []

    cdef add(self, EventPump pump):
        if not self.due:
            self.loop.call_soon(self.flush)
        self.due.append(pump)

    def flush(self):
        cdef EventPump pump
        due, self.due = self.due, []
        for pump in due:
            try:
                pump.write()
            except Exception as error:
                pump.failed(error)


cdef class PartWriter:
    cdef public object cycle, flow, transport

    def __init__(self, cycle):
        self.cycle, self.flow, self.transport = cycle, cycle.flow, cycle.transport

    def write(self, bytes body not None):
        if self.flow.write_paused or self.cycle.disconnected:
            return False
        part = b"%x\r\n%b\r\n" % (len(body), body)
        if self.transport.head:
            self.transport.write(part)
        else:
            self.transport.send(part)
        return True
