"""Samples that all contestants load: decoded and augmented images, and ready tensors.

An image is decoded, randomly cropped, resized, randomly flipped and normalized. The random numbers
are a function of the seed and of the index, so that every contestant must yield equal samples.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.image_files import files_of

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


def decode_torchvision(path: str, generator: torch.Generator) -> torch.Tensor:
    """Decode and crop with torchvision, at full size."""
    from torchvision.io import decode_jpeg, read_file
    from torchvision.transforms.v2.functional import resized_crop

    image = decode_jpeg(read_file(path))
    height, width = image.shape[-2:]
    box = crop_of(width, height, generator)
    return resized_crop(image, box.top, box.left, box.height, box.width, [SIZE, SIZE])


def normalized(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a randomly flipped and normalized float32 copy of a uint8 image."""
    # Transposing bytes is faster than transposing floats.
    image = image.contiguous()
    if torch.rand((), generator=generator) < 0.5:
        image = image.flip(-1)
    return image.float().sub_(_MEAN).div_(_STD)


Decoder = Callable[[str, torch.Generator], torch.Tensor]
DECODERS: dict[str, Decoder] = {
    "simplejpeg": decode_simplejpeg,
    "Pillow": decode_pillow,
    "torchvision": decode_torchvision,
}


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


def can_decode(decoder: str) -> bool:
    """Return whether the library of a decoder can be imported."""
    module = {"Pillow": "PIL"}.get(decoder, decoder)
    if importlib.util.find_spec(module) is None:
        return False
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError):
        # The library was built for another torch.
        return False
    return True


def first_values(batch: Any) -> torch.Tensor:
    """Return a number of each sample of a batch, which shows the order of the samples."""
    return batch[1] if isinstance(batch, (list, tuple)) else batch[:, 0]
