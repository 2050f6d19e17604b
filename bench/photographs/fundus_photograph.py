"""Draws one synthetic photograph of the fundus, the back of an eye, from what is to be seen in it.

Retina coordinates: the fovea is the origin, x grows towards the nose, y upwards, and 1 is the radius of the
first camera's field. The optic disc lies on the x axis; vessels leave it, arch around the macula and branch.
A left eye is the mirror image of a right one. All shapes are drawn at a higher resolution and averaged.

What is random follows from `seed` alone, in units of the field: the same eye has the same vessels and lesions
at every size. Lesions are as large as 64 pixels need: microaneurysms twice to three times their real size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFilter

from bench import randomness

Points = list[tuple[float, float]]

DISC = (0.70, 0.03)
"""Centre of the optic disc, 15.5 degrees from the fovea in a field of 45 degrees."""
DISC_RADIUS = 0.13
FIELD = 0.96
"""Radius of the round field, as a share of half the photograph."""


@dataclass(frozen=True, kw_only=True)
class Camera:
    """What differs between cameras: colour, magnification, height of the field, noise, notch."""

    colour: tuple[float, float, float]
    zoom: float
    height: float
    noise: float
    notch: str


CAMERAS = (
    Camera(colour=(0.80, 0.43, 0.20), zoom=1.0, height=1.0, noise=0.012, notch="triangle"),
    Camera(colour=(0.66, 0.27, 0.12), zoom=1.12, height=0.86, noise=0.03, notch="square"),
)

VEIN = np.array([0.32, 0.50, 0.42])
ARTERY = np.array([0.18, 0.36, 0.30])
BLOOD = np.array([0.24, 0.02, 0.05])
EXUDATE = np.array([1.00, 1.00, 0.45])
PALE = np.array([0.98, 0.76, 0.55])


def photograph(
    visible: Sequence[int], strength: float, camera: int, side: str, size: int, seed: int
) -> np.ndarray:
    """The photograph of an eye, uint8 `[size, size, 3]`.

    Args:
        visible: Number of microaneurysms, haemorrhages and exudates to be seen.
        strength: Of the artefacts, in [0, 1]. They are drawn over the lesions that they leave visible.
        camera: Index into CAMERAS.
        side: "left" or "right".
        size: Height and width in pixels.
        seed: Fixes anatomy, places of lesions, artefacts and noise.
    """
    view = _View(CAMERAS[camera], side, size, _generator(seed, "view"))
    image, light = _background(view, _generator(seed, "retina"))
    for colour, mask in zip((ARTERY, VEIN), _vessels(view, _generator(seed, "vessels")), strict=True):
        image *= 1 - mask[..., None] * colour
    image = _lesions(image, light, view, visible, seed)
    image = _artefacts(image, view, strength, _generator(seed, "artefacts"))
    return _developed(image, view, _generator(seed, "noise", size))


def _generator(seed: int, *purpose: str | int) -> np.random.Generator:
    return np.random.default_rng(randomness.derive(seed, *purpose))


class _View:
    """What the camera sees: from retina coordinates to pixels and back, and masks drawn in the former."""

    def __init__(self, camera: Camera, side: str, size: int, generator: np.random.Generator) -> None:
        self.camera, self.size = camera, size
        self.factor = 4 if size <= 64 else 2
        self.mirror = 1.0 if side == "right" else -1.0
        self.gaze = generator.normal((0.1, 0.0), 0.05)
        self.tilt = generator.normal(0.0, 0.08)
        self.scale = camera.zoom * FIELD * size * self.factor / 2  # drawn pixels of a unit
        axis = (np.arange(size) + 0.5) * 2 / size - 1
        self.across, self.down = np.meshgrid(axis / FIELD, axis / FIELD)  # in radii of the field
        self.radius = np.hypot(self.across, self.down)
        turned = np.stack([self.across * self.mirror, -self.down]) / camera.zoom
        cos, sin = math.cos(self.tilt), math.sin(self.tilt)
        self.x = cos * turned[0] + sin * turned[1] + self.gaze[0]
        self.y = -sin * turned[0] + cos * turned[1] + self.gaze[1]

    def field(self, x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Places of the retina in radii of the field, to the right and down from the middle."""
        nasal, up = np.asarray(x, np.float64) - self.gaze[0], np.asarray(y, np.float64) - self.gaze[1]
        cos, sin, zoom = math.cos(self.tilt), math.sin(self.tilt), self.camera.zoom
        return (cos * nasal - sin * up) * self.mirror * zoom, -(sin * nasal + cos * up) * zoom

    def canvas(self) -> tuple[Image.Image, ImageDraw.ImageDraw]:
        """An empty mask in drawn pixels."""
        image = Image.new("L", (self.size * self.factor,) * 2)
        return image, ImageDraw.Draw(image)

    def pixels(self, across: ArrayLike, down: ArrayLike) -> Points:
        """Places in radii of the field as drawn pixels."""
        half = self.size * self.factor / 2
        both = np.stack([np.atleast_1d(across), np.atleast_1d(down)], -1) * FIELD * half + half
        return [tuple(point) for point in both.tolist()]

    def dots(self, draw: ImageDraw.ImageDraw, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> None:
        """Draws discs of the retina."""
        for (i, j), r in zip(self.pixels(*self.field(x, y)), np.asarray(radius) * self.scale, strict=True):
            draw.ellipse((i - r, j - r, i + r, j + r), fill=255)

    def mask(self, image: Image.Image, blur: float = 0.0) -> np.ndarray:
        """A drawn mask in pixels of the photograph, in [0, 1]; blurred by so many radii of the field."""
        if blur:
            image = image.filter(ImageFilter.GaussianBlur(blur * FIELD * self.size * self.factor / 2))
        return np.asarray(image.reduce(self.factor), np.float64) / 255


def _background(view: _View, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Retina with macula and disc `[size, size, 3]`, and the light that falls on it `[size, size, 1]`."""
    lit = generator.normal(0, 0.08, 2)
    light = 1.08 - 0.38 * view.radius**2 + lit[0] * view.across + lit[1] * view.down
    light = np.clip(light, 0.2, None)[..., None]
    pigment = np.exp(generator.normal(0.0, [0.06, 0.10, 0.14]))
    texture = 1 + 0.05 * _clouds(view, 7, generator) + 0.025 * _clouds(view, 24, generator)
    image = np.array(view.camera.colour) * pigment * texture[..., None]
    macula = np.exp(-(view.x**2 + view.y**2) / generator.uniform(0.14, 0.2) ** 2)
    image = image * (1 - macula[..., None] * np.array([0.22, 0.40, 0.45]))

    across, up = generator.uniform(0.9, 1.05), generator.uniform(1.0, 1.15)
    from_disc = np.hypot((view.x - DISC[0]) / across, (view.y - DISC[1]) / up) / DISC_RADIUS
    cup = generator.uniform(0.35, 0.6)
    rim = 1 / (1 + np.exp((from_disc - 1) * 14))[..., None]
    image = image * (1 - 0.85 * rim) + 0.85 * rim * PALE * generator.uniform(0.85, 1.0)
    image += 0.12 / (1 + np.exp((from_disc - cup) * 10))[..., None]
    return image * light, light


def _clouds(view: _View, cells: int, generator: np.random.Generator) -> np.ndarray:
    """Smooth noise of mean 0 and standard deviation near 1, `[size, size]`."""
    coarse = Image.fromarray(generator.standard_normal((cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((view.size,) * 2, Image.Resampling.BICUBIC), np.float64)


def _vessels(view: _View, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the arteries and of the veins, `[size, size]` each."""
    masks = []
    for width, shift in ((0.026, 0.06), (0.036, -0.06)):
        image, draw = view.canvas()
        for up in (1.0, -1.0):
            start = (DISC[0] + generator.normal(0, 0.02), DISC[1] + generator.normal(0, 0.02))
            arch = up * (math.pi * 0.60 + shift + generator.normal(0, 0.08))
            bend = up * generator.uniform(0.85, 1.15)
            arcade = _Vessel(start=start, heading=arch, bend=bend, width=width, length=1.9)
            _draw_with_branches(view, draw, generator, arcade)
            nasal = up * (math.pi * 0.28 + 2 * shift + generator.normal(0, 0.12))
            to_nose = _Vessel(start=start, heading=nasal, bend=-up * 0.3, width=width * 0.75, length=0.9)
            _draw_with_branches(view, draw, generator, to_nose)
        masks.append(view.mask(image))
    return masks[0], masks[1]


@dataclass(frozen=True, kw_only=True)
class _Vessel:
    """How a vessel runs, in retina coordinates."""

    start: tuple[float, float]
    heading: float
    """Its direction where it begins, in radians from the nasal direction."""
    bend: float
    """Change of the direction, in radians per unit of length."""
    width: float
    """Where it begins; it ends at 0.4 of that."""
    length: float
    depth: int = 0
    """How many vessels lie between it and the disc."""

    def course(self, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Points (x and y) of a vessel, direction and width there, `[steps]` each, up to where none runs."""
        step = 0.03
        steps = max(int(self.length / step), 2)
        angles = self.heading + self.bend * step * np.arange(steps)
        angles = angles + np.cumsum(generator.normal(0, 0.08, steps))
        x = self.start[0] + step * np.cumsum(np.cos(angles))
        y = self.start[1] + step * np.cumsum(np.sin(angles))
        radius = np.hypot(x, y)
        ends = np.flatnonzero((radius < 0.17) | (radius > 1.2))  # no vessel reaches the fovea
        steps = int(ends[0]) if ends.size else steps
        widths = self.width * (1 - 0.6 * step / self.length * np.arange(steps))
        return x[:steps], y[:steps], angles[:steps], widths


def _draw_with_branches(
    view: _View, draw: ImageDraw.ImageDraw, generator: np.random.Generator, vessel: _Vessel
) -> None:
    """Draws a vessel and those that leave it."""
    x, y, angles, widths = vessel.course(generator)
    points, steps = view.pixels(*view.field(x, y)), len(x)
    for k in range(0, steps - 1, 3):
        drawn = widths[k] * view.scale
        shade, thickness = int(255 * min(drawn, 1.0)), max(round(drawn), 1)
        draw.line(points[k : k + 4], fill=shade, width=thickness, joint="curve")
    if vessel.length < 0.3 or vessel.depth == 3:
        return
    at, side = generator.integers(3, 8), 1.0 if generator.random() < 0.5 else -1.0
    while at < steps - 1:
        turn = side * generator.uniform(0.5, 1.0)
        share = generator.uniform(0.25, 0.5)
        branch = _Vessel(
            start=(float(x[at]), float(y[at])),
            heading=float(angles[at]) + turn,
            bend=-turn * generator.uniform(0.0, 1.2),
            width=float(widths[at]) * 0.62,
            length=vessel.length * share,
            depth=vessel.depth + 1,
        )
        _draw_with_branches(view, draw, generator, branch)
        at += generator.integers(5, 11)
        side = -side if generator.random() < 0.8 else side


def _lesions(
    image: np.ndarray, light: np.ndarray, view: _View, visible: Sequence[int], seed: int
) -> np.ndarray:
    """The image with so many lesions of each kind; one lesion more leaves the others where they are."""
    aneurysms, haemorrhages, exudates = visible
    generator = _generator(seed, "microaneurysms")
    canvas, draw = view.canvas()
    for _ in range(aneurysms):
        x, y = _place(view, 0.6, generator)
        view.dots(draw, *np.array([[x], [y], [generator.uniform(0.020, 0.028)]]))
    small = view.mask(canvas)

    generator = _generator(seed, "haemorrhages")
    canvas, draw = view.canvas()
    for _ in range(haemorrhages):
        x, y = _place(view, 0.6, generator)
        radius, number = generator.uniform(0.042, 0.07), generator.integers(3, 7)
        along, flat = generator.uniform(0, math.pi), generator.uniform(0.3, 0.9)
        u, v = generator.normal(0, radius * 0.6, (2, number)) * [[1.0], [flat]]
        across, up = u * math.cos(along) - v * math.sin(along), u * math.sin(along) + v * math.cos(along)
        view.dots(draw, x + across, y + up, radius * generator.uniform(0.5, 1.0, number))
    large = view.mask(canvas, blur=0.006)

    generator = _generator(seed, "exudates")
    canvas, draw = view.canvas()
    for _ in range(exudates):
        x, y = _place(view, 0.4, generator)
        number = generator.integers(4, 10)
        across, up = generator.normal(0, 0.04, (2, number))
        view.dots(draw, x + across, y + up, generator.uniform(0.015, 0.032, number))
    bright = view.mask(canvas, blur=0.004)

    dark = np.maximum(0.8 * small, 0.85 * large)[..., None]
    image = image * (1 - dark) + dark * BLOOD * light
    return image * (1 - 0.9 * bright[..., None]) + 0.9 * bright[..., None] * EXUDATE * light


def _place(view: _View, spread: float, generator: np.random.Generator) -> tuple[float, float]:
    """A place on the retina, about the fovea, inside the field and off the optic disc."""
    while True:
        x, y = generator.normal(0, spread, 2)
        across, down = view.field(x, y)
        in_field = math.hypot(across, down) < 0.88 and abs(down) < view.camera.height - 0.08
        if in_field and math.hypot(x - DISC[0], y - DISC[1]) > 0.2:
            return x, y


def _artefacts(image: np.ndarray, view: _View, strength: float, generator: np.random.Generator) -> np.ndarray:
    """The image blurred, over- or underexposed, with dust and eyelashes, by the strength."""
    blurred, exposed, dusty, lashed = strength * generator.uniform(0.4, 1.0, 4)
    pixels = np.clip(image * 255, 0, 255).astype(np.uint8)
    blur = ImageFilter.GaussianBlur(float(0.05 * blurred**1.5 * FIELD * view.size / 2))
    image = np.asarray(Image.fromarray(pixels).filter(blur), np.float64) / 255

    over, side = generator.random() < 0.5, generator.uniform(0, 2 * math.pi)
    crescent = view.across * math.cos(side) + view.down * math.sin(side) + generator.uniform(-0.6, 0.2)
    crescent = 1 / (1 + np.exp(-6 * crescent))[..., None]
    if over:
        veil = exposed * (0.25 + 0.6 * crescent)
        image = image * (1 - veil) + veil * np.array([0.95, 0.82, 0.68])
    else:
        image = image * np.exp(-exposed * (0.5 + 1.6 * crescent))

    canvas, draw = view.canvas()
    for _ in range(generator.poisson(10 * dusty)):
        (across, down), radius = generator.uniform(-0.9, 0.9, 2), generator.uniform(0.015, 0.05)
        (i, j), r = view.pixels(across, down)[0], radius * FIELD * view.size * view.factor / 2
        draw.ellipse((i - r, j - r, i + r, j + r), fill=int(generator.uniform(90, 220)))
    dust = view.mask(canvas, blur=0.012)[..., None]
    image = image * (1 - 0.8 * dust) + 0.8 * dust * np.array([0.16, 0.15, 0.15])
    canvas, draw = view.canvas()
    for _ in range(generator.poisson(7 * lashed)):
        root, t = generator.uniform(-0.9, 0.9), np.linspace(0, 1, 12)
        reach, lean, curl = generator.uniform(0.3, 0.9), generator.normal(0, 0.35), generator.normal(0, 0.25)
        down = view.camera.height * (1 - reach * t)
        points = view.pixels(root + lean * t + curl * t**2, down)
        draw.line(points, fill=230, width=max(round(0.025 * view.scale), 1), joint="curve")
    return image * (1 - 0.85 * view.mask(canvas, blur=0.01)[..., None])


def _developed(image: np.ndarray, view: _View, generator: np.random.Generator) -> np.ndarray:
    """The image behind the camera's round field with its notch, and with its noise, in uint8."""
    canvas, draw = view.canvas()
    (left, top), (right, bottom) = view.pixels(np.array([-1.0, 1.0]), np.array([-1.0, 1.0]))
    draw.ellipse((left, top, right, bottom), fill=255)
    notch = {
        "triangle": [(0.64, -0.70), (0.78, -0.80), (0.78, -0.56)],
        "square": [(0.9, -0.06), (1.035, -0.06), (1.035, 0.06), (0.9, 0.06)],
    }[view.camera.notch]
    draw.polygon(view.pixels(*np.array(notch).T), fill=255)
    edge = view.pixels(0.0, view.camera.height)[0][1], view.pixels(0.0, -view.camera.height)[0][1]
    draw.rectangle((0, edge[0], canvas.width, canvas.height), fill=0)
    draw.rectangle((0, 0, canvas.width, edge[1]), fill=0)
    image = image * view.mask(canvas)[..., None] + 0.012
    image = image + view.camera.noise * generator.standard_normal(image.shape)
    return np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)
