"""Save and resume a run, in the middle of an epoch too.

A checkpoint has tables, optimizer state, positions of loops, random generators, and every object
that has a ``state_dict``. It is a directory of complete saves, each a directory with a number. A
save is written under another name, synced to the disk and then renamed. At any moment, even in the
middle of a save, the highest number is therefore a complete one.

    parts = dict(users=users, optimizer=optimizer, batches=batches, model=model)
    save("run/checkpoint", **parts)

If the process is killed, the next one makes all objects again. Its loop continues with the very
next batch:

    resume("run/checkpoint", **parts)
    for batch in batches: ...
"""

from pinfeed.training.checkpoint.reader import check, exists, resume
from pinfeed.training.checkpoint.writer import save

__all__ = ["check", "exists", "resume", "save"]
