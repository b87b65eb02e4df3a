"""Views of images: boxes that lie inside, resampling that equals Pillow's and PyTorch's and sees nothing outside."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from dualprompt.data.augment import (
    centre_boxes,
    normalise,
    random_boxes,
    random_flips,
    resample,
    whole_boxes,
)
from dualprompt.data.images import Canvas
from dualprompt.data.views import Draws, View
from helpers import noise_pictures, ragged, seeded

MODES = ["bilinear", "bicubic"]
SHAPES = [(9, 14), (30, 30), (5, 40), (17, 6), (1, 1), (64, 33)]


def canvas_of(pictures: list[np.ndarray]) -> Canvas:
    return ragged(pictures).gather(torch.arange(len(pictures)))


def alone(picture: np.ndarray) -> Tensor:
    return torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255


def resized(image: Tensor, side: int, mode: str) -> Tensor:
    return F.interpolate(image, size=(side, side), mode=mode, align_corners=False, antialias=True).clamp(0, 1)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", [8, 16, 32])
def test_whole_images_are_resized_as_pytorch_and_pillow_do(mode: str, side: int) -> None:
    pictures = [64 + picture // 2 for picture in noise_pictures(SHAPES)]  # Pillow clips what shoots over, midway
    canvas = canvas_of(pictures)
    views = resample(canvas, whole_boxes(canvas.shapes), side, interpolation=mode)
    assert views.shape == (len(pictures), 3, side, side)
    for view, picture in zip(views, pictures, strict=True):
        close(view[None], resized(alone(picture), side, mode))
        pillow = Image.fromarray(picture).resize((side, side), Image.Resampling[mode.upper()])
        # Pillow rounds to whole grey levels after each axis.
        np.testing.assert_allclose(view.permute(1, 2, 0).numpy() * 255, np.asarray(pillow), atol=1.6)


def test_enlarging_is_plain_bilinear_interpolation() -> None:
    canvas = canvas_of(noise_pictures([(9, 14)] * 3))
    image = canvas.pixels.permute(0, 3, 1, 2).float() / 255
    plain = F.interpolate(image, size=(32, 32), mode="bilinear", align_corners=False)
    close(resample(canvas, whole_boxes(canvas.shapes), 32), plain)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 9)] * 2, *[st.integers(1, 12)] * 2), min_size=1, max_size=4),
    st.integers(1, 20),
    st.sampled_from(MODES),
)
def test_a_box_is_cut_out_before_it_is_resized(boxes: list[tuple[int, ...]], side: int, mode: str) -> None:
    pictures = noise_pictures([(top + height + 3, left + width + 2) for top, left, height, width in boxes])
    views = resample(canvas_of(pictures), torch.tensor(boxes).float(), side, interpolation=mode)
    for view, picture, (top, left, height, width) in zip(views, pictures, boxes, strict=True):
        close(view[None], resized(alone(picture[top : top + height, left : left + width]), side, mode))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 24), st.sampled_from(MODES))
def test_nothing_outside_the_box_is_seen(data: st.DataObject, side: int, mode: str) -> None:
    """Fractional boxes own the pixels that they touch; all others are poisoned and must not show."""
    height, width = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    h, w = data.draw(st.floats(0.3, height)), data.draw(st.floats(0.3, width))
    top, left = data.draw(st.floats(0, height - h)), data.draw(st.floats(0, width - w))
    box = torch.tensor([[top, left, h, w]])
    rows = slice(int(box[0, 0].floor()), int((box[0, 0] + box[0, 2]).ceil()))
    columns = slice(int(box[0, 1].floor()), int((box[0, 1] + box[0, 3]).ceil()))
    (picture,) = noise_pictures([(height, width)])
    views = []
    for poison in (0, 255):
        poisoned = np.full_like(picture, poison)
        poisoned[rows, columns] = picture[rows, columns]
        canvas = canvas_of([poisoned])
        padded = torch.full((1, height + 4, width + 3, 3), poison, dtype=torch.uint8)
        padded[:, :height, :width] = canvas.pixels
        views += [resample(Canvas(p, canvas.shapes), box, side, interpolation=mode) for p in (canvas.pixels, padded)]
    for view in views[1:]:
        close(view, views[0])
    assert torch.isfinite(views[0]).all()


def test_a_box_that_rounding_pushes_over_the_edge_does_not_see_the_padding() -> None:
    picture = np.full((10, 10, 3), 200, np.uint8)
    canvas = Canvas(F.pad(torch.from_numpy(picture)[None], (0, 0, 0, 5, 0, 5)), torch.tensor([[10, 10]]))
    box = torch.tensor([[4.0, 4.0, 6.00001, 6.00001]])
    close(resample(canvas, box, 32), torch.full((1, 3, 32, 32), 200 / 255))


@pytest.mark.parametrize("mode", MODES)
def test_fractional_boxes_sample_where_they_say(mode: str) -> None:
    """On a straight slope, interpolation gives back the position itself, away from the box's ends."""
    slope = np.repeat(np.arange(40, dtype=np.uint8)[:, None, None] * 6, 40, axis=1).repeat(3, axis=2)
    canvas, box = canvas_of([slope]), torch.tensor([[3.3, 0.0, 29.4, 40.0]])
    view = resample(canvas, box, 60, interpolation=mode)[0, 0, :, 0] * 255 / 6
    expected = 3.3 + 29.4 * (torch.arange(60) + 0.5) / 60 - 0.5  # pixel i has its centre at i + ½
    torch.testing.assert_close(view[5:-5], expected[5:-5], rtol=0, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_flips_mirror_exactly(mode: str) -> None:
    canvas = canvas_of(noise_pictures(SHAPES))
    boxes = random_boxes(canvas.shapes, seeded(0))
    flips = torch.tensor([True, False, True, True, False, False])
    straight = resample(canvas, boxes, 12, interpolation=mode)
    mixed = resample(canvas, boxes, 12, flips, interpolation=mode)
    for i, flipped in enumerate(flips):
        close(mixed[i], straight[i].flip(-1) if flipped else straight[i])
    whole = canvas_of(noise_pictures([(12, 12)]))
    exact = resample(whole, whole_boxes(whole.shapes), 12, torch.tensor([True]))
    assert torch.equal(exact[0], alone(whole.pixels[0].numpy())[0].flip(-1))


def test_images_of_the_right_size_pass_untouched() -> None:
    canvas = canvas_of(noise_pictures([(12, 12)] * 2))
    untouched = canvas.pixels.permute(0, 3, 1, 2).float() / 255
    assert torch.equal(resample(canvas, whole_boxes(canvas.shapes), 12), untouched)
    assert torch.equal(resample(canvas, whole_boxes(canvas.shapes), 12, torch.zeros(2).bool()), untouched)
    larger = canvas_of(noise_pictures([(15, 13)] * 2))
    corner = torch.tensor([[0.0, 0.0, 12.0, 12.0]] * 2)
    assert torch.equal(resample(larger, corner, 12), larger.pixels[:, :12, :12].permute(0, 3, 1, 2).float() / 255)


def test_a_ragged_batch_equals_its_images_one_by_one() -> None:
    pictures = noise_pictures(SHAPES)
    canvas = canvas_of(pictures)
    boxes, flips = random_boxes(canvas.shapes, seeded(1)), random_flips(len(pictures), seeded(2))
    together = resample(canvas, boxes, 16, flips)
    for i, picture in enumerate(pictures):
        close(resample(canvas_of([picture]), boxes[i : i + 1], 16, flips[i : i + 1])[0], together[i])


def test_centre_boxes_are_squares_of_whole_pixels_at_the_centre() -> None:
    shapes = torch.tensor([[256, 256], [256, 341], [512, 256], [32, 32], [30, 41], [1, 9]])
    assert centre_boxes(shapes).tolist() == [
        [16, 16, 224, 224],
        [16, 58, 224, 224],
        [144, 16, 224, 224],
        [2, 2, 28, 28],
        [2, 7, 26, 26],
        [0, 4, 1, 1],
    ]


def test_the_centre_of_a_stored_image_is_cut_without_resampling() -> None:
    for side in (224, 128, 384, 64):
        view = View(side, (0.0,) * 3, (1.0,) * 3, "bilinear", "centre_crop", "none")
        width, height = view.store.size(3000, 2001)
        assert height == view.store.side
        canvas = canvas_of(noise_pictures([(height, width)]))
        seen = view.fixed(canvas)
        top, left = (height - side) // 2, (width - side) // 2
        cut = canvas.pixels[:, top : top + side, left : left + side].permute(0, 3, 1, 2).float() / 255
        close(seen, cut)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 2**40))
def test_random_boxes_lie_inside_and_have_the_asked_shape(height: int, width: int, seed: int) -> None:
    shapes = torch.tensor([[height, width]]).expand(50, 2)
    top, left, h, w = random_boxes(shapes, seeded(seed)).double().unbind(dim=1)
    slack = 1e-5
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert ((top + h) <= height * (1 + slack)).all()
    assert ((left + w) <= width * (1 + slack)).all()
    assert (h > 0).all()
    assert (w > 0).all()
    ratio = w / h
    assert (ratio >= 3 / 4 - slack).all()
    assert (ratio <= 4 / 3 + slack).all()
    share = h * w / (height * width)
    assert (share <= 1 + slack).all()
    longest = max(height, width) / min(height, width)
    if longest < 4 / 3 / 0.05:  # a strip so thin that no box of 5 % fits gets the fallback, which may be smaller
        assert (share >= 0.05 - slack).all()


def test_random_boxes_spread_evenly_over_area_aspect_and_place() -> None:
    shapes = torch.tensor([[200, 200]]).expand(20000, 2)
    top, left, h, w = random_boxes(shapes, seeded(3), area=(0.1, 0.4)).unbind(dim=1)

    def even(values: Tensor) -> None:
        counts = torch.histc(values, bins=10, min=0, max=1)
        assert counts.sum() == len(values)
        assert (counts - 2000).abs().max() < 250, counts

    even((h * w / 40000 - 0.1) / 0.3)  # boxes of these areas always fit, so no draw is repeated
    even((w / h).log() / (2 * math.log(4 / 3)) + 0.5)
    even(top / (200 - h))
    even(left / (200 - w))
    _, _, h, w = random_boxes(shapes, seeded(3), area=(0.1, 0.4), aspect=(1.5, 2.0)).unbind(dim=1)
    assert (w / h).min() >= 1.5 - 1e-5, "the aspect ratio is width to height"
    assert (w / h).max() <= 2 + 1e-5


@pytest.mark.parametrize(
    ("shape", "box"), [((10, 1000), (0, 493 + 1 / 3, 10, 13 + 1 / 3)), ((800, 30), (380.0, 0.0, 40.0, 30.0))]
)
def test_a_strip_in_which_no_draw_fits_gives_its_middle(shape: tuple[int, int], box: tuple[float, ...]) -> None:
    boxes = random_boxes(torch.tensor([shape]).expand(5, 2), seeded(0), area=(0.9, 1.0))
    torch.testing.assert_close(boxes, torch.tensor([box]).expand(5, 4), rtol=0, atol=1e-3)


def test_draws_repeat_with_the_generator_and_do_not_depend_on_neighbours() -> None:
    shapes = torch.tensor(SHAPES)
    boxes = random_boxes(shapes, seeded(5))
    assert torch.equal(boxes, random_boxes(shapes, seeded(5)))
    assert not torch.equal(boxes, random_boxes(shapes, seeded(6)))
    changed = shapes.clone()
    changed[0] = torch.tensor([2, 900])  # one for which most draws do not fit
    assert torch.equal(random_boxes(changed, seeded(5))[1:], boxes[1:])


def test_flips_come_half_of_the_time() -> None:
    flips = random_flips(10000, seeded(4))
    assert 4800 < flips.sum() < 5200
    assert torch.equal(flips, random_flips(10000, seeded(4)))


def test_normalise() -> None:
    images = torch.rand(2, 3, 4, 5, generator=seeded(0))
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.25, 2.0])
    result = normalise(images, mean, std)
    for channel in range(3):
        torch.testing.assert_close(result[:, channel], (images[:, channel] - mean[channel]) / std[channel])


def test_views_store_images_as_small_as_they_may_be() -> None:
    def store(test: str, augment: str, side: int = 224) -> tuple[int, bool]:
        view = View(side, (0.5,) * 3, (0.5,) * 3, "bicubic", test, augment)  # type: ignore[arg-type]
        assert view.store.interpolation == "bicubic"
        assert view.training_is_fixed == (augment == "none")
        return view.store.side, view.store.keep_aspect

    assert store("resize", "none") == (224, False)
    assert store("resize", "random_resized_crop") == (256, True)
    assert store("centre_crop", "none") == (256, True)
    assert store("centre_crop", "random_resized_crop") == (256, True)
    assert store("centre_crop", "none", side=128) == (146, True)


def test_a_training_view_is_the_drawn_box_flipped_and_normalised() -> None:
    view = View(8, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bilinear", "resize", "random_resized_crop")
    canvas = canvas_of(noise_pictures(SHAPES))
    draws = view.draw(canvas.shapes, seeded(9))
    assert draws is not None
    boxes, flips = draws.boxes, draws.flips
    assert boxes is not None
    assert flips is not None
    assert draws[2:] == (None, None, None)
    expected = normalise(resample(canvas, boxes, 8, flips), torch.tensor(view.mean), torch.tensor(view.std))
    assert torch.equal(view.training(canvas, draws), expected)
    # A process that shows a part of the batch shows it the same.
    part = slice(2, 5)
    fewer = Canvas(canvas.pixels[part], canvas.shapes[part])
    close(view.training(fewer, Draws(boxes[part], flips[part])), expected[part])


def test_an_unaugmented_training_view_is_the_fixed_one() -> None:
    view = View(8, (0.5,) * 3, (0.2,) * 3, "bilinear", "resize", "none")
    canvas = canvas_of(noise_pictures(SHAPES))
    assert view.draw(canvas.shapes, seeded(0)) is None
    assert torch.equal(view.training(canvas, None), view.fixed(canvas))
    for i, picture in enumerate(noise_pictures(SHAPES)):
        close(view.fixed(canvas)[i] * 0.2 + 0.5, resized(alone(picture), 8, "bilinear")[0])
