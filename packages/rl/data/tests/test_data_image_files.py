"""Which image files are opened, and how large they may be: of rows and of what an environment answers alike."""

import base64
import io
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from offbeat_core import DataError
from offbeat_data import DataConfig, Picture, load_image_rules, load_prompts, load_tokenizer
from offbeat_data._images import image_part, read_image_part

LARGE = 40_000_000


@pytest.fixture(scope="session")
def rules(vision_folder):
    return load_image_rules(vision_folder)


def saved(form, size=(32, 24)):
    Image.new("RGB", size, (200, 100, 50)).save(file := io.BytesIO(), format=form)
    return file.getvalue()


def read(data, rules, max_pixels=LARGE):
    """As an environment, an MCP server or an OpenEnv server answers with it."""
    return read_image_part(image_part("image/png", base64.b64encode(data).decode()), rules, max_pixels)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_formats_of_photographs_and_drawings_are_read(rules, form):
    pixels = read(saved(form), rules).pixels()
    assert pixels.shape == (24, 32, 3)
    assert abs(pixels.astype(int) - (200, 100, 50)).max() <= 8


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_is_refused_and_starts_no_program(rules, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {ran}\necho 10.0\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DataError, match="no image that Pillow reads as PNG, JPEG, WEBP, GIF, BMP"):
        read(EPS, rules)
    with pytest.raises(DataError, match="no image that Pillow reads as PNG, JPEG, WEBP, GIF, BMP"):
        Picture(data=EPS, height=64, width=64).pixels()
    assert not ran.exists()


@pytest.mark.parametrize("form", ["TIFF", "PPM", "TGA", "ICNS", "PCX", "SGI"])
def test_readers_that_nothing_here_needs_are_not_reached(rules, form):
    with pytest.raises(DataError, match="write PNG or JPEG"):
        read(saved(form, (64, 64)), rules)


def bomb(side):
    """A PNG of one bit a pixel, all black: some 20 KiB for 177 million pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), bytes(1 + (side + 7) // 8)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [6_400, 13_300, 30_000])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(rules, side, monkeypatch):
    data = bomb(side)
    assert len(data) < 2**18
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("its pixels were decoded"))
    with pytest.raises(DataError, match=r"data\.max_image_pixels|decompression bomb"):
        read(data, rules)


def test_the_limit_is_that_of_section_data(vision_folder, rules, tmp_path, write_jsonl):
    (tmp_path / "figure.png").write_bytes(saved("PNG"))
    path = write_jsonl([{"prompt": "What is it?", "answer": "1", "images": "figure.png"}])
    tokenizer = load_tokenizer(vision_folder)
    assert load_prompts(DataConfig(path=path, max_image_pixels=32 * 24), tokenizer).train[0].pictures
    with pytest.raises(DataError, match=r"an image of 32 x 24 pixels: at most 767 are decoded"):
        load_prompts(DataConfig(path=path, max_image_pixels=32 * 24 - 1), tokenizer)


# The kernel's peak is measured from here on: that of getrusage begins with what the parent held at the fork.
DECODES = """
import pathlib, sys
from offbeat_data import Picture
import PIL.JpegImagePlugin

def peak_kib():
    return int(pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

data = pathlib.Path(sys.argv[1]).read_bytes()
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = peak_kib()
pixels = Picture(data=data, height=168, width=224).pixels()
print(peak_kib() - before)
print(pixels[84, 112, 0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read in /proc")
def test_a_photograph_is_decoded_no_larger_than_its_use_takes(tmp_path):
    """Twelve million pixels take 48 MB as Pillow holds them, and an eighth in each direction less than one."""
    ramp = np.add.outer(np.arange(3000), np.arange(4000)) / 7000 * 255
    photograph = Image.fromarray(np.stack([ramp] * 3, -1).astype(np.uint8))
    photograph.save(path := tmp_path / "photograph.jpeg", quality=95)
    ended = subprocess.run([sys.executable, "-c", DECODES, path], capture_output=True, text=True, check=True)
    taken_kib, middle = map(int, ended.stdout.split())
    assert taken_kib < 24_000
    assert abs(middle - 127) <= 2


@pytest.mark.parametrize("turn", [1, 3, 6])
def test_a_reduced_photograph_is_the_whole_one_made_smaller(turn):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((1600, 1200), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = turn
    coarse.save(file := io.BytesIO(), format="JPEG", quality=95, exif=exif)
    upright = {1: coarse, 3: coarse.rotate(180), 6: coarse.rotate(-90, expand=True)}[turn]
    size = (160, 120) if turn != 6 else (120, 160)
    wanted = np.asarray(upright.resize(size, Image.Resampling.BICUBIC)).astype(int)
    pixels = Picture(data=file.getvalue(), height=size[1], width=size[0]).pixels().astype(int)
    assert abs(pixels - wanted).mean() <= 1.5
