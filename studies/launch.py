"""Become another Python process: ``python launch.py WORDS...`` is ``python WORDS...``, prepared.

What stays with a process through exec is set here, and not between fork and exec of a process that
may have threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

# A scheduler tells every process of a job that its time is up: this one is told by its parent.
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
if sys.platform == "linux":
    # Without its parent it saves and stops; elsewhere it goes on to its end.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
