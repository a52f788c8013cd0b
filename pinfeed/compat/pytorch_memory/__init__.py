"""Drop-in replacement for "Pytorch Utilities" (pytorch-memory).

Names, arguments and their order are those of the original, so that its README's programs run:

    from pinfeed.compat.pytorch_memory import Config, Feeder, GiB

    config = Config(
        cpu_memory_limit=GiB(2), gpu_memory_limit=GiB(1.5), total_sample_count=2048,
        input_shape=(3, 1024, 1024), …
    )
    feeder = Feeder(
        config, input_list, output_list, read_input, get_output,
        apply_on_input_batch, apply_on_output_batch,
    )
    for epoch in feeder.generate_epochs(epoch_count=100):
        for x_batch, y_batch in epoch:
            …

The loop gets the values that ``apply_on_…`` returns, unchanged, on the host or on a GPU. Without
these functions it gets numpy arrays of ``input_dtype`` and ``output_dtype``. With
``device="cuda"`` these are copied to the device instead, from page-locked memory.

The following behaviour differs, because the original gave wrong results or did not run:

- Every epoch is read anew. Random augmentation differs from epoch to epoch, and memory does not
  grow. The original kept all batches until the last epoch ended. ``multiply_epochs`` therefore
  accepts an epoch from ``generate_epoch``, or an iterable that can be iterated again, but no plain
  generator.
- A background thread reads ``depth`` batches ahead. It runs the user's functions; with ``depth=0``
  they run in the loop's thread. ``apply_on_…`` runs with the CUDA device and stream that are
  current when the epoch begins. If a function fails, its error is raised when the loop reaches the
  batch.
- An epoch of ``Feeder`` has full batches only; an epoch of ``generate_epoch`` has all samples. The
  original returned empty batches, and an error after about 1,000 batches.
- For each identity, both functions must return ``one_read_count`` samples, and ``apply_on_…`` must
  use all samples of a batch. Otherwise an error names the identity. The original combined labels
  with wrong inputs.
- ``batch_size`` is the largest that fits in both limits, up to ``preferred_batch_size``. The
  estimate covers a whole training step: parameters once each and in their own dtype, gradients,
  the optimizer's state, and the memory that torch's allocator reserves. It also covers the
  prefetched batches, as if all of them were on the GPU and on the host. If not even one identity
  fits in one of the limits, an error is raised.
- ``model_class`` may be a module, or a function that makes one. The model may return several
  outputs, and accept integers. ``input_shape`` is the shape of a sample or of a batch of one: a
  leading 1 is the batch dimension if the network accepts that. A dtype may be a name, a numpy dtype
  or a torch dtype. The first READMEs call this argument ``network``, and count with
  ``InspectNetwork``; both work.
- ``total_sample_count`` (identities) determines what Config counts. The lists determine what is
  read.
- A Config cannot be changed: make a new one.
- ``MiB`` and ``GiB`` round fractions down to whole bytes, not to the next smaller unit.
"""

from __future__ import annotations

from pinfeed.compat.pytorch_memory.config import Config, round_to
from pinfeed.compat.pytorch_memory.epochs import Epoch, Feeder, generate_epoch, multiply_epochs
from pinfeed.compat.pytorch_memory.network_trace import (
    InspectNetwork,
    get_parameter_count,
    get_variable_count,
    summary_of_network,
)
from pinfeed.errors import NotEnoughGPUMemory as NotEnoughGPURam
from pinfeed.memory.units import GiB, KiB, MiB

__all__ = [
    "Config",
    "Epoch",
    "Feeder",
    "GiB",
    "InspectNetwork",
    "KiB",
    "MiB",
    "NotEnoughGPURam",
    "generate_epoch",
    "get_parameter_count",
    "get_variable_count",
    "multiply_epochs",
    "round_to",
    "summary_of_network",
]


def __dir__() -> list[str]:
    """Return the public names without the modules of this package."""
    return __all__
