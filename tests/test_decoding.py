"""Pictures of every kind come through one door: as 8-bit RGB, exactly, or refused by name."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from bench.errors import UsageError
from bench.photographs import decoding
from bench.photographs.decoding import Unusable, decoded
from bench.tasks.own_images import OwnImages, Settings

DRAW = np.random.default_rng(3)
GREY = DRAW.integers(0, 256, (9, 14)).astype(np.uint8)
COLOUR = DRAW.integers(0, 256, (9, 14, 3)).astype(np.uint8)
GREY[0, 0] = COLOUR[0, 0, 0] = 255


def png(path, rows, depth, colour):
    """A PNG made by hand, of rows of bytes: Pillow writes no colours of 16 bits."""

    def chunk(name, content):
        found = struct.pack(">I", len(content)) + name + content
        return found + struct.pack(">I", zlib.crc32(name + content))

    height, width = rows.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = b"".join(b"\0" + row.tobytes() for row in rows)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def rgb(grey):
    return np.repeat(grey[..., None], 3, 2)


def saved(path, array, mode=None, **options):
    picture = Image.fromarray(array)
    (picture.convert(mode) if mode else picture).save(path, **options)


def cmyk(colour):
    """Ink by hand, and what colour it has."""
    ink = np.dstack([colour, GREY])
    light = 255.0 - ink
    return ink, light[..., :3] * light[..., 3:] / 255


def with_alpha(alpha):
    return np.dstack([COLOUR, np.full(GREY.shape, alpha, np.uint8)])


def deep(values, ending="png"):
    return lambda path: saved(path.with_suffix(f".{ending}"), values)


FEW_COLOURS = np.array([[250, 3, 7], [1, 200, 90], [77, 78, 79]], np.uint8)
INDEX = (GREY % 3).astype(np.uint8)


def palette(path, **options):
    picture = Image.fromarray(INDEX, "L").convert("P")
    picture.putpalette(FEW_COLOURS.tobytes())
    picture.save(path, **options)


EXACT = {
    "grey.png": (lambda p: saved(p, GREY), rgb(GREY)),
    "colour.png": (lambda p: saved(p, COLOUR), COLOUR),
    "colour.bmp": (lambda p: saved(p, COLOUR), COLOUR),
    "colour.tiff": (lambda p: saved(p, COLOUR), COLOUR),
    "colour.webp": (lambda p: saved(p, COLOUR, lossless=True), COLOUR),
    "grey.pgm": (lambda p: saved(p, GREY), rgb(GREY)),
    "one_bit.png": (lambda p: saved(p, GREY > 127), rgb(np.where(GREY > 127, 255, 0))),
    "palette.png": (palette, FEW_COLOURS[INDEX]),
    "palette.gif": (palette, FEW_COLOURS[INDEX]),
    "one.png": (lambda p: saved(p, COLOUR[:1, :1]), COLOUR[:1, :1]),
    "gamma.png": (lambda p: saved(p, COLOUR, gamma=0.45), COLOUR),
    "opaque.png": (lambda p: saved(p, with_alpha(255)), COLOUR),
    "grey_alpha.png": (lambda p: saved(p, np.dstack([GREY, np.full_like(GREY, 255)])), rgb(GREY)),
    "grey_16.png": (lambda p: saved(p, GREY.astype(np.uint16) * 257), rgb(GREY)),
    "upper_byte.png": (lambda p: saved(p, GREY.astype(np.uint16) * 256 + 7), rgb(GREY)),
    "grey_16.tiff": (lambda p: saved(p, GREY.astype(np.uint16) * 257), rgb(GREY)),
    "black_16.png": (lambda p: saved(p, np.zeros((9, 14), np.uint16)), np.zeros((9, 14, 3))),
    "colour_16.png": (lambda p: png(p, (COLOUR.astype(np.uint16) * 257).astype(">u2"), 16, 2), COLOUR),
    "cmyk.tiff": (
        lambda p: Image.frombytes("CMYK", (14, 9), cmyk(COLOUR)[0].tobytes()).save(p),
        cmyk(COLOUR)[1],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_pixels_are_those_that_were_written(name, tmp_path):
    """Against numpy; ink to one level of rounding."""
    write, expected = EXACT[name]
    write(tmp_path / name)
    found = decoded(tmp_path / name)
    assert found.mode == "RGB"
    off = np.abs(np.asarray(found).astype(float) - expected).max()
    assert off <= (1 if name.startswith("cmyk") else 0)


TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}
"""EXIF's number of an orientation -> what makes the stored picture upright."""


@pytest.mark.parametrize("ending", ["png", "tiff", "webp"])
@pytest.mark.parametrize("number", TURNS)
def test_a_picture_is_turned_as_its_exif_data_say(ending, number, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = number
    options = {"lossless": True} if ending == "webp" else {}
    Image.fromarray(COLOUR).save(tmp_path / f"x.{ending}", exif=exif, **options)
    assert np.array_equal(np.asarray(decoded(tmp_path / f"x.{ending}")), TURNS[number](COLOUR))


def test_photographs_of_eyes_stay_as_they_are_stored(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOUR).save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.asarray(decoded(tmp_path / "x.png", turn=False)), COLOUR)


def frames(path):
    Image.fromarray(GREY).save(path, save_all=True, append_images=[Image.fromarray(255 - GREY)])


REFUSED = {
    "int32.tiff": (lambda p: saved(p, GREY.astype(np.int32) * 1000), "32-bit numbers, which do not say"),
    "small_int32.tiff": (lambda p: saved(p, GREY.astype(np.int32)), "32-bit numbers, which do not say"),
    "float.tiff": (lambda p: saved(p, GREY.astype(np.float32) / 255), "floating point, which do not say"),
    "twelve.png": (lambda p: saved(p, GREY.astype(np.uint16) * 16), "has 16 bits and uses few"),
    "eight.png": (lambda p: saved(p, GREY.astype(np.uint16)), "has 16 bits and uses few"),
    "eight_colour.png": (lambda p: png(p, COLOUR.astype(">u2"), 16, 2), "has 16 bits and uses few"),
    "glass.png": (lambda p: saved(p, with_alpha(128)), "is transparent in parts"),
    "glass_grey.png": (lambda p: saved(p, np.dstack([GREY, GREY])), "is transparent in parts"),
    "hole.png": (lambda p: palette(p, transparency=1), "is transparent in parts"),
    "key.png": (
        lambda p: saved(p, COLOUR, transparency=tuple(COLOUR[1, 1].tolist())),
        "is transparent in parts",
    ),
    "lab.tiff": (lambda p: saved(p, COLOUR, "LAB"), "its colours are LAB, whose conversion is not exact"),
    "two.tiff": (frames, "holds 2 pictures"),
    "moving.png": (
        lambda p: Image.fromarray(GREY).save(p, save_all=True, append_images=[Image.fromarray(255 - GREY)]),
        "holds 2 pictures",
    ),
    "two.gif": (frames, "holds 2 pictures"),
    "empty.png": (lambda p: p.write_bytes(b""), "empty file"),
    "text.png": (lambda p: p.write_bytes(b"no picture"), "none of JPEG, PNG"),
    "script.png": (lambda p: p.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "none of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_exactly_is_refused(name, tmp_path):
    write, said = REFUSED[name]
    write(tmp_path / name)
    with pytest.raises(Unusable, match=said) as caught:
        decoded(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["png", "jpeg", "tiff", "bmp", "webp"])
def test_a_picture_cut_off_is_refused(ending, tmp_path):
    Image.fromarray(DRAW.integers(0, 256, (60, 60, 3)).astype(np.uint8)).save(tmp_path / f"x.{ending}")
    whole = (tmp_path / f"x.{ending}").read_bytes()
    (tmp_path / f"x.{ending}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unusable):
        decoded(tmp_path / f"x.{ending}")


# ---- a folder of them


def mixed(folder, number=300):
    """So many pictures of mixed modes and sizes in two classes, and what each is, upright."""
    expected = {}
    draw = np.random.default_rng(0)
    for i in range(number):
        height, width = draw.integers(8, 30, 2)
        grey = draw.integers(0, 256, (height, width)).astype(np.uint8)
        grey[0, 0] = 255
        colour = draw.integers(0, 256, (height, width, 3)).astype(np.uint8)
        path = folder / ("a", "b")[i % 2] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i == 17:
            saved(path, grey.astype(np.uint16) * 257)
            expected[path] = rgb(grey)
        elif i == 18:
            exif = Image.Exif()
            exif[0x0112] = 6
            Image.fromarray(colour).save(path, exif=exif)
            expected[path] = np.rot90(colour, -1)
        elif i == 19 or i % 5 == 1:
            saved(path, np.dstack([colour, np.full(grey.shape, 255, np.uint8)]))
            expected[path] = colour
        elif i % 5 == 2:
            saved(path, grey)
            expected[path] = rgb(grey)
        elif i % 5 == 3:
            saved(path, grey > 99)
            expected[path] = rgb(np.where(grey > 99, 255, 0).astype(np.uint8))
        else:
            saved(path, colour)
            expected[path] = colour
    return expected


def square(pixels, size):
    """The middle square, scaled; of the truth's own pixels."""
    return np.asarray(ImageOps.fit(Image.fromarray(np.ascontiguousarray(pixels)), (size, size), 2))


def test_three_hundred_mixed_pictures_are_exact_or_refused(tmp_path):
    """One has 16 bits, one is turned, one has an alpha channel; what cannot be read is named."""
    expected = mixed(tmp_path / "pictures")
    task = OwnImages(Settings(folder=str(tmp_path / "pictures"), size=8, channels=2))
    found = {
        image.permute(1, 2, 0).numpy().tobytes()
        for part in ("train", "test")
        for image in task.own_data(part)[0]
    }
    assert found == {square(pixels, 8).tobytes() for pixels in expected.values()}
    assert len(expected) == 300

    corrupt, glass = tmp_path / "pictures" / "a" / "004.png", tmp_path / "pictures" / "b" / "005.png"
    corrupt.write_bytes(corrupt.read_bytes()[:60])
    saved(glass, with_alpha(3))
    with pytest.raises(
        UsageError, match=r"a/004.png: cannot be read as an image: .*; \S*b/005.png: "
    ) as caught:
        OwnImages(task.settings).data_digest()
    assert "is transparent in parts" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_many_that_are_refused_are_counted(tmp_path):
    expected = mixed(tmp_path / "pictures", 40)
    for path in list(expected)[:7]:
        path.write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"; and 4 more of 40$"):
        OwnImages(Settings(folder=str(tmp_path / "pictures"))).data_digest()


def test_formats_are_those_of_image_folders():
    """Every ending that torchvision's ImageFolder takes has its format."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    known = Image.registered_extensions()
    assert {known[ending] for ending in IMG_EXTENSIONS} <= set(decoding.FORMATS)
