"""Images of equal and of different sizes in one flat tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualprompt.data.images import Images
from helpers import noise_pictures, ragged


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8),
    st.data(),
)
def test_gather_equals_a_loop(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    pictures = noise_pictures(shapes)
    images = ragged(pictures)
    indices = data.draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=12))
    canvas = images.gather(torch.tensor(indices))
    assert canvas.pixels.dtype == torch.uint8
    assert canvas.shapes.tolist() == [list(shapes[i]) for i in indices]
    height, width = max(shapes[i][0] for i in indices), max(shapes[i][1] for i in indices)
    assert canvas.pixels.shape == (len(indices), height, width, 3)
    for row, index in enumerate(indices):
        expected = np.zeros((height, width, 3), np.uint8)
        h, w = shapes[index]
        expected[:h, :w] = pictures[index]
        np.testing.assert_array_equal(canvas.pixels[row].numpy(), expected)
        np.testing.assert_array_equal(images.image(index), pictures[index])


def test_equal_sizes_are_read_from_an_array_in_any_layout() -> None:
    pixels = np.stack(noise_pictures([(5, 7)] * 6))
    for array in (pixels, np.asfortranarray(pixels), pixels[::-1][::-1]):
        images = Images.from_array(array)
        assert len(images) == 6
        canvas = images.gather(torch.tensor([4, 0, 4]))
        np.testing.assert_array_equal(canvas.pixels.numpy(), pixels[[4, 0, 4]])
        assert canvas.shapes.tolist() == [[5, 7]] * 3


def test_gathered_pixels_are_a_copy() -> None:
    images = Images.from_array(np.stack(noise_pictures([(2, 2)] * 2)))
    before = images.flat.clone()
    images.gather(torch.tensor([0, 1])).pixels.zero_()
    assert torch.equal(images.flat, before)


def test_wrong_tensors_are_refused() -> None:
    flat, shapes = torch.zeros(12, dtype=torch.uint8), torch.tensor([[2, 2]])
    Images(flat, shapes)
    with pytest.raises(ValueError, match="ask for 12 bytes, flat has 11"):
        Images(flat[:-1], shapes)
    with pytest.raises(ValueError, match="1-D uint8"):
        Images(flat.float(), shapes)
    with pytest.raises(ValueError, match="int64"):
        Images(flat, shapes.int())
    with pytest.raises(ValueError, match="int64"):
        Images(flat, shapes[0])
