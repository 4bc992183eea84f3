"""The journal: every call into a scheduler with its time and what it answered, as JSON lines, and their rerun.

A scheduler has no clock, no randomness and no I/O, so the calls determine the answers: a rerun with the same version
must give the same actions byte for byte (INV-6). A difference means that the code decides otherwise now, and the line
says where first.

    {"journal": 1, "version": "0.1.0", "policy": "br_h", "params": {...}, "config": {...}}
    {"t": 12.25, "call": "submit", "args": {"spec": {"id": "a", "prompt_tokens": 900, ...}}, "answer": null}
    {"t": 12.5, "call": "tokens", "args": {"counts": {"a": 3, "b": 1}}, "answer": null}
    {"t": 12.5, "call": "admit", "args": {}, "answer": [{"request": "c", "worker": "d0", "stage": 1, "score": 4000.0}]}

A call that raised has `"raised": "..."` in place of `answer`. Progress is the exception to one line per call, because
it comes per token: counts are summed up in memory (one dictionary update per token) and written as one line `tokens`
before the next other call. The snapshot after a sum is the one after its summands, so decisions do not notice. JSON
has no infinity: bounds that are infinite are written as null.

The hashes of a prompt's blocks never leave the router: in their place stand keyed hashes of them, whose key is made
for this journal and written nowhere, so that a rerun can tell which prompts begin alike, and nobody anything else.

The file is buffered and flushed once per second of the calls' own time, so a killed process loses about a second and
may leave half a line, which a rerun forgives at the very end of the file.
"""

from balanceroute.journal.reading import Difference, RerunReport, rerun
from balanceroute.journal.writing import RecordingScheduler, check_replaceable

__all__ = ["Difference", "RecordingScheduler", "RerunReport", "check_replaceable", "rerun"]
