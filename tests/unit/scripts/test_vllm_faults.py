"""Which process the checks with real engines kill."""

import os
import subprocess
import sys

from scripts.e2e.vllm_faults import child_of

NAMED = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'br-brain-2'); print(1, flush=True); time.sleep(600)"


def test_the_brain_that_leads_is_found_also_where_it_is_not_the_first_one() -> None:
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            assert child_of(os.getpid(), "br-brain") == process.pid
        finally:
            process.kill()
