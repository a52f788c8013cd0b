"""Run a program that the kernel kills when its parent ends: ``bound.py PARENT PROGRAM...``.

The parent may be killed before it can end the program. ``PARENT`` is the parent's process id.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that has ended before this call sends no signal.
    if os.getppid() == int(parent):
        os.execvp(command[0], command)
