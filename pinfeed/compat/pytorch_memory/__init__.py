"""The documented API of "Pytorch Utilities" (pytorch-memory): ``from pinfeed.compat.pytorch_memory import Config, Feeder, GiB``.

Names, arguments and their order are those of its code, so that its README's programs run:

    config = Config(cpu_memory_limit=GiB(2), gpu_memory_limit=GiB(1.5), total_sample_count=2048, input_shape=(3, 1024, 1024), …)
    feeder = Feeder(config, input_list, output_list, read_input, get_output, apply_on_input_batch, apply_on_output_batch)
    for epoch in feeder.generate_epochs(epoch_count=100):
        for x_batch, y_batch in epoch:
            …

What ``apply_on_…`` returns is what the loop gets, as it is, on the host or on a GPU; without it
numpy arrays, of ``input_dtype`` and ``output_dtype``. With ``device="cuda"`` these are copied to
the device instead, from page-locked memory.

What is different, because it gave wrong results or did not run:

- Every epoch is read anew: random variations vary, and memory does not grow from epoch to epoch.
  All batches were kept until the last epoch ended. So ``multiply_epochs`` takes what
  ``generate_epoch`` returned, or what can be iterated again; a plain generator cannot.
- Batches are read in a background thread, ``depth`` ahead; the functions that are given run there
  (in the loop's thread with ``depth=0``), ``apply_on_…`` with the CUDA device and stream that are
  current where the epoch begins. An error of theirs comes in the turn of its batch.
- Of ``Feeder``, an epoch is full batches only; of ``generate_epoch`` it is everything. There were
  empty batches, and after about 1,000 batches an error.
- Each identity has to give ``one_read_count`` samples, inputs and outputs alike, and ``apply_on_…``
  has to take all of a batch: an error names the identity. Labels went with other inputs.
- ``batch_size`` is the largest that fits both limits, up to ``preferred_batch_size``, as estimated
  for a whole training step (parameters once each and in their own dtype, gradients, the optimizer's
  state, what torch's allocator reserves) and the batches that are under way, as if all of these
  were on the GPU and on the host. If not even one identity fits, that is an error, also for
  ``cpu_memory_limit``.
- ``model_class`` may be a module, or a function that makes one. It may give several outputs, and
  take integers. ``input_shape`` is that of a sample, or of a batch of one: a leading 1 is the
  batch's, if the network takes it so. A dtype may be a name, numpy's or torch's. The first READMEs
  call it ``network``, and count with ``InspectNetwork``; both work.
- ``total_sample_count`` (identities) decides what Config counts; what is read is what the lists
  have.
- A Config does not change: make another one.
"""

from __future__ import annotations

from pinfeed.compat.pytorch_memory.config import Config, GiB, KiB, MiB, round_to
from pinfeed.compat.pytorch_memory.epochs import Epoch, Feeder, generate_epoch, multiply_epochs
from pinfeed.compat.pytorch_memory.model_summary import (
    InspectNetwork,
    get_parameter_count,
    get_variable_count,
    summary_of_network,
)
from pinfeed.errors import NotEnoughGPUMemory as NotEnoughGPURam

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
