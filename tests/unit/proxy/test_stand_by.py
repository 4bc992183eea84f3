"""A brain that stands by hears the parent, and loses no signal of it when it takes the lead."""

import signal
import subprocess
import sys
from pathlib import Path

from balanceroute.proxy.link.leadership import FileLead

STANDBY = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # before numpy starts threads
from pathlib import Path
from balanceroute.proxy.brain import stand_by
from balanceroute.proxy.link.leadership import FileLead

def tell(word):
    print(word, flush=True)

assert stand_by(FileLead(Path(sys.argv[1])), lambda: tell("follows"), lambda: tell("waits"))
os.kill(os.getpid(), signal.SIGHUP)
tell("leads, and will hear" if signal.SIGHUP in signal.sigpending() else "leads")
"""


def test_a_reload_while_a_standby_takes_the_lead_is_applied_later(tmp_path: Path) -> None:
    lead = FileLead(tmp_path / "lead")
    assert lead.take()
    command = [sys.executable, "-c", STANDBY, str(tmp_path / "lead")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as standby:
        assert standby.stdout is not None
        assert standby.stdout.readline() == "waits\n" and lead.renew()
        standby.send_signal(signal.SIGHUP)
        assert standby.stdout.readline() == "follows\n"
        lead.release()
        assert standby.stdout.readline() == "leads, and will hear\n"
    assert standby.returncode == 0
