"""torchdata's StatefulDataLoader: wrapped, with prefetched batches and an exact state.

The state counts the batches that the loop has received, not those that were prefetched. A run stops
in the middle of an epoch, and resumes in another loader, wrapped or not, because the state is the
loader's own. A Feeder has ``state_dict``, too, and can replace a StatefulDataLoader, here in a
distributed checkpoint.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torchdata.stateful_dataloader import StatefulDataLoader

import pinfeed


def make() -> Any:
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(
        range(100), batch_size=8, shuffle=True, generator=generator, num_workers=2
    )


def first(loader: Any, n: int) -> tuple[list[list[int]], Any]:
    """Return the first batches of a loop, and the loader's state at the last of them."""
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == n:
            return seen, loader.state_dict()
    raise ValueError(f"{n} batches: found {len(seen)}")


def main() -> None:
    want = [batch.tolist() for batch in make()]
    for begin, go_on in (
        (pinfeed.wrap_loader(make(), depth=3), make()),
        (make(), pinfeed.wrap_loader(make(), depth=3)),
    ):
        # The wrapped loader prefetches three more batches, which its state must not count.
        seen, state = first(begin, 5)
        go_on.load_state_dict(state)
        assert seen + [batch.tolist() for batch in go_on] == want

    rows = np.arange(100)
    with (
        pinfeed.Feeder(rows, batch_size=8, shuffle=True) as feeder,
        tempfile.TemporaryDirectory() as folder,
    ):
        whole = [batch.tolist() for batch in feeder]
        feeder.set_epoch(0)
        seen, _ = first(feeder, 5)
        dcp.save({"data": feeder}, checkpoint_id=folder, no_dist=True)
        with pinfeed.Feeder(rows, batch_size=8, shuffle=True) as again:
            dcp.load({"data": again}, checkpoint_id=folder, no_dist=True)
            assert seen + [batch.tolist() for batch in again] == whole
    print(
        f"{len(want)} batches, left after 5 and resumed: "
        "wrapped, not wrapped, and from a distributed checkpoint"
    )


if __name__ == "__main__":
    main()
