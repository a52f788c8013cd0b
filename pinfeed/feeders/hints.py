"""Advice about arguments that a function does not have but other libraries use.

The decorator ``explain_arguments`` says what the keys of these tables are.
"""

from __future__ import annotations

# Arguments of torch.utils.data.DataLoader.
_BATCHES = "batch_size shuffle sampler batch_sampler collate_fn drop_last generator in_order"
_WORKERS = "num_workers timeout worker_init_fn multiprocessing_context persistent_workers"
_MEMORY = "pin_memory pin_memory_device"

_LIMITS = "gpu_memory_limit cpu_memory_limit preferred_batch_size headroom"
_LIMITS_TOGETHER = "limits are given together; give config=pinfeed.Config({name}=...)"

FEEDER_HINTS = {
    f"{_WORKERS} workers n_workers n_readers": "pinfeed chooses the number of reader threads; "
    "leave it out",
    _MEMORY: "pinfeed uses page-locked (pinned) memory if that is faster; leave it out",
    "sampler batch_sampler order": "give it as rows=",
    "prefetch_factor prefetch buffer_size": "give the number of batches to prefetch as depth=",
    _LIMITS: _LIMITS_TOGETHER,
    "generator": "give shuffle=True and seed=generator.initial_seed(), for another shuffled order",
    "in_order": "batches are always in order; leave it out",
    "storage_options": "give a store as the source: pinfeed.RemoteStore(url, storage_options=...)",
    "collate_fn transform": "give device_transform=, or host_transform= for work on the CPU; each "
    "takes a batch and returns one",
}
"""Advice for ``Feeder``."""

READER_HINTS = {
    **FEEDER_HINTS,
    f"{_WORKERS} workers n_workers": "give the number of reader threads as n_readers=",
    "sampler batch_sampler rows order": "give inputs and outputs in the order that you want, or "
    "shuffle=True",
    "dataset data source path x": "give the inputs and the outputs as the first two arguments, "
    "without names",
    "collate_fn transform host_transform device_transform": "give apply_on_input_batch= and "
    "apply_on_output_batch=",
}
"""Advice for ``wrap_readers``."""

LOADER_HINTS = {
    f"{_BATCHES} {_WORKERS}": "give it to the DataLoader: DataLoader(dataset, {name}=...)",
    _MEMORY: "tensors are copied to a GPU through page-locked (pinned) memory anyway; leave it out",
    _LIMITS: _LIMITS_TOGETHER,
    "prefetch_factor": "give it to the DataLoader, for its worker processes; give the number of "
    "batches that are prefetched to the device as depth=",
    "rows": "the DataLoader decides the order; give it sampler= or batch_sampler=",
    "ranks": "the DataLoader decides the order; give it sampler=DistributedSampler(dataset)",
    "transform": "give device_transform= for batches on the device, or host_transform= for batches "
    "on the host; transforms of single samples belong to the dataset",
}
"""Advice for ``wrap_loader``."""

TABLE_LOOP_HINTS = {
    **LOADER_HINTS,
    "device_cache": "give it to the table: HostEmbedding(..., device_cache=...)",
    "on_error": "a loop over tables ends with its first error; skip bad samples in the dataset",
    "fetch": 'wrap the loader first: train_rows(wrap_loader(loader, fetch=..., device="cpu"), ...)',
    "gradients sparse": 'give it to the optimizer: RowOptimizer(..., gradients="sparse")',
}
"""Advice for ``train_rows``."""

READ_LOOP_HINTS = {
    **TABLE_LOOP_HINTS,
    "fetch": 'wrap the loader first: read_rows(wrap_loader(loader, fetch=..., device="cpu"), ...)',
    "optimizer": "read_rows changes no rows; give the optimizer to train_rows",
}
"""Advice for ``read_rows``."""

SAMPLE_HINTS = {
    **FEEDER_HINTS,
    f"{_WORKERS} workers n_workers n_readers num_threads": "samples are made in threads of this "
    "process; give their number as threads=",
    "sampler batch_sampler": "give an order of pinfeed.rows as rows=, or use "
    "pinfeed.wrap_loader(DataLoader(dataset, {name}=...), threads=...)",
    "host_transform": "give transform= for single samples, or collate_fn= for a list of them",
}
"""Advice for ``wrap_dataset``."""

DATASET_HINTS = {
    f"{_BATCHES} {_WORKERS} {_MEMORY} prefetch_factor": "a RowDataset has rows, not batches; use "
    "DataLoader(RowDataset(source), {name}=...) or Feeder(source, ...)",
}
"""Advice for ``RowDataset``."""
