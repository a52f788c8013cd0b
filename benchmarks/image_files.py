"""A folder of JPEG files that compress like photographs, made once."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

N_COPIES = 16
"""Files that have the same content, because drawing a picture takes longer than copying it."""
WIDTH = 800
HEIGHT = 600
QUALITY = 90
_LEAST_BYTES = 100_000
# Photographs have amplitudes of about 1 / frequency. A smaller exponent has more detail.
_EXPONENT = 1.3
_CONTRAST = 55.0


def files_of(n_files: int) -> list[str]:
    """Return the paths of JPEG files in a cache folder, which is made if it is not complete.

    Args:
        n_files: Number of files.
    """
    folder = Path(tempfile.gettempdir()) / f"pinfeed-images-{n_files}"
    paths = [folder / f"{number:05d}.jpg" for number in range(n_files)]
    if not all(path.is_file() and path.stat().st_size > _LEAST_BYTES for path in paths):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        _create(paths)
    return [str(path) for path in paths]


def _create(paths: list[Path]) -> None:
    """Write distinct pictures, and copies of them far from each other."""
    from PIL import Image

    n_pictures = max(1, len(paths) // N_COPIES)
    for number, path in enumerate(paths):
        if number < n_pictures:
            Image.fromarray(picture(number)).save(path, quality=QUALITY)
        else:
            shutil.copyfile(paths[number % n_pictures], path)


def picture(seed: int) -> np.ndarray:
    """Return random clouds with the spectrum of photographs, shape (HEIGHT, WIDTH, 3), uint8."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(
        np.fft.fftfreq(HEIGHT)[:, None] * HEIGHT, np.fft.rfftfreq(WIDTH)[None] * WIDTH
    )
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(rng.standard_normal((3, HEIGHT, WIDTH))) / frequency**_EXPONENT
    spectrum[:, 0, 0] = 0.0
    layers = np.fft.irfft2(spectrum, (HEIGHT, WIDTH))
    layers /= layers.std(axis=(1, 2), keepdims=True)
    # The colours of photographs differ less than their brightness.
    colours = layers[0] + 0.3 * layers
    pixels = 128 + _CONTRAST * colours / colours.std()
    return np.clip(pixels, 0, 255).astype(np.uint8).transpose(1, 2, 0).copy()
