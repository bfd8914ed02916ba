"""Test decoding image files to pixels: formats, modes, limits, and damaged files."""

import io
import random
import re
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.loops import loop_over
from vllm.errors import RequestError
from vllm.multimodal.images.image import ACCEPTED, decode_image, read_image, sniff, to_rgb

MAX_PIXELS = 10**6
LOSSLESS = ("PNG", "GIF", "BMP", "TIFF")
HEIGHT, WIDTH = 16, 24
COLORS = np.array([[200, 90, 80], [60, 170, 90], [70, 100, 190], [20, 20, 20]], np.uint8)
PIXELS = COLORS[np.arange(HEIGHT)[:, None] // 8 * 2 + np.arange(WIDTH) // 12]
"""Four areas of one color each."""
PICTURE = Image.fromarray(PIXELS)
GRAY = np.asarray(PICTURE.convert("L"))
RED = (255, 0, 0)


def save(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decode(data, **options):
    return decode_image(data, max_pixels=MAX_PIXELS, **options)


def exif(orientation):
    made = Image.Exif()
    made[0x0112] = orientation
    return made


def animation(format):
    others = [Image.new("RGB", PICTURE.size, color) for color in ("black", "white")]
    return save(PICTURE, format, save_all=True, append_images=others)


def png(width, height, *chunks, depth=8, color=2):
    """Return a PNG file with these chunks between its header and its end."""
    header = (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (header, *chunks, (b"IEND", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("format", ACCEPTED)
def test_every_accepted_format_is_decoded(format):
    data = save(PICTURE, format)
    assert sniff(data) == format
    pixels = decode(data)
    assert (pixels.shape, pixels.dtype) == (PIXELS.shape, np.uint8)
    assert pixels.flags.writeable and pixels.flags.c_contiguous
    np.testing.assert_allclose(pixels.astype(int), PIXELS, atol=0 if format in LOSSLESS else 60)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "m[0]: it is an empty file; accepted are PNG, JPEG, WEBP, GIF, BMP, TIFF, AVIF"),
        (b"hello", "m[0]: it is no image; accepted are"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "the format SVG"),
        (b"\xef\xbb\xbf <?xml version='1.0'?><svg/>", "the format SVG"),
        (b"<!DOCTYPE HTML><p>", "the format HTML"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "the format PostScript"),
        (b"%PDF-1.7", "the format PDF"),
        (b"\xd7\xcd\xc6\x9a\0\0", "the format WMF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "the format HEIC or a video"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1", "the format HEIC or a video"),
        (b"\0\0\1\0\1\0", "the format ICO"),
        (b"RIFF\0\0\0\0WAVE", "it is no image"),
        (b"P6 1 1 255 abc", "it is no image"),  # Pillow would accept this file
    ],
)
def test_other_formats_are_refused_by_name(data, message):
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        decode(data, where="m[0]")
    assert error.value.param == "m[0]"


def test_the_decoder_is_chosen_by_the_content_alone():
    eps = b"BM%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    with pytest.raises(RequestError, match="this BMP file cannot be decoded"):
        decode(eps)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("L", save(PICTURE.convert("L"), "PNG"), GRAY),
        ("P", save(PICTURE.quantize(4), "PNG"), PIXELS),
        ("1", save(Image.fromarray(GRAY > 100), "PNG"), (GRAY > 100) * 255),
        ("CMYK", save(PICTURE.convert("CMYK"), "TIFF"), PIXELS),
        ("gray of 16 bits", save(Image.fromarray(GRAY.astype(np.uint16) * 257), "PNG"), GRAY),
        (
            "gray of 16 bits, high byte first",
            save(Image.fromarray(GRAY.astype(np.int32) * 257).convert("I;16B"), "TIFF"),
            GRAY,
        ),
        ("I", save(Image.fromarray(GRAY.astype(np.int32) * 257), "TIFF"), GRAY),
        ("I of 8 bits", save(Image.fromarray(GRAY.astype(np.int32)), "TIFF"), GRAY),
    ],
)
def test_every_mode_becomes_rgb(name, data, expected):
    if expected.ndim == 2:
        expected = np.repeat(expected[:, :, None], 3, 2)
    np.testing.assert_array_equal(decode(data), expected)


def test_a_jpeg_in_cmyk_has_its_colors():
    pixels = decode(save(PICTURE.convert("CMYK"), "JPEG", quality=95))
    assert np.abs(pixels.astype(int) - PIXELS).mean() < 3


LEFT = np.broadcast_to(np.arange(WIDTH) < WIDTH // 2, (HEIGHT, WIDTH))


def clear_left(mode="RGBA"):
    """Return the image with a transparent left half, whose hidden color is black."""
    alpha = np.where(LEFT, 0, 255).astype(np.uint8)
    return Image.fromarray(np.dstack([np.where(LEFT[..., None], 0, PIXELS), alpha])).convert(mode)


def color_key(image, key, format="PNG"):
    return save(image, format, transparency=key)


FEW = PICTURE.quantize(4)
GRAY_16 = Image.fromarray(GRAY.astype(np.uint16) * 257)
CORNER = PIXELS[0, 0].tolist()
IN_CORNER = (PIXELS == CORNER).all(-1)


@loop_over("background", [(255, 255, 255), RED])
@loop_over(
    "name, data, clear",
    [
        ("RGBA", save(clear_left(), "PNG"), LEFT),
        ("LA", save(clear_left("LA"), "PNG"), LEFT),
        ("P with a clear color", color_key(FEW, 2), np.asarray(FEW) == 2),
        ("P with alphas", color_key(FEW, bytes([0, 255, 0, 255])), np.asarray(FEW) % 2 == 0),
        ("RGB with a clear color", color_key(PICTURE, tuple(CORNER)), IN_CORNER),
        ("L with a clear value", color_key(PICTURE.convert("L"), int(GRAY[0, 0])), IN_CORNER),
        ("16 bits with a clear value", color_key(GRAY_16, int(GRAY[0, 0]) * 257), IN_CORNER),
        ("GIF", color_key(FEW, 2, "GIF"), np.asarray(FEW) == 2),
        ("WEBP", save(clear_left(), "WEBP", lossless=True), LEFT),
        ("TIFF", save(clear_left(), "TIFF"), LEFT),
        ("AVIF", save(clear_left(), "AVIF", quality=100), LEFT),
    ],
)
def test_clear_pixels_have_the_color_of_the_background(name, data, clear, background):
    pixels = decode(data, background=background)
    assert clear.any() and not clear.all()
    np.testing.assert_array_equal((pixels == background).all(-1), clear)


@pytest.mark.parametrize(
    ("depth", "color", "key", "samples", "expected"),
    [
        (1, 0, ">H", bytes([0b01000000]), [0, 255]),
        (2, 0, ">H", bytes([0b00010000]), [0, 255]),
        (4, 0, ">H", bytes([0x01]), [0, 255]),
        (8, 0, ">H", bytes([0, 1]), [0, 255]),
        (16, 0, ">H", bytes([1, 0, 0, 1]), [1, 255]),
        (8, 2, ">xxxxH", bytes([0, 0, 0, 0, 0, 1]), [0, 255]),
        (16, 2, ">xxxxH", bytes(2 * 6), [255, 255]),
    ],
)
def test_the_clear_color_of_a_png_has_the_depth_of_the_file(depth, color, key, samples, expected):
    clear = (b"tRNS", struct.pack(key, 1))
    rows = (b"IDAT", zlib.compress(b"\0" + samples))
    pixels = decode(png(2, 1, clear, rows, depth=depth, color=color))
    assert pixels[0, :, 0].tolist() == expected


def test_half_clear_pixels_are_mixed_with_the_background():
    data = save(Image.new("RGBA", (2, 2), (0, 0, 100, 51)), "PNG")
    assert decode(data)[0, 0].tolist() == [204, 204, 224]
    assert decode(data, background=(0, 0, 0))[0, 0].tolist() == [0, 0, 20]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_images_of_pillow_are_flattened_too(mode):
    image = clear_left("LA" if mode == "La" else "RGBA").convert(mode)
    before = (image.mode, image.tobytes())
    pixels = np.asarray(to_rgb(image, RED))
    np.testing.assert_array_equal((pixels == RED).all(-1), LEFT)
    assert (image.mode, image.tobytes()) == before


UPRIGHT = {
    1: PIXELS,
    2: PIXELS[:, ::-1],
    3: PIXELS[::-1, ::-1],
    4: PIXELS[::-1],
    5: PIXELS.swapaxes(0, 1),
    6: np.rot90(PIXELS, -1),
    7: PIXELS.swapaxes(0, 1)[::-1, ::-1],
    8: np.rot90(PIXELS),
}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_images_are_turned_upright(format):
    for orientation, expected in UPRIGHT.items():
        pixels = decode(save(PICTURE, format, exif=exif(orientation)))
        assert pixels.shape == expected.shape
        assert np.abs(pixels.astype(int) - expected).mean() < 10, orientation


def test_an_upright_image_is_not_turned_again():
    image = Image.open(io.BytesIO(save(PICTURE, "PNG", exif=exif(6))))
    once = to_rgb(image)
    np.testing.assert_array_equal(np.asarray(to_rgb(once)), np.rot90(PIXELS, 3))
    read = read_image(save(PICTURE, "PNG", exif=exif(6)), "RGBA", max_pixels=MAX_PIXELS)
    assert (read.mode, read.size) == ("RGBA", (HEIGHT, WIDTH))
    assert to_rgb(read).size == (HEIGHT, WIDTH)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_damaged_metadata_does_not_matter():
    for damaged in (b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\x01"):
        assert decode(save(PICTURE, "JPEG", exif=damaged)).shape == PIXELS.shape


def circular_tiff():
    """Return a file whose first directory is also its next one."""
    data = bytearray(save(PICTURE, "TIFF"))
    (first,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, first)
    struct.pack_into("<I", data, first + 2 + 12 * count, first)
    return bytes(data)


LINES = zlib.compress(bytes(8 * (8 * 3 + 1)))
BOMB = zlib.compress(bytes(2**26), 1)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (circular_tiff(), PIXELS.shape),
        (save(PICTURE, "JPEG") * 2, PIXELS.shape),
        (save(PICTURE, "JPEG") + bytes(2**20), PIXELS.shape),
        (save(PICTURE, "MPO", save_all=True, append_images=[PICTURE] * 3), PIXELS.shape),
        (png(8, 8, (b"IDAT", LINES + bytes(2**20))), (8, 8, 3)),
        (png(8, 8, (b"zTXt", b"k\0\0" + BOMB), (b"IDAT", LINES)), "PNG file cannot be decoded"),
        (png(8, 8, (b"iCCP", b"k\0\0" + BOMB), (b"IDAT", LINES)), "PNG file cannot be decoded"),
        (png(8, 8, (b"IDAT", LINES[:5])), "PNG file cannot be decoded"),
        (save(PICTURE, "ICNS"), "it is no image; accepted are"),
        (save(PICTURE, "DDS"), "it is no image; accepted are"),
    ],
)
def test_files_that_claim_more_than_a_picture(data, expected):
    if isinstance(expected, tuple):
        assert decode(data).shape == expected
    else:
        with pytest.raises(RequestError, match=expected):
            decode(data)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_an_animation_is_its_first_frame(format):
    assert np.abs(decode(animation(format)).astype(int) - PIXELS).mean() < 5


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((60000, 60000), r"m: it has (60000 x 60000|more than)"),
        ((1001, 1000), r"1001 x 1000 pixels, more than 1000000, the limit of VLLM_MAX_IMAGE_PIX"),
        ((0, 5), r"m: "),
        ((5, 0), r"m: "),
        ((201, 1), r"201 x 1 pixels: one edge is more than 200 times as long as the other"),
        ((2, 402), r"2 x 402 pixels: one edge"),
    ],
)
def test_sizes_are_checked_before_pixels_are_decoded(size, message):
    with pytest.raises(RequestError, match=message):
        decode(png(*size), where="m")  # the file has no pixel data at all
    with pytest.raises(RequestError, match="m: this PNG file cannot be decoded"):
        decode(png(1000, 1000), where="m")


def test_a_higher_limit_than_that_of_pillow_counts(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    with pytest.raises(RequestError, match="15000 x 15000 pixels, more than 200000000"):
        decode_image(png(15000, 15000), max_pixels=200_000_000)


def test_floats_and_missing_memory_are_told(monkeypatch):
    with pytest.raises(RequestError, match=r"m: its pixels are floating-point.*Convert it to 8"):
        decode(save(Image.fromarray(GRAY.astype(np.float32)), "TIFF"), where="m")

    def fail(image):
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(RequestError, match=r"m: there is not enough memory.*with fewer pixels"):
        decode(save(PICTURE, "PNG"), where="m")


def test_an_image_of_pillow_whose_file_is_damaged_is_told():
    image = Image.open(io.BytesIO(save(PICTURE, "PNG")[:-40]))
    with pytest.raises(RequestError, match="m: this PNG file cannot be decoded: image file is tru"):
        to_rgb(image, where="m")


def test_without_pillow_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RequestError, match="images need Pillow, which is not installed: pip"):
        decode(b"\x89PNG\r\n\x1a\n")


SAMPLES = {
    **{format: save(PICTURE, format) for format in ACCEPTED},
    "progressive JPEG": save(PICTURE, "JPEG", progressive=True, exif=exif(6)),
    "RGBA": save(clear_left(), "PNG"),
    "P": color_key(FEW, 0),
    "gray of 16 bits": save(Image.fromarray(GRAY.astype(np.uint16) * 257), "PNG"),
    "palette of BMP": save(PICTURE.quantize(4), "BMP"),
    "lossless WEBP": save(PICTURE, "WEBP", lossless=True),
    **{f"animated {f}": animation(f) for f in ("GIF", "PNG", "WEBP", "AVIF")},
    "several pictures": animation("MPO"),
    **{f"TIFF {c}": save(PICTURE, "TIFF", compression=c)
       for c in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@loop_over("name", SAMPLES)
def test_a_truncated_file_is_refused_unless_its_picture_is_complete(name):
    data = SAMPLES[name]
    whole = decode(data)
    num_refused = 0
    for size in range(0, len(data), max(1, len(data) // 40)):
        try:
            np.testing.assert_array_equal(decode(data[:size]), whole)
        except RequestError:
            num_refused += 1
    assert num_refused > 10


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@loop_over("name", SAMPLES)
def test_damaged_files_are_refused_or_decoded(name):
    """Random bits are changed. A file is refused with the documented error, or its pixels have the
    right shape.
    """
    rng = random.Random(name)
    for _ in range(60):
        data = bytearray(SAMPLES[name])
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            pixels = decode(bytes(data))
        except RequestError as error:
            assert str(error).startswith("the image: ")
        else:
            assert pixels.shape[2] == 3 and pixels.dtype == np.uint8
