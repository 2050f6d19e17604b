"""Small prepared photographs of eyes, made without a source's files: discs that are brighter where sick."""

import hashlib

import numpy as np

from bench.photographs import photographs
from bench.system.files import write

SIZE = 64
PATIENTS = {"train": 60, "val": 10, "test": 30}
"""Of each part, with two eyes each: the 200 synthetic eyes of the preset smoke."""
NAMES = ("retinopathy", "retinopathy_synthetic", "retinopathy_aptos", "retinamnist")


def pictures(levels, size, seed):
    """Photographs uint8 `[N, size, size, 3]` of eyes with these levels."""
    g = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    inside = (x**2 + y**2 < (0.45 * size) ** 2)[None, ..., None]
    bright = 80 + 25 * np.asarray(levels)[:, None, None, None] * np.array([1.0, 0.6, 0.2])
    return np.where(inside, bright + g.integers(-20, 21, (len(levels), size, size, 3)), 0).astype(np.uint8)


def write_prepared(root, name="retinopathy", size=SIZE, patients=PATIENTS, seed=0):
    """A finished folder of photographs below `root`, as `bench data prepare` leaves it."""
    folder = photographs.folder_of(root, name, size, "resize")
    folder.mkdir(parents=True)
    parts = [part for part, number in patients.items() for _ in range(2 * number)]
    levels = np.random.default_rng(seed).choice(5, len(parts), p=[0.5, 0.1, 0.2, 0.1, 0.1])
    images = pictures(levels, size, seed)
    images.tofile(folder / photographs.PIXELS)
    index = {
        "schema": photographs.SCHEMA,
        "name": name,
        "size": size,
        "preprocess": "resize",
        "source": "made by the tests",
        "names": [f"{i // 2}_{('left', 'right')[i % 2]}" for i in range(len(parts))],
        "levels": levels.tolist(),
        "patients": [str(i // 2) for i in range(len(parts))],
        "parts": parts,
        "pixels": [hashlib.sha256(image.tobytes()).hexdigest() for image in images],
        "bad": [],
    }
    write(folder / photographs.INDEX, photographs.sealed(index))
    return folder


def write_all(root):
    """Photographs of every source, each from a seed of its own."""
    for seed, name in enumerate(NAMES):
        write_prepared(root, name, seed=seed)
    return root
