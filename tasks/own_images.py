"""Own images: which posterior names the class of your own pictures best?

Question: of several posteriors over one network, which predicts the classes of a user's held-out images best,
and which knows its own error?

Protocol: a folder that holds a folder per class, as torchvision's ImageFolder reads it. Of every class 20% of
the images are held out, at random. Images are in colour, their shorter side scaled to `size` pixels and the
middle square cut out, turned as their EXIF data say; what cannot be made 8-bit RGB exactly is refused by
name; channels are standardised by the training images. One fit per run, without
augmentation, of three convolutions with 16, 32 and 64 maps and prior N(0, 1), or of a network of one's own;
where all of it but the last layer is frozen (`--task.freeze`), the fit is to its features, computed once.
`--seed` moves the fit, `--task.split` the held-out images: runs of several seeds share them, so that `bench
compare` pairs them.

Source: the user's images.

What would mislead: pictures of one object, scene or film on both sides of the split; near copies; accuracy
alone, where one class is common; settings of methods that nobody tuned for the images.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import likelihoods, metrics, networks, own_network, priors
from bench.contract import (
    Arrays,
    Budget,
    Engine,
    Method,
    Metric,
    Metrics,
    NetworkFactory,
    Problem,
    Row,
    Spec,
    Stored,
    Task,
)
from bench.data import array_digest
from bench.errors import UsageError
from bench.settings import Code, Count, Whole, settings
from bench.studies import exporting, frozen, own, predictive, trying
from bench.system import keeping
from bench.text import one_line

NAMES: dict[str, dict[str, object]] = {"own_images": {}}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"epochs": 2, "test_samples": 4}}


@settings
class Settings:
    """Settings of images of one's own."""

    folder: str | None = None
    """Holds a folder of images per class; must be given."""
    size: Annotated[int, Field(ge=4)] = 32
    """Height and width of the square that the network sees, in pixels, at least 4."""
    split: Whole = 0
    """Seed of the random images that are held out, 0 or more; --seed does not move them."""
    channels: Count = 16
    """Maps of the first convolution, at least 1; the others have twice and four times as many."""
    network: Code | None = None
    """Your own: package.module:factory, called with the shape of an input and the number of outputs."""
    freeze: bool = False
    """Of your own network: train only its last layer with weights; the rest is no part of the posterior."""
    epochs: Count = 40
    """Epochs, at least 1."""
    batch_size: Count | None = 32
    """Examples per training step, at least 1; null is full batch."""
    test_samples: Count = 20
    """Weight samples S per prediction, at least 1."""


class Encoder(pydantic.BaseModel):
    """What was learned from the training images, and how pictures become inputs.

    Attributes:
        rows: Training images.
        size: Height and width of an input.
        mean: Of each channel over the training images, on the scale from 0 to 1.
        std: Their standard deviation; 1 of a channel that never changes.
        classes: Names of the folders, in the order of the outputs.
        features: What the frozen part of the network says of a known input (`bench.studies.frozen`), if the
            fit was to its features; else None.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    rows: Annotated[int, Field(ge=1)]
    size: Annotated[int, Field(ge=4)]
    mean: list[float] = Field(min_length=3, max_length=3)
    std: list[Annotated[float, Field(gt=0)]] = Field(min_length=3, max_length=3)
    classes: list[str] = Field(min_length=2)
    features: list[float] | None = None

    def encode(self, images: Tensor) -> Tensor:
        """Inputs `[B, 3, H, W]` from uint8 images of that shape."""
        mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (self.mean, self.std))
        return (images.float() / 255 - mean) / std


class Images(Stored):
    """Images in memory as uint8 `[N, 3, H, W]`, standardised where they are used, and classes `[N]`."""

    def __init__(self, images: Tensor, labels: Tensor, encoder: Encoder) -> None:
        self.images, self.labels, self.encoder = images, labels, encoder

    def __len__(self) -> int:
        return len(self.images)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and classes of these rows."""
        return self.images[rows], self.labels[rows]

    def finish(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Standardised channels."""
        return self.encoder.encode(inputs)


def picture(path: Path, size: int) -> np.ndarray:
    """The middle square of a picture in colour, `[size, size, 3]`, uint8; turned as its EXIF data say.

    Raises:
        UsageError: If it cannot be read as one, or not be converted exactly (`bench.photographs.decoding`).
    """
    from PIL import Image, ImageOps

    from bench.photographs import decoding

    try:
        whole = decoding.decoded(path)
    except (OSError, decoding.Unusable) as error:
        raise UsageError(f"{path}: cannot be read as an image: {one_line(error)}") from None
    return np.array(ImageOps.fit(whole, (size, size), Image.Resampling.BILINEAR))


def pictures(paths: Sequence[Path], size: int) -> np.ndarray:
    """The middle squares of pictures in colour, `[N, size, size, 3]`, uint8.

    Raises:
        UsageError: If some cannot be used; one line that names the first three, with their reasons.
    """
    found, refused = [], []
    for path in paths:
        try:
            found.append(picture(path, size))
        except UsageError as error:
            refused.append(str(error))
    if refused:
        more = f"; and {len(refused) - 3} more of {len(paths)}" if len(refused) > 3 else ""
        raise UsageError("; ".join(refused[:3]) + more)
    return np.stack(found)


_PARTS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})


def _must_be_classes(folder: Path, names: Sequence[str]) -> None:
    """Refuses folders that ImageFolder takes for classes, and that are none.

    Raises:
        UsageError: One line that names them.
    """
    if {name.lower() for name in names} <= _PARTS:
        raise UsageError(
            f"--task.folder {folder}: {' and '.join(sorted(names))} are parts of a split, and would be taken "
            "for classes: put a folder of each class in it, with the pictures of all parts"
        )
    if hidden := [name for name in names if name.startswith(".") or name == "__MACOSX"]:
        raise UsageError(
            f"--task.folder {folder}: {one_line(hidden[0])} holds pictures and would be taken for a class: "
            "take it out"
        )


class OwnImages(Task):
    """Held-out images of a user's folder."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="Which posterior names the class of one's own images best?",
            source="the user's images",
            version=2,
            metrics={"nll": Metric("mean of -log p(label)", "nats", 0, np.inf), **own.OF_CLASSES},
            main_metric="nll",
            ranked=False,
            own_data=True,
        )

    # ---- data

    @cached_property
    def files(self) -> tuple[list[str], list[Path], np.ndarray]:
        """Classes, paths of all images and the class of each `[N]`, in the order of ImageFolder."""
        from torchvision import datasets  # here, for its import takes seconds

        if self.settings.folder is None:
            raise UsageError("own_images needs images: --task.folder FOLDER, with a folder per class in it")
        folder = Path(self.settings.folder)
        try:
            found = datasets.ImageFolder(str(folder))
        except (OSError, ValueError) as error:
            raise UsageError(f"--task.folder {folder}: {one_line(error)}") from None
        _must_be_classes(folder, found.classes)
        labels = np.array(found.targets)
        counts = np.bincount(labels)
        if len(counts) < 2:
            raise UsageError(f"--task.folder {folder}: holds images of one class: there is nothing to learn")
        if len(labels) < own.FEWEST:
            raise UsageError(
                f"--task.folder {folder}: {len(labels)} images are too few to learn and to test: at least "
                f"{own.FEWEST} are needed"
            )
        if (counts < 2).any():
            alone = one_line(found.classes[int(np.argmin(counts))])
            raise UsageError(
                f"--task.folder {folder}: the class {alone} has only one image, which cannot be both learned "
                "and tested"
            )
        return found.classes, [Path(path) for path, _ in found.samples], labels

    @cached_property
    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Images `[N, 3, H, W]`, uint8, and classes `[N]` of train and test."""
        _, paths, labels = self.files
        images = torch.from_numpy(pictures(paths, self.settings.size))
        images = images.permute(0, 3, 1, 2).contiguous()
        is_test = torch.from_numpy(own.at_random(labels, self.settings.split))
        of_row = torch.from_numpy(labels)
        return {"train": (images[~is_test], of_row[~is_test]), "test": (images[is_test], of_row[is_test])}

    @cached_property
    def encoder(self) -> Encoder:
        """What the training images teach."""
        images = self.parts["train"][0].double() / 255
        std = images.std((0, 2, 3), correction=0)
        return Encoder(
            rows=len(images),
            size=self.settings.size,
            mean=images.mean((0, 2, 3)).tolist(),
            std=torch.where(std > 0, std, 1.0).tolist(),
            classes=self.files[0],
        )

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """Images `[N, 3, H, W]`, uint8, and classes `[N]` of the part train or test."""
        return self.parts[part]

    def data_digest(self) -> str:
        """Of all images as they are cut, and of the names of classes; of one's own network its file too."""
        parts = {part: self.own_data(part) for part in ("train", "test")}
        arrays = {f"{part}{i}": array for part, found in parts.items() for i, array in enumerate(found)}
        names = np.frombuffer(json.dumps(self.encoder.classes).encode(), np.uint8)
        return array_digest(arrays | {"classes": names} | self._own_network[0])

    @cached_property
    def _own_network(self) -> tuple[Arrays, list[str]]:
        """What decides which network one's own is, and sentences on it; it is tried out."""
        name = self.settings.network
        if name is None and self.settings.freeze:
            raise UsageError("--task.freeze true: is of a network of your own: --task.network")
        if name is None:
            return {}, []
        inputs = self.encoder.encode(self.own_data("train")[0][:8])
        return trying.network(self._network(self.encoder), name, inputs, len(self.encoder.classes))

    # ---- the frozen part of a network

    @cached_property
    def frozen_part(self) -> frozen.Part | str:
        """The frozen part of the network, to whose features the fit is; or why it is to the images."""
        if not self.settings.freeze:
            return "nothing is frozen"
        inputs = self.encoder.encode(self.own_data("train")[0][:8])
        return frozen.cut(self._network(self.encoder), inputs)

    @cached_property
    def _known(self) -> dict[str, Tensor]:
        """Features of parts of the data that this task has asked for."""
        return {}

    def _inputs(self, name: str, told: Callable[[int], None] = lambda tenths: None) -> Tensor | Images:
        """What the fit sees of train or test: the images, or their features `[N, P]`.

        Args:
            name: Of the part of the data.
            told: Called with the tenths of the features that are done, if they have to be computed.
        """
        (images, _), part, encoder = self.own_data(name), self.frozen_part, self.encoder
        if isinstance(part, str):
            return Images(images, torch.zeros(len(images), dtype=torch.long), encoder)

        def batches() -> Iterator[Tensor]:
            done = -1
            for start in range(0, len(images), frozen.BATCH):
                if (tenths := 10 * start // len(images)) > done:
                    told(done := tenths)
                yield encoder.encode(images[start : start + frozen.BATCH])

        if name not in self._known:
            moments = np.array([encoder.mean, encoder.std])
            key = part.digest({"images": images.numpy(), "moments": moments, **self._own_network[0]})
            shape = len(images), len(part.witness)
            found = keeping.kept("features", key, shape, lambda: part(batches()).numpy())
            self._known[name] = torch.from_numpy(found)
        return self._known[name]

    # ---- protocol

    def _network(self, encoder: Encoder) -> NetworkFactory:
        """Makes the network of images."""
        given, outputs = self.settings, len(encoder.classes)
        if given.network is None:
            return partial(networks.small_cnn, 3, outputs, given.channels)
        shape = (3, encoder.size, encoder.size)
        return partial(own_network.network, given.network, shape, outputs, given.freeze)

    def problem(self) -> Problem:
        """The training images, or their features."""
        images, labels = self.own_data("train")
        inputs = self._inputs("train")
        whole = Images(images, labels, self.encoder)
        return self._posed(
            whole if isinstance(inputs, Images) else TensorDataset(inputs, labels), self.encoder
        )

    def _posed(self, train: TensorDataset | Images, encoder: Encoder) -> Problem:
        network = self._network(encoder)
        if isinstance(train, TensorDataset):
            network = partial(frozen.head, network)
        return Problem(network, likelihoods.Categorical(), priors.normal(0, 1), train, None, encoder.rows)

    def loaded(self, directory: Path, restore: Callable[[Problem], Method]) -> Any:
        """What predicts new images; needs the run alone, and not the folder.

        Raises:
            UsageError: If the frozen part of the network is another one now; and as `bench.load`.
        """
        encoder = own.read_encoder(directory, Encoder)
        black = torch.zeros(1, 3, encoder.size, encoder.size, dtype=torch.uint8)
        nothing = torch.zeros(1, dtype=torch.long)
        if encoder.features is None:
            return Predictor(restore(self._posed(Images(black, nothing, encoder), encoder)), encoder)
        part = frozen.cut(self._network(encoder), encoder.encode(black.expand(2, -1, -1, -1)))
        if isinstance(part, str) or not part.is_that_of(encoder.features):
            raise UsageError(
                f"{directory}: the frozen part of the network '{self.settings.network}' computes other "
                "features than the run was fitted to: bring back the files that it is made of"
            )
        train = TensorDataset(torch.zeros(1, len(encoder.features)), nothing)
        return Predictor(restore(self._posed(train, encoder)), encoder, part)

    def run(self, engine: Engine) -> Arrays:
        """Predictions on the held-out images."""

        def told(tenths: int) -> None:
            engine.stage("features of the frozen part", 1 + tenths, 11)

        self._inputs("train", told)
        held_out = self._inputs("test", told)
        problem = self.problem()
        engine.stage("fit")
        method = engine.fit(problem, Budget(self.settings.epochs, self.settings.batch_size))
        prediction = engine.predict(method, held_out, self.settings.test_samples)
        return {"log_probs": metrics.store(prediction.average())}

    def targets(self) -> Arrays:
        """Classes `[N]` of the held-out images."""
        return {"labels": self.own_data("test")[1].numpy()}

    def notes(self) -> Mapping[str, str]:
        """The encoder, and how the images were used."""
        given, encoder = self.settings, self.encoder
        counts = {part: np.bincount(self.own_data(part)[1].numpy()) for part in ("train", "test")}
        classes = ", ".join(
            f"{one_line(name)} ({train} + {test})"
            for name, train, test in list(zip(encoder.classes, counts["train"], counts["test"], strict=True))[
                :20
            ]
        )
        said = [
            f"{given.folder}: {encoder.rows} images trained on, {counts['test'].sum()} held out "
            f"(--task.split {given.split}), the middle square of each scaled to {given.size} x {given.size}",
            f"{len(encoder.classes)} classes, trained on + held out: {classes}",
            *self._own_network[1],
            *self._way(),
            *own.copies(self.own_data("train")[0], self.own_data("test")[0], "images"),
            *self._of_two_classes(),
            *self._left_out(),
            "next: run further methods and seeds (bench sweep), then bench compare their folder; "
            'bench.load("this directory").predict(["new.jpg"]) predicts new images',
        ]
        kept = encoder.model_dump()
        if isinstance(self.frozen_part, frozen.Part):
            kept["features"] = self.frozen_part.witness
        content = json.dumps(kept, indent=1)
        return {own.ENCODER: content + "\n", "notes.txt": "\n".join(said) + "\n"}

    def _way(self) -> list[str]:
        """A sentence on how often the frozen part of the network is computed, if one is wished."""
        if not self.settings.freeze:
            return []
        if isinstance(self.frozen_part, str):
            return [f"the frozen part is computed in every epoch, for {self.frozen_part}"]
        return [
            f"the frozen part is computed once for each image: {len(self.frozen_part.witness)} features, kept"
        ]

    def _of_two_classes(self) -> list[str]:
        """A sentence on pictures that stand in more than one class, pixel by pixel, if any."""
        classes: dict[bytes, set[int]] = {}
        for part in ("train", "test"):
            for image, label in zip(*self.own_data(part), strict=True):
                classes.setdefault(image.numpy().tobytes(), set()).add(int(label))
        twice = sum(len(labels) > 1 for labels in classes.values())
        said = f"warning: {twice} images stand in more than one class: all but one of their labels are wrong"
        return [said] if twice else []

    def _left_out(self) -> list[str]:
        """A sentence on the files of the folder that are not read, by the endings of their names, if any."""
        read = {str(path) for path in self.files[1]}
        every = [path for path in Path(self.settings.folder or "").rglob("*") if path.is_file()]
        endings = Counter(path.suffix.lower() or "none" for path in every if str(path) not in read)
        if not endings:
            return []
        some = ", ".join(f"{one_line(ending)} {count}" for ending, count in endings.most_common(5))
        return [f"{endings.total()} files are not read, for how their names end or where they lie: {some}"]

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """NLL, accuracy and calibration."""
        return {"nll": float(own.losses(arrays).mean()), **own.of_classes(arrays)}

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p of each held-out class, in nats, `[N]`."""
        return own.losses(arrays)

    def curves(self, arrays: Arrays) -> list[Row]:
        """Accuracy by confidence, and risk by the share of images that are kept."""
        return own.curves(arrays)

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """The curves, each drawn."""
        return own.figures_of(arrays)


class Predictor:
    """A fitted posterior with the encoder of its training images: predicts new ones by the names of classes.

    Attributes:
        method: The fitted method.
        encoder: What was learned from the training images.
        part: Computes the features to which the method was fitted; None if it was to images.
    """

    def __init__(self, method: Method, encoder: Encoder, part: frozen.Part | None = None) -> None:
        self.method, self.encoder, self.part = method, encoder, part

    def predict(
        self,
        images: Iterable[str | Path],
        num_samples: int = 50,
        seed: int = 0,
        abstain: float | None = None,
    ) -> list[dict[str, Any]]:
        """Of image files, in their order, `class`, the most probable one, and `probabilities` by class.

        Args:
            images: Paths, at least one.
            num_samples: Weight samples S that are averaged, at least 1.
            seed: Of the samples.
            abstain: The share of these images, from 0 to below 1 and rounded down, that is left to somebody
                else, as `abstained` says: those of least probability of the class that is told.

        Raises:
            UsageError: If a file is no image that can be used; one line that names it.
        """
        paths = [Path(path) for path in images]
        if not paths:
            raise UsageError("there are no images")
        squares = torch.from_numpy(pictures(paths, self.encoder.size))
        squares = squares.permute(0, 3, 1, 2)
        if self.part is None:
            inputs = self.encoder.encode(squares)
        else:
            inputs = self.part(self.encoder.encode(batch) for batch in squares.split(frozen.BATCH))
        found = predictive.predicted(self.method, inputs, num_samples, seed, self.encoder)
        assert isinstance(found, predictive.Classes)
        return own.told(found, abstain)

    def export(self, path: str | Path, level: float = 0.9) -> None:
        """Writes the predictor as ONNX: `predict` under its 50 draws, which are constants of the file.

        It takes pictures `[B, 3, size, size]` in uint8: middle squares, as `picture` cuts and scales them.

        Args:
            path: Of the file.
            level: Of intervals, which classes have none of.

        Raises:
            UsageError: If packages are missing, or it cannot be written so; one line.
            OutputError: If the file cannot be written.
        """
        encoder, part = self.encoder, self.part
        levels = torch.arange(3 * 3 * encoder.size**2) * 7919 % 256
        probe = levels.to(torch.uint8).view(3, 3, encoder.size, encoder.size)
        before = exporting.Pictures(encoder.encode, (lambda x: x) if part is None else (lambda x: part([x])))
        words = {"inputs": json.dumps(["red", "green", "blue"]), "classes": json.dumps(encoder.classes)}
        exporting.write(exporting.Told(self.method, encoder, 50, level, before, probe, words), Path(path))
