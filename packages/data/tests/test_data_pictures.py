"""A picture with transparency is seen as on a white page, where black lines stay lines."""

import io

import numpy as np
import pytest
from PIL import Image

from offbeat_data import Picture

SIZE_PX = 16
LINE = slice(4, 8)


def pixels_of(image: Image.Image, **options: object) -> np.ndarray:
    image.save(file := io.BytesIO(), format="PNG", **options)
    return Picture(data=file.getvalue(), height=image.height, width=image.width).pixels()


def drawing(mode: str, line_alpha: int) -> np.ndarray:
    """Pixels of a black line on a ground of black that nobody sees: colours, then alpha."""
    made = np.zeros((SIZE_PX, SIZE_PX, len(mode)), np.uint8)
    made[LINE, :, -1] = line_alpha
    return made


def with_palette() -> tuple[Image.Image, dict[str, object]]:
    image = Image.new("P", (SIZE_PX, SIZE_PX), 0)
    image.putpalette([0, 0, 0, 0, 0, 0])  # black twice: the ground, which is transparent, and the line
    image.paste(1, (0, LINE.start, SIZE_PX, LINE.stop))
    return image, {"transparency": 0}


def of_one_colour_left_out() -> tuple[Image.Image, dict[str, object]]:
    """A PNG without alpha in which one colour counts as transparent. Source: PNG, third edition, tRNS."""
    made = np.full((SIZE_PX, SIZE_PX, 3), 7, np.uint8)
    made[LINE] = 0
    return Image.fromarray(made), {"transparency": (7, 7, 7)}


DRAWN = {
    "RGBA": lambda: (Image.fromarray(drawing("RGBA", 255)), {}),
    "LA": lambda: (Image.fromarray(drawing("LA", 255), mode="LA"), {}),
    "P": with_palette,
    "RGB": of_one_colour_left_out,
}


@pytest.mark.parametrize("mode", DRAWN)
def test_black_lines_on_a_transparent_ground_are_seen_on_white(mode: str) -> None:
    image, options = DRAWN[mode]()
    assert image.mode == mode
    pixels = pixels_of(image, **options)
    wanted = np.full((SIZE_PX, SIZE_PX, 3), 255, np.uint8)
    wanted[LINE] = 0
    np.testing.assert_array_equal(pixels, wanted)


def test_what_is_half_transparent_is_half_white() -> None:
    pixels = pixels_of(Image.fromarray(drawing("RGBA", 51)))  # a fifth of black
    assert np.unique(pixels[LINE]).tolist() == [204]


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "CMYK"])
def test_what_is_opaque_is_as_it_was(mode: str) -> None:
    drawn = np.random.default_rng(0).integers(0, 256, (SIZE_PX, SIZE_PX, 3), np.uint8)
    image = Image.fromarray(drawn).convert(mode)
    image.save(file := io.BytesIO(), format="TIFF" if mode == "CMYK" else "PNG")
    pixels = Picture(data=file.getvalue(), height=SIZE_PX, width=SIZE_PX).pixels()
    np.testing.assert_array_equal(pixels, np.asarray(image.convert("RGB")))
