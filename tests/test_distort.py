"""Shifts, turns, colours and blur of whole batches: each beside a slow twin that does one image, pixel by pixel."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dualprompt.data import distort
from dualprompt.data.augment import normalise, resample
from dualprompt.data.images import Canvas
from dualprompt.data.views import Draws, View
from helpers import noise_pictures, ragged, seeded

SIDE = 16
COUNT = 5


def pictures(seed: int = 0) -> Tensor:
    return torch.rand(COUNT, 3, SIDE, SIDE, generator=seeded(seed))


def close(one: Tensor, other: Tensor, atol: float = 2e-6) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def test_a_shift_is_padding_with_black_and_cutting_out() -> None:
    images = pictures()
    shifts = torch.tensor([[0, 0], [2, -1], [-2, 2], [1, 0], [0, -2]])
    found = distort.shift(images, shifts)
    for image, (down, right), moved in zip(images, shifts.tolist(), found, strict=True):
        for row in range(SIDE):
            for column in range(SIDE):
                y, x = row - down, column - right
                inside = 0 <= y < SIDE and 0 <= x < SIDE
                expected = image[:, y, x] if inside else torch.zeros(3)
                assert torch.equal(moved[:, row, column], expected), (row, column)


def test_shifts_reach_every_place_evenly() -> None:
    shifts = distort.random_shifts(20_000, 4, seeded(1))
    for axis in (0, 1):
        counts = torch.bincount(shifts[:, axis] + 4)
        assert len(counts) == 9
        assert (counts - 20_000 / 9).abs().max() < 250, counts
    assert abs(float(torch.corrcoef(shifts.T.float())[0, 1])) < 0.03


def test_a_turn_takes_the_nearest_pixel_and_black_beyond() -> None:
    images, angles = pictures(), torch.tensor([0.0, 7.3, -10.0, 33.1, 90.0])
    middle = (SIDE - 1) / 2
    for image, angle, turned in zip(images, angles.tolist(), distort.rotate(images, angles), strict=True):
        cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        for row in range(SIDE):
            for column in range(SIDE):
                right, up = column - middle, middle - row
                x, y = middle + cos * right + sin * up, middle - (cos * up - sin * right)
                if min(abs(value % 1 - 0.5) for value in (x, y)) < 1e-3:
                    continue  # between two pixels either may be taken
                x, y = round(x), round(y)
                inside = 0 <= y < SIDE and 0 <= x < SIDE
                assert torch.equal(turned[:, row, column], image[:, y, x] if inside else torch.zeros(3))


def test_a_turn_is_that_of_pillow() -> None:
    (picture,) = noise_pictures([(32, 32)])
    image = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255
    for angle in (-10.0, 4.2, 90.0):
        pillow = torch.from_numpy(np.asarray(Image.fromarray(picture).rotate(angle)).copy())
        ours = (distort.rotate(image, torch.tensor([angle]))[0] * 255).round().permute(1, 2, 0)
        assert (ours == pillow).all(dim=2).float().mean() > 0.97, angle  # but for pixels that lie between two


def jittered(image: Tensor, factors: list[float]) -> Tensor:
    """One image, pixel by pixel, from the definitions."""
    brightness, contrast, saturation, hue = factors

    def luma(pixel: Tensor) -> float:
        red, green, blue = pixel.tolist()
        return 0.299 * red + 0.587 * green + 0.114 * blue

    def clip(value: float) -> float:
        return min(1.0, max(0.0, value))

    pixels = image.double().permute(1, 2, 0).reshape(-1, 3)
    pixels = torch.tensor([[clip(value * brightness) for value in pixel] for pixel in pixels.tolist()])
    mean = sum(luma(pixel) for pixel in pixels) / len(pixels)
    pixels = torch.tensor([[clip(mean + contrast * (value - mean)) for value in pixel] for pixel in pixels.tolist()])
    greys = [luma(pixel) for pixel in pixels]
    pixels = [[clip(g + saturation * (v - g)) for v in p] for g, p in zip(greys, pixels.tolist(), strict=True)]
    turned = []
    for pixel in pixels:
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        turned.append(colorsys.hsv_to_rgb((h + hue) % 1, s, v))
    return torch.tensor(turned).float().T.reshape(3, SIDE, SIDE)


def test_colours_change_as_defined() -> None:
    images = pictures()
    images[3] = images[3].mean(dim=0, keepdim=True)  # grey: it has no hue
    images[4, :, :2] = 0.0
    factors = torch.tensor(
        [[1.0, 1.0, 1.0, 0.0], [1.3, 0.7, 1.2, 0.1], [0.6, 1.4, 0.0, -0.5], [0.8, 1.1, 1.4, 0.3], [1.4, 0.6, 0.9, -0.1]]
    )
    found = distort.jitter(images, factors)
    assert torch.equal(found[0], images[0])
    for image, factor, changed in zip(images, factors.tolist(), found, strict=True):
        close(changed, jittered(image, factor), atol=1e-5)


def test_factors_span_what_is_asked_for() -> None:
    ends = distort.jitter_of(torch.tensor([[0.0] * 4, [0.5] * 4, [1.0] * 4]), (0.4, 1.0, 0.2, 0.1))
    close(ends, torch.tensor([[0.6, 0.0, 0.8, -0.1], [1.0, 1.0, 1.0, 0.0], [1.4, 2.0, 1.2, 0.1]]))


def test_blur_is_a_gaussian_of_each_images_own_width() -> None:
    images, sigma = pictures(), torch.tensor([1e-3, 0.1, 0.7, 1.3, 2.0])
    found = distort.blur(images, sigma)
    close(found[0], images[0])
    for image, width, blurred in zip(images, sigma.tolist(), found, strict=True):
        row, column = 1, SIDE - 1  # at the edge
        total, expected = 0.0, torch.zeros(3)
        for y in range(SIDE):
            for x in range(SIDE):
                weight = math.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * width**2))
                total, expected = total + weight, expected + weight * image[:, y, x]
        close(blurred[:, row, column], expected / total, atol=1e-5)


def view(side: int, **options: object) -> View:
    return View(side, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bilinear", "resize", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [SIDE, 20])  # as they are, and resampled
def test_the_training_view_is_cut_shifted_turned_and_coloured_in_this_order(size: int) -> None:
    found = view(SIDE, augment="pad_crop", rotation=10.0, jitter=(0.2, 0.0, 0.0, 0.0))
    canvas = ragged(noise_pictures([(size, size)] * COUNT)).gather(torch.arange(COUNT))
    draws = found.draw(canvas.shapes, seeded(9))
    assert draws is not None
    assert draws.flips is not None
    assert draws.shifts is not None
    assert draws.angles is not None
    assert draws.jitter is not None
    assert draws.flips.any()
    assert not draws.flips.all()
    assert draws.shifts.abs().max() == SIDE // 8
    images = resample(canvas, draws.boxes, SIDE)
    images = torch.stack([i.flip(-1) if flip else i for i, flip in zip(images, draws.flips, strict=True)])
    images = distort.jitter(distort.rotate(distort.shift(images, draws.shifts), draws.angles), draws.jitter)
    expected = normalise(images, torch.tensor(found.mean), torch.tensor(found.std))
    close(found.training(canvas, draws), expected)
    part = slice(1, 3)  # a process that shows a part of the batch shows it the same
    fewer = Canvas(canvas.pixels[part], canvas.shapes[part])
    close(found.training(fewer, Draws(*(None if each is None else each[part] for each in draws))), expected[part])


def test_views_know_whether_they_are_fixed_and_store_no_more_than_they_need() -> None:
    assert view(32, augment="none").training_is_fixed
    for options in ({"augment": "pad_crop"}, {"rotation": 1.0}, {"jitter": (0.0, 0.0, 0.0, 0.1)}):
        changed = view(32, **{"augment": "none", **options})
        assert not changed.training_is_fixed
        assert changed.store == view(32, augment="none").store
