"""Optional packages, and the command that installs them."""

from __future__ import annotations

REQUIREMENTS = {
    "cuda12": "cupy-cuda12x>=14",
    "cuda13": "cupy-cuda13x>=14",
    "hdf5": "h5py>=3.10",
    "parquet": "pyarrow>=15",
    "plot": "matplotlib>=3.9",
    "remote": "fsspec>=2024.2",
    "safetensors": "safetensors>=0.4",
    "zarr": "zarr>=3.1",
}
"""The package of each extra in pyproject.toml, with its oldest version."""


def install_line(*extras: str) -> str:
    """Return the command that installs the packages of extras.

    It names the packages, not ``pinfeed[extra]``, because pip would look for pinfeed in an index.
    """
    return "pip install " + " ".join(f'"{REQUIREMENTS[extra]}"' for extra in extras)
