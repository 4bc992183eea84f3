"""Attacks on a running router, every answer verified.

The emulated model is a function: the tokens of an answer follow from its own prompt (`balanceroute.engine.tokens`). So
a client knows the one right answer beforehand, and a mixed-up, shortened or repeated one can't pass for right,
whatever happened to the workers meanwhile.

    asks.py      what clients send, with the answer that must come
    wire.py      an HTTP client that can also leave, stop reading, or wait for ever
    verdict.py   an answer against what was asked
    faults.py    what happens to the workers, and when
    stack.py     the processes: emulated cluster, router; their memory
    aftermath.py what must be zero when all is over
    folder.py    where a run writes its logs
    fuzzing.py   how the fuzzers damage bytes, and their command
    chaos.py, soak.py, siege.py, fuzz_sse.py, fuzz_http.py, fuzz_connections.py    the runs
"""
