"""A folder of JPEG files: threads decode and augment them, and a small CNN trains on the batches.

The crop and the flip of an image depend on (seed, epoch, index of the image) alone. So the run that
stops in the middle of an epoch, and resumes from its checkpoint with another number of threads, has
the losses of the run that never stopped. ``python examples/images.py FOLDER`` trains on your own
folder, with a subfolder of JPEG files for each class.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

import pinfeed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 32
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

Labelled = tuple[Path, int]


def make_images(folder: Path, n_images: int) -> None:
    """Write JPEG files of two classes: horizontal and vertical stripes, with noise."""
    rng = np.random.default_rng(0)
    for i in range(n_images):
        width, height = (int(n) for n in rng.integers(48, 96, 2))
        stripes = (np.indices((height, width))[i % 2] // 6 % 2)[..., None]
        pixels = 80 + 90 * stripes + rng.integers(0, 60, (height, width, 3))
        of_class = folder / ("horizontal", "vertical")[i % 2]
        of_class.mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(of_class / f"{i}.jpg")


def labelled_files(folder: Path) -> list[Labelled]:
    """Return the JPEG files of a folder of folders, each with the number of its class."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    found: list[Labelled] = []
    for label, of_class in enumerate(classes):
        found += [(file, label) for file in sorted(of_class.glob("*.jpg"))]
    return found


def random_box(
    width: int, height: int, generator: torch.Generator
) -> tuple[float, float, float, float]:
    """Return a random box of 25% to 100% of an image's area, and of a ratio of 3:4 to 4:3."""
    area, ratio, x, y = torch.rand(4, generator=generator).tolist()
    area = width * height * (0.25 + 0.75 * area)
    ratio = (3 / 4) ** (1 - 2 * ratio)
    w = min(width, (area * ratio) ** 0.5)
    h = min(height, (area / ratio) ** 0.5)
    left, top = x * (width - w), y * (height - h)
    return left, top, left + w, top + h


def load(sample: Labelled, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Return a random part of an image, half of the time flipped, and its label."""
    path, label = sample
    with Image.open(path) as file:
        # This decodes at a lower resolution, if the image is much larger than SIZE.
        file.draft("RGB", (2 * SIZE, 2 * SIZE))
        # Photos are often stored sideways, and their EXIF data say so.
        image = ImageOps.exif_transpose(file).convert("RGB")
    box = random_box(*image.size, generator)
    part = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    x = torch.from_numpy(np.array(part)).permute(2, 0, 1).float() / 255
    if torch.rand((), generator=generator) < 0.5:
        x = x.flip(-1)
    return (x - MEAN) / STD, label


class Run:
    """A model, its optimizer and its images; the losses so far are part of its checkpoints."""

    def __init__(self, files: list[Labelled], batch_size: int, threads: int | None = None) -> None:
        torch.manual_seed(0)
        n_classes = 1 + max(label for _, label in files)
        layers = [nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2)]
        head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, n_classes)]
        model = nn.Sequential(*layers, *head).to(DEVICE)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.feeder = pinfeed.wrap_dataset(
            files, load, batch_size=batch_size, threads=threads, shuffle=True, seed=1, device=DEVICE
        )
        self.model = model
        self.losses: list[float] = []

    def train(self, n_epochs: int, checkpoint: Path, stop_after: int | None = None) -> None:
        """Train to the end of an epoch; or save a checkpoint after some steps, and stop."""
        for _ in range(self.feeder.epoch, n_epochs):
            for x, y in self.feeder:
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                if len(self.losses) == stop_after:
                    # A save in the training step counts this batch as done.
                    pinfeed.checkpoint.save(checkpoint, **self.parts(), losses=self.losses)
                    return

    def resume(self, checkpoint: Path) -> None:
        """Continue with the batch after the one of the checkpoint."""
        self.losses = pinfeed.checkpoint.resume(checkpoint, **self.parts())["losses"]

    def parts(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "feeder": self.feeder}


def main(images: str | None = None, n_images: int = 1000, n_epochs: int = 3) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(images or name)
        if images is None:
            make_images(folder, n_images)
        files = labelled_files(folder)
        batch_size = 32
        checkpoint = Path(name) / "run"

        whole = Run(files, batch_size)
        start = time.perf_counter()
        whole.train(n_epochs, checkpoint)
        seconds = time.perf_counter() - start
        print(whole.feeder.stats)

        stopped = Run(files, batch_size)
        n_batches = len(stopped.feeder)
        stopped.train(n_epochs, checkpoint, stop_after=n_batches + n_batches // 2)
        resumed = Run(files, batch_size, threads=3)
        resumed.resume(checkpoint)
        resumed.train(n_epochs, checkpoint)
        if DEVICE.type == "cpu":
            # Sums on a GPU may differ in their last bits from run to run.
            assert resumed.losses == whole.losses
        for run in (whole, stopped, resumed):
            run.feeder.close()
    n_left = len(whole.losses) - len(stopped.losses)
    print(
        f"{n_epochs * len(files) / seconds:.0f} images/s with the training step; losses "
        f"{whole.losses[0]:.2f} to {whole.losses[-1]:.2f}; the last {n_left} again after a resume"
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
