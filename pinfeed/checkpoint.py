"""Save and resume a run, also in the middle of an epoch.

A checkpoint contains tables, optimizer state, positions of loops, random generators, and every
object that has a ``state_dict``:

    parts = dict(users=users, optimizer=optimizer, batches=batches, model=model)
    pinfeed.checkpoint.save("run/checkpoint", **parts)

After a crash, the next process creates all objects again and resumes. Its loop continues with the
next batch:

    pinfeed.checkpoint.resume("run/checkpoint", **parts)
    for batch in batches: ...

A checkpoint is a directory of complete saves. Each save is a directory named by a number. pinfeed
writes a save under another name, syncs it to the disk and then renames it. The save with the
highest number is therefore complete at any moment, even while the next one is written.
"""

from pinfeed.training.checkpoint.reader import check, exists, resume
from pinfeed.training.checkpoint.writer import save

__all__ = ["check", "exists", "resume", "save"]
