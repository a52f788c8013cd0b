"""Module paths without a file: old paths in programs and pickles, and the public checkpoint path.

``import pinfeed`` installs a finder for these paths, behind Python's own finders. The finder looks
up a name of an old path in the new module, and a ``DeprecationWarning`` says the new path. Imports
and pickles that name an old path therefore work until pinfeed 0.2.0. The finder also makes
``import pinfeed.checkpoint`` work, whose module is in ``pinfeed.training``.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

MOVED = {
    "pinfeed.batches": "pinfeed.rows.batches",
    "pinfeed.config": "pinfeed.memory.limits",
    "pinfeed.feeder": "pinfeed.feeders.feeder",
    "pinfeed.loader": "pinfeed.feeders.dataloader",
    "pinfeed.ranks": "pinfeed.rows.ranks",
    "pinfeed.readers": "pinfeed.feeders.functions",
    "pinfeed.restarting": "pinfeed.feeders.restartable",
    "pinfeed.rowdataset": "pinfeed.feeders.dataset",
    "pinfeed.seeing.stats": "pinfeed.profiling.stats",
    "pinfeed.seeing.timeline": "pinfeed.profiling.timeline",
    "pinfeed.stores.extent": "pinfeed.stores.formats.row_layout",
    "pinfeed.stores.mmap": "pinfeed.stores.file",
    "pinfeed.stores.ranges": "pinfeed.stores.byte_ranges",
    "pinfeed.training.big.bigbatch": "pinfeed.training.large_batch.big_batch",
    "pinfeed.training.big.check": "pinfeed.training.large_batch.check",
    "pinfeed.training.big.choice": "pinfeed.training.large_batch.select",
    "pinfeed.training.big.offload": "pinfeed.training.offload.offload",
    "pinfeed.training.embedding": "pinfeed.training.embeddings.table",
    "pinfeed.training.manage.callbacks": "pinfeed.training.trainer.callbacks",
    "pinfeed.training.manage.history": "pinfeed.training.trainer.history",
    "pinfeed.training.manage.monitor": "pinfeed.training.trainer.memory_monitor",
    "pinfeed.training.manage.trainer": "pinfeed.training.trainer.trainer",
    "pinfeed.training.memory.budget": "pinfeed.training.memory_model.budget",
    "pinfeed.training.memory.config": "pinfeed.training.memory_model.config",
    "pinfeed.training.memory.estimate": "pinfeed.training.memory_model.estimate",
    "pinfeed.training.memory.report": "pinfeed.training.memory_model.report",
    "pinfeed.training.optimizer": "pinfeed.training.embeddings.optimizer",
    "pinfeed.training.rowloop": "pinfeed.training.row_loop.loop",
    "pinfeed.training.sharded.table": "pinfeed.training.distributed.table",
}
"""Old module -> new module."""

RENAMED = {
    "pinfeed.batches.SamplerBatches": "pinfeed.rows.sampler_batches.SamplerBatches",
    "pinfeed.config.Item": "pinfeed.memory.plan.Allocation",
    "pinfeed.stores.extent.Extent": "pinfeed.stores.formats.row_layout.RowLayout",
    "pinfeed.stores.ranges.Piece": "pinfeed.stores.byte_ranges.ByteRange",
    "pinfeed.training.big.choice.Chosen": "pinfeed.training.large_batch.select.StrategyChoice",
    "pinfeed.training.manage.history.Row": "pinfeed.training.trainer.record.Record",
}
"""Old name -> new name, for names that changed as well or that are not in the new module."""

ALIASES = {"pinfeed.checkpoint": "pinfeed.training.checkpoint"}
"""Public path -> the module that it imports, without a warning."""

_OLD_PACKAGES = {
    "pinfeed.seeing",
    "pinfeed.training.big",
    "pinfeed.training.manage",
    "pinfeed.training.memory",
    "pinfeed.training.sharded",
}


class MovedModules(MetaPathFinder, Loader):
    """Finder and loader of these paths; Python asks it last, so existing modules win."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in ALIASES:
            return spec_from_loader(fullname, self)
        if is_old(fullname):
            return spec_from_loader(fullname, self, is_package=fullname in _OLD_PACKAGES)
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in ALIASES:
            # Python takes the module from here after this call.
            sys.modules[module.__name__] = importlib.import_module(ALIASES[module.__name__])
            return

        def look_up(name: str) -> Any:
            return _look_up(module.__name__, name)

        vars(module)["__getattr__"] = look_up


def is_old(module: str) -> bool:
    """Return whether a dotted name is an old module, or the package of one."""
    return module in MOVED or module in _OLD_PACKAGES


def install() -> None:
    """Make the old paths importable. A second call changes nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())


def _look_up(old_module: str, name: str) -> Any:
    """Return an attribute of an old module or package.

    Raises:
        AttributeError: If neither the old module nor the new one has this name.
    """
    old = f"{old_module}.{name}"
    if is_old(old):
        return importlib.import_module(old)
    if name.startswith("__") or old_module not in MOVED:
        raise AttributeError(f"module {old_module!r} has no attribute {name!r}")
    package = sys.modules["pinfeed"]
    new = RENAMED.get(old, f"{MOVED[old_module]}.{name}")
    new_module, _, new_name = new.rpartition(".")
    # A public name is looked up by its public path, which stays valid if its module moves again.
    if new_name in package.__all__:
        new = f"pinfeed.{new_name}"
        found = getattr(package, new_name)
    else:
        found = getattr(importlib.import_module(new_module), new_name)
    # Two frames are between this call and the importing line: this one and ``look_up``.
    warnings.warn(
        f"{old} has moved to {new}; import it from there; pinfeed 0.2.0 removes the old path",
        DeprecationWarning,
        stacklevel=3,
    )
    return found
