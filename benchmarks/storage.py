"""How fast prepared photographs are written and read: our memory map against litdata and webdataset.

    python benchmarks/storage.py [--images 5000] [--size 256] [--rounds 3] [--json FILE]

Smooth random pictures with grain are written once in every way, and then read in batches of 64, uint8
[64, size, size, 3]: one pass in order, one shuffled pass, and the first batch of the second half of a
shuffled pass that was interrupted there. Reading has one process and no loader workers; the files are in the
system's cache, so it is the way that is measured and not the disk. In every round each way has its turn, in
changing order; numbers are medians. Writing and images per second count processor time, that of threads and
of processes that were started included, which other load on the machine moves least. Resuming counts seconds
by the clock.

Shuffled means over all images for the map, among the images of a chunk and over chunks for litdata, and in a
buffer of 1,000 images and over shards for webdataset. `jpeg` stores quality 90 and decodes at every reading,
which is not the same pixels. Ways whose package is not installed are left out, and named.

`packages added` and `MB added` are those that a way needs and this project has not, as installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timing import median, print_table, write

BATCH = 64
SEED = 0
CHUNK = 64 * 2**20  # bytes of a chunk or a shard
OURS = "memory map"
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Numbers [B] of images and images [B, size, size, 3]."""


def draw(path: Path, images: int, size: int) -> np.memmap:
    """The pictures that are stored: colours that change slowly, and grain."""
    random = np.random.default_rng(SEED)
    made = np.memmap(path, np.uint8, "w+", shape=(images, size, size, 3))
    grain = random.integers(-8, 9, (size, size, 3), dtype=np.int16)
    for row in range(images):
        coarse = Image.fromarray(random.integers(20, 236, (8, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC), np.int16)
        made[row] = np.clip(smooth + np.roll(grain, row, (0, 1)[row % 2]), 0, 255)
    made.flush()
    return made


def jpeg(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90)
    return file.getvalue()


def pixels(content: bytes, size: int) -> np.ndarray:
    """The picture of raw or JPEG bytes."""
    if len(content) == size * size * 3:
        return np.frombuffer(content, np.uint8).reshape(size, size, 3)
    return np.asarray(Image.open(io.BytesIO(content)))


def stacked(samples: Iterator[tuple[int, np.ndarray]]) -> Batches:
    while some := list(itertools.islice(samples, BATCH)):
        yield torch.tensor([row for row, _ in some]), torch.from_numpy(np.stack([image for _, image in some]))


class Map:
    """Raw pixels in one file, and an index with a SHA-256 per image."""

    needs = ()

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def write(self, source: np.ndarray) -> None:
        """Stores every picture of the source."""
        digests = []
        with (self.folder / "images.u8").open("wb", buffering=0) as file:
            for picture in source:
                content = picture.tobytes()
                file.write(content)
                digests.append(hashlib.sha256(content).hexdigest())
            os.fsync(file.fileno())
        (self.folder / "index.json").write_text(json.dumps(digests))

    def read(self, shuffled: bool, first: int = 0) -> Batches:
        """A pass from a batch on."""
        images = len(json.loads((self.folder / "index.json").read_text()))
        shape = (images, self.size, self.size, 3)
        stored = np.memmap(self.folder / "images.u8", np.uint8, "r", shape=shape)
        rows = torch.arange(images)
        if shuffled:
            rows = torch.randperm(images, generator=torch.Generator().manual_seed(SEED))
        for some in rows.split(BATCH)[first:]:
            yield some, torch.from_numpy(stored[some.numpy()])


def sample(row: int, path: str, shape: tuple[int, ...], encoded: bool) -> dict[str, object]:
    picture = np.memmap(path, np.uint8, "r", shape=shape)[row]
    return {"row": row, "image": jpeg(picture) if encoded else picture.tobytes()}


class LitData:
    """litdata: chunks with an index, read through its loader, whose state can be kept and given back."""

    needs = ("litdata",)

    def __init__(self, folder: Path, size: int, encoded: bool = False) -> None:
        self.folder, self.size, self.encoded = folder, size, encoded

    def write(self, source: np.memmap) -> None:
        """Stores every picture of the source, in a process that litdata starts."""
        import litdata

        litdata.optimize(
            partial(sample, path=str(source.filename), shape=source.shape, encoded=self.encoded),
            list(range(len(source))),
            str(self.folder),
            chunk_bytes=CHUNK,
            num_workers=1,
            verbose=False,
        )

    def read(self, shuffled: bool, first: int = 0) -> Batches:
        """A pass from a batch on."""
        import litdata

        def collated(samples: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
            return next(stacked((s["row"], pixels(s["image"], self.size)) for s in samples))

        def loader() -> litdata.StreamingDataLoader:
            stored = litdata.StreamingDataset(str(self.folder), shuffle=shuffled, seed=SEED)
            return litdata.StreamingDataLoader(stored, batch_size=BATCH, collate_fn=collated)

        made = loader()
        if first:
            made.load_state_dict(json.loads((self.folder / "state.json").read_text()))
        yield from made

    def interrupt(self, first: int) -> None:
        """Keeps the loader's state after so many batches of a shuffled pass."""
        import litdata

        stored = litdata.StreamingDataset(str(self.folder), shuffle=True, seed=SEED)
        loader = litdata.StreamingDataLoader(stored, batch_size=BATCH, collate_fn=len)
        for _ in itertools.islice(loader, first):
            pass
        (self.folder / "state.json").write_text(json.dumps(loader.state_dict()))


class WebDataset:
    """webdataset: tar files, read one after the other; an interrupted pass is read again up to its place."""

    needs = ("webdataset",)

    def __init__(self, folder: Path, size: int, encoded: bool = False) -> None:
        self.folder, self.size, self.encoded = folder, size, encoded

    def write(self, source: np.ndarray) -> None:
        """Stores every picture of the source."""
        import webdataset

        ending = "jpg" if self.encoded else "u8"
        pattern = str(self.folder / "%04d.tar")
        with webdataset.ShardWriter(pattern, maxsize=CHUNK, verbose=0) as sink:
            for row, picture in enumerate(source):
                content = jpeg(picture) if self.encoded else picture.tobytes()
                sink.write({"__key__": f"{row:06d}", ending: content})

    def read(self, shuffled: bool, first: int = 0) -> Batches:
        """A pass from a batch on."""
        import webdataset

        shards = sorted(map(str, self.folder.glob("*.tar")))
        stored = webdataset.WebDataset(shards, shardshuffle=len(shards) if shuffled else False, seed=SEED)
        if shuffled:
            stored = stored.shuffle(1000, seed=SEED)
        ending = "jpg" if self.encoded else "u8"
        samples = ((int(s["__key__"]), s[ending]) for s in stored)
        samples = itertools.islice(samples, first * BATCH, None)
        return stacked((row, pixels(content, self.size)) for row, content in samples)


WAYS: dict[str, Callable] = {
    OURS: Map,
    "litdata, raw": LitData,
    "webdataset, raw": WebDataset,
    "litdata, jpeg": partial(LitData, encoded=True),
    "webdataset, jpeg": partial(WebDataset, encoded=True),
}


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def needed(packages: tuple[str, ...]) -> set[str]:
    """Packages and all that they need, without extras."""
    found, waiting = set(), list(packages)
    while waiting:
        name = re.match(r"[\w.-]+", waiting.pop())[0].lower().replace("_", "-")
        if name not in found and installed(name):
            found.add(name)
            waiting += [r for r in importlib.metadata.requires(name) or [] if ";" not in r]
    return found


def weight(packages: tuple[str, ...]) -> tuple[int, float]:
    """How many packages are added to those of this project, and their MB."""
    added = needed(packages) - needed(("posterior-bench",))
    files = [file for name in added for file in importlib.metadata.files(name) or []]
    return len(added), sum(f.size or 0 for f in files) / 1e6


def spent() -> float:
    """Processor seconds of this process and of those that it started."""
    return sum(os.times()[:4])


def timed(batches: Batches, images: int) -> float:
    """Images per processor second, over a pass; every image must come once."""
    began, seen = spent(), []
    for rows, pictures in batches:
        seen.append(rows)
        assert pictures.dtype == torch.uint8
    seconds = spent() - began
    assert sorted(torch.cat(seen).tolist()) == list(range(images))
    return images / seconds


def measure(images: int, size: int, rounds: int) -> tuple[list[dict], list[str]]:
    names = [name for name, way in WAYS.items() if all(map(installed, getattr(way, "func", way).needs))]
    with tempfile.TemporaryDirectory() as scratch:
        source = draw(Path(scratch) / "source", images, size)
        ways, rows = {}, {}
        for name in names:
            folder = Path(scratch) / name.replace(", ", "-").replace(" ", "-")
            folder.mkdir()
            ways[name] = way = WAYS[name](folder, size)
            began = spent()
            way.write(source)
            seconds = spent() - began
            count, megabytes = weight(way.needs)
            rows[name] = {
                "way": name,
                "writing, s": seconds,
                "MB": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6,
                "packages added": count,
                "MB added": megabytes,
            }
        numbers = {name: {"in order": [], "shuffled": [], "resumed": [], "same": []} for name in names}
        half = images // BATCH // 2
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                way = ways[name]
                numbers[name]["in order"].append(timed(way.read(shuffled=False), images))
                numbers[name]["shuffled"].append(timed(way.read(shuffled=True), images))
                if hasattr(way, "interrupt"):
                    way.interrupt(half)
                began = time.perf_counter()
                resumed = next(way.read(shuffled=True, first=half))[0]
                numbers[name]["resumed"].append(time.perf_counter() - began)
                uninterrupted = next(itertools.islice(way.read(shuffled=True), half, None))[0]
                same = torch.equal(resumed, uninterrupted)
                rows[name]["same order when resumed"] = (
                    rows[name].get("same order when resumed", True) and same
                )
        for name in names:
            rows[name] |= {
                "images/s in order": round(median(numbers[name]["in order"])),
                "images/s shuffled": round(median(numbers[name]["shuffled"])),
                "resuming, s": median(numbers[name]["resumed"]),
                "same order when resumed": all(numbers[name]["same"]),
            }
    return [rows[name] for name in names], [name for name in WAYS if name not in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")
    rows, left_out = measure(chosen.images, chosen.size, chosen.rounds)
    print_table(rows)
    if left_out:
        print(f"left out, not installed: {', '.join(left_out)}")
    if chosen.json:
        packages = ("numpy", "pillow", "litdata", "webdataset")
        numbers = {
            **{name: importlib.metadata.version(name) for name in packages if installed(name)},
            "threads": 1,
            "images": chosen.images,
            "size": chosen.size,
            "batch": BATCH,
            "rounds": chosen.rounds,
            "ways": rows,
        }
        write(chosen.json, numbers)


if __name__ == "__main__":
    main()
