"""Images in JPEG files that compress like photographs, and augmented samples of them.

An image is decoded, randomly cropped, resized, randomly flipped and normalized. The random numbers
are a function of the seed and of the index, so that every loader must yield equal samples.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

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


SIZE = 224
"""Height and width of a sample in pixels."""
N_FEATURES = 16
SEED = 7
_SCALES = (0.08, 1.0)
_RATIOS = (3 / 4, 4 / 3)
_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) * 255
_N_READY = 1024


@dataclass(frozen=True)
class Box:
    """A crop of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    def least_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the smallest decoded image that has enough detail.

        JPEG can be decoded at a fraction of its size. A crop must keep SIZE pixels if it has them.
        """
        scale = min(1.0, SIZE / min(self.width, self.height))
        return math.ceil(width * scale), math.ceil(height * scale)


def crop_of(width: int, height: int, generator: torch.Generator) -> Box:
    """Draw a crop: a share of the area, an aspect ratio, and a position."""
    numbers = torch.rand(4, generator=generator).tolist()
    area = width * height * (_SCALES[0] + numbers[0] * (_SCALES[1] - _SCALES[0]))
    low, high = (math.log(ratio) for ratio in _RATIOS)
    ratio = math.exp(low + numbers[1] * (high - low))
    crop_width = min(width, round(math.sqrt(area * ratio)))
    crop_height = min(height, round(math.sqrt(area / ratio)))
    left = int(numbers[2] * (width - crop_width + 1))
    top = int(numbers[3] * (height - crop_height + 1))
    return Box(left, top, crop_width, crop_height)


def decode_pillow(path: str, generator: torch.Generator) -> torch.Tensor:
    """Decode and crop with Pillow."""
    from PIL import Image

    with Image.open(path) as image:
        width, height = image.size
        box = crop_of(width, height, generator)
        image.draft("RGB", box.least_size(width, height))
        x, y = image.width / width, image.height / height
        corners = (
            box.left * x,
            box.top * y,
            (box.left + box.width) * x,
            (box.top + box.height) * y,
        )
        small = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=corners)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def decode_simplejpeg(path: str, generator: torch.Generator) -> torch.Tensor:
    """Decode with simplejpeg and resize with torch, which both release the interpreter's lock."""
    import simplejpeg

    with open(path, "rb") as file:
        data = file.read()
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    box = crop_of(width, height, generator)
    least_width, least_height = box.least_size(width, height)
    pixels = simplejpeg.decode_jpeg(
        data, min_width=least_width, min_height=least_height, min_factor=2
    )
    x, y = pixels.shape[1] / width, pixels.shape[0] / height
    left, top = int(box.left * x), int(box.top * y)
    crop = pixels[top : top + round(box.height * y), left : left + round(box.width * x)]
    image = torch.from_numpy(crop).permute(2, 0, 1)
    return torch.nn.functional.interpolate(
        image[None], (SIZE, SIZE), mode="bilinear", antialias=True
    )[0]


def normalized(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a randomly flipped and normalized float32 copy of a uint8 image."""
    # Transposing bytes is faster than transposing floats.
    image = image.contiguous()
    if torch.rand((), generator=generator) < 0.5:
        image = image.flip(-1)
    return image.float().sub_(_MEAN).div_(_STD)


Decoder = Callable[[str, torch.Generator], torch.Tensor]
DECODERS: dict[str, Decoder] = {"simplejpeg": decode_simplejpeg, "Pillow": decode_pillow}


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Augmented images and their indices.

    Args:
        n_files: Number of files.
        decoder: Name of a decoder.
    """

    def __init__(self, n_files: int, decoder: str) -> None:
        self.paths = files_of(n_files)
        self._decode = DECODERS[decoder]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(SEED << 32 | int(index))
        image = self._decode(self.paths[index], generator)
        return normalized(image, generator), int(index)


class Ready(torch.utils.data.Dataset[torch.Tensor]):
    """Tensors that exist already, so that only the loader works.

    Args:
        n: Number of samples.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._rows = list(torch.arange(_N_READY * N_FEATURES).float().view(_N_READY, -1))

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % _N_READY]
