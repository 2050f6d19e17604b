"""The encoder of texts: its tokens by hand, its layers against torch's own, and columns of texts."""

import csv
import json
import shutil

import numpy as np
import pandas
import pytest
import safetensors.torch
import torch
from given import PENGUINS
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bench
from bench import bert
from bench.errors import UsageError
from bench.system import places
from bench.tasks.own_table import OwnTable, Settings

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = "good|bad|play|##ing|##s|un|##play|##able|e|##a|the|movie|,|!|'|你|好|1|##0"
VOCABULARY = [*SPECIAL, *WORDS.split("|")]
WIDTH, WIDE, HEADS, LAYERS, LONGEST = 8, 16, 2, 2, 12
CONFIG = {
    "model_type": "bert",
    "hidden_size": WIDTH,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": LONGEST,
    "type_vocab_size": 2,
    "vocab_size": len(VOCABULARY),
    "layer_norm_eps": 1e-3,
}


def weights(seed=0):
    """Of a BERT as small as can be, all of them random."""
    made = {
        f"embeddings.{name}_embeddings.weight": (number, WIDTH)
        for name, number in {"word": len(VOCABULARY), "position": LONGEST, "token_type": 2}.items()
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            made |= {f"{at}.attention.{name}.weight": (WIDTH, WIDTH), f"{at}.attention.{name}.bias": (WIDTH,)}
        made |= {f"{at}.intermediate.dense.weight": (WIDE, WIDTH), f"{at}.intermediate.dense.bias": (WIDE,)}
        made |= {f"{at}.output.dense.weight": (WIDTH, WIDE), f"{at}.output.dense.bias": (WIDTH,)}
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    made |= {f"{norm}.{kind}": (WIDTH,) for norm in norms for kind in ("weight", "bias")}
    draw = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=draw) for name, shape in made.items()}
    return {
        name: 1 + 0.1 * value if name.endswith("LayerNorm.weight") else 0.5 * value
        for name, value in drawn.items()
    }


def write_bert(folder, seed=0, drop=(), prefix="", **config):
    """Writes the folder of an encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    kept = {prefix + name: value for name, value in weights(seed).items() if name not in drop}
    safetensors.torch.save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    return tmp_path / "cache" / "texts"


@pytest.fixture
def folder(tmp_path):
    return write_bert(tmp_path / "encoder")


# ---- tokens


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("good", "good"),
        ("  The MOVIE,\tgood!\n", "the movie , good !"),
        ("plays playing unplayable", "play ##s play ##ing un ##play ##able"),
        ("éa ÉA e\u0301a", "e ##a e ##a e ##a"),
        ("你好good", "你 好 good"),
        ("goodx bad", "[UNK] bad"),
        ("go\u200bod ba\x00d", "good bad"),
        ("good\u00a0bad'10", "good bad ' 1 ##0"),
        ("[SEP]", "[UNK] [UNK] [UNK]"),
        ("e" + 100 * "a", "[UNK]"),
        ("e" + 8 * "a", "e ##a ##a ##a ##a ##a ##a ##a ##a"),
        ("", ""),
        ("good " * 50, "good " * (LONGEST - 2)),
    ],
)
def test_tokens_are_those_by_hand(text, pieces, folder):
    """A special token that is written in a text is none, and a text that is too long is cut off."""
    expected = [VOCABULARY.index(piece) for piece in ["[CLS]", *pieces.split(), "[SEP]"]]
    assert bert.opened(folder).tokens(text) == expected


def test_a_vocabulary_with_capitals_keeps_them(folder):
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert bert.opened(folder).tokens("Good good")[1:-1] == [VOCABULARY.index("[UNK]"), 4]


@given(st.text(max_size=40))
def test_words_hold_the_letters_of_a_text_and_no_blank(text):
    """Joined they are the text without blanks and control characters; parted again they stay."""
    found = list(bert.words(text, lower=False))
    assert "".join(found) == "".join("".join(map(bert._cleaned, text)).split())
    assert all(word and not any(map(str.isspace, word)) for word in found)
    plain = " ".join(bert.words(text, lower=True))
    assert list(bert.words(plain, lower=True)) == plain.split()


# ---- layers


def by_torch(tokens):
    """The last layer `[T, H]` by torch's own transformer, in float64."""
    given = {name: value.double() for name, value in weights().items()}
    embedded = sum(
        given[f"embeddings.{name}_embeddings.weight"][rows]
        for name, rows in {"word": tokens, "position": range(len(tokens)), "token_type": 0}.items()
    )
    eps = CONFIG["layer_norm_eps"]
    norm = [given[f"embeddings.LayerNorm.{kind}"] for kind in ("weight", "bias")]
    hidden = nn.functional.layer_norm(embedded, (WIDTH,), *norm, eps)[None]
    for i in range(LAYERS):
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, WIDE, 0.0, "gelu", eps, batch_first=True, dtype=torch.float64
        ).eval()
        at, state = f"encoder.layer.{i}", {}
        for kind in ("weight", "bias"):
            three = [given[f"{at}.attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            state[f"self_attn.in_proj_{kind}"] = torch.cat(three)
            for name, theirs in {
                "self_attn.out_proj": "attention.output.dense",
                "linear1": "intermediate.dense",
                "linear2": "output.dense",
                "norm1": "attention.output.LayerNorm",
                "norm2": "output.LayerNorm",
            }.items():
                state[f"{name}.{kind}"] = given[f"{at}.{theirs}.{kind}"]
        layer.load_state_dict(state)
        hidden = layer(hidden)
    return hidden[0]


TEXTS = ["good", "bad movie", "playing the movie, unplayable!", "", "x", "the the the the the the the"]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_torchs_own_layers(pooling, folder):
    """In float64, the mean over tokens or the first; negative control: without positions they are others."""
    (folder / "1_Pooling").mkdir()
    mode = {"pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_cls_token": pooling == "cls"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    encoder = bert.opened(folder)
    for text, vector in zip(TEXTS, encoder.vectors(TEXTS), strict=True):
        hidden = by_torch(encoder.tokens(text)).detach()
        pooled = hidden.mean(0) if pooling == "mean" else hidden[0]
        np.testing.assert_allclose(vector, pooled / pooled.norm(), atol=2e-6)
    before = encoder.vectors(TEXTS)
    encoder._weights["embeddings.position_embeddings.weight"].zero_()
    assert np.abs(encoder.vectors(TEXTS) - before).max() > 0.01
    bert._opened.cache_clear()


def test_a_vector_is_of_its_text_alone(folder, monkeypatch):
    """Whatever stands beside it, in whatever order and batches."""
    monkeypatch.setattr(bert, "_TOKENS_AT_A_TIME", 7)
    encoder = bert.opened(folder)
    texts = [f"{a} {b}" for a in ("good", "bad", "the movie", "e") for b in VOCABULARY[4:]]
    together = encoder.vectors(texts)
    alone = np.concatenate([encoder.vectors([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_array_equal(encoder.vectors(texts[::-1] + texts)[: len(texts)], together[::-1])
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_names_with_a_prefix_and_half_precision_are_read(folder, tmp_path):
    other = write_bert(tmp_path / "other", prefix="bert.")
    np.testing.assert_array_equal(bert.opened(other).vectors(TEXTS), bert.opened(folder).vectors(TEXTS))
    half = {name: value.half() for name, value in weights().items()}
    safetensors.torch.save_file(half, other / "model.safetensors")
    np.testing.assert_allclose(
        bert.opened(other).vectors(TEXTS), bert.opened(folder).vectors(TEXTS), atol=0.02
    )


def test_vectors_of_many_texts_are_kept_by_the_digest_of_encoder_and_texts(
    folder, cache, tmp_path, monkeypatch
):
    texts = [f"good {'bad ' * i}{j}" for i in range(4) for j in range(10)]
    first = bert.opened(folder).vectors(texts)
    (kept,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(bert.Encoder, "_computed", lambda *_: pytest.fail("computed again"))
        np.testing.assert_array_equal(bert.opened(folder).vectors(texts[::-1]), first[::-1])
    kept.write_bytes(kept.read_bytes()[:99])
    np.testing.assert_array_equal(bert.opened(folder).vectors(texts), first)
    another = bert.opened(write_bert(tmp_path / "another", seed=1)).vectors(texts)
    assert np.abs(another - first).max() > 0.1
    bert.opened(folder).vectors(texts[:5])
    assert len(list(cache.iterdir())) == 2


REFUSED = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors cannot be read: No such"),
    "no folder": (
        shutil.rmtree,
        "config.json cannot be read: No such file or directory: the folder",
    ),
    "another model": (lambda f: write_bert(f, model_type="roberta"), "has model_type roberta: only bert"),
    "another step": (lambda f: write_bert(f, hidden_act="relu"), "has hidden_act relu: only gelu is read"),
    "relative": (
        lambda f: write_bert(f, position_embedding_type="relative_key"),
        "position_embedding_type relative_key: only absolute",
    ),
    "heads": (lambda f: write_bert(f, num_attention_heads=3), "num_attention_heads does not divide"),
    "no number": (lambda f: write_bert(f, hidden_size="8"), "must have hidden_size, a whole number"),
    "a shape": (lambda f: write_bert(f, hidden_size=4), r"of shape \[\d+, 4\], and has \[\d+, 8\]"),
    "a layer less": (lambda f: write_bert(f, num_hidden_layers=3), "must have encoder.layer.2.* has nothing"),
    "no tensors": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "safetensors cannot be read"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "holds something else than is expected"),
    "no words": (lambda f: (f / "vocab.txt").write_text("good\n"), r"vocab.txt has no \[UNK\]"),
    "words": (
        lambda f: (f / "vocab.txt").write_text("\n".join([*VOCABULARY, "b"])),
        "more words than the weights know",
    ),
    "a module": (
        lambda f: (f / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]'),
        "modules.json has a module Dense, which is not read",
    ),
    "a limit": (
        lambda f: (f / "sentence_bert_config.json").write_text('{"max_seq_length": "2"}'),
        "sentence_bert_config.json must have max_seq_length",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_otherwise_is_refused_in_one_line(case, folder):
    break_it, said = REFUSED[case]
    break_it(folder)
    with pytest.raises(UsageError, match=said) as caught:
        bert.opened(folder)
    assert "\n" not in str(caught.value)


def test_the_largest_pooling_is_refused(folder):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(UsageError, match="pools neither by the mean nor by the first token"):
        bert.opened(folder)


# ---- a column of a table

LAST_LAYERS = ("map", "laplace_last_layer", "vbll", "sngp")


def reviews(path, rows=60):
    """Texts whose class is whether they are good, one of them missing, beside a number."""
    draw = np.random.default_rng(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["note", "stars", "kind"])
        for i in range(rows):
            words = draw.permutation(
                [*[["bad", "good"][i % 2]] * 4, *draw.choice(["the", "movie", ",", "e"], 2)]
            )
            lines.writerow([" ".join(words) if i != 7 else "", i // 7, ["no", "yes"][i % 2]])
    return path


def settings(path, folder, **further):
    given = {"file": str(path), "target": "kind", "text": "note", "text_encoder": str(folder), "epochs": 60}
    return given | further


@pytest.mark.parametrize("method", LAST_LAYERS)
def test_last_layers_learn_from_texts_and_a_loaded_run_reads_new_ones(method, folder, tmp_path):
    given = settings(reviews(tmp_path / "t.csv"), folder, batch_size=8, epochs=20)
    quick = {"learning_rate": 0.02}
    run = bench.run(method, "own_table", task_settings=given, method_settings=quick, out=tmp_path / "runs")
    assert run.record.metrics["accuracy"] >= 0.9
    said = (run.directory / "notes.txt").read_text()
    assert "texts, as vectors of an encoder: note (8 inputs, 1 missing)" in said
    predictor = bench.load(run.directory)
    found = predictor.predict([{"note": "good, good", "stars": 3}, {"note": "bad bad bad!", "stars": 3}])
    assert [row["class"] for row in found] == ["yes", "no"]
    rows = [{"note": None, "stars": 3}, {"note": "good", "stars": 3}]
    proba = predictor.estimator().predict_proba(pandas.DataFrame(rows))
    told = [list(row["probabilities"].values()) for row in predictor.predict(rows)]
    np.testing.assert_array_equal(proba, told)


def test_inputs_are_the_vectors_standardised_by_the_training_rows(folder, tmp_path):
    """A missing text is their mean. Negative control: all rows have another mean."""
    task = OwnTable(Settings(**settings(reviews(tmp_path / "t.csv"), folder)))
    texts, rows = np.array(task.columns["note"].values, object), task.rows
    present = np.array([text is not None for text in texts])
    vectors = bert.opened(folder).vectors([text or "" for text in texts]).astype(float)
    of_training = vectors[rows["train"]][present[rows["train"]]]
    expected = (vectors - of_training.mean(0)) / of_training.std(0)
    expected[~present] = 0
    for part in ("train", "test"):
        found = task.own_data(part)[0].numpy()
        np.testing.assert_allclose(found[:, :WIDTH], expected[rows[part]], atol=1e-4)
    assert not present.all()
    assert np.abs(vectors[present].mean(0) - of_training.mean(0)).max() > 1e-3


def test_the_digest_of_the_data_knows_the_encoder_and_not_its_place(folder, tmp_path):
    path = reviews(tmp_path / "t.csv")

    def digest(where):
        return OwnTable(Settings(**settings(path, where))).data_digest()

    first = digest(folder)
    assert digest(shutil.copytree(folder, tmp_path / "copy")) == first
    write_bert(tmp_path / "copy", seed=1)
    assert digest(tmp_path / "copy") != first
    path.write_text(path.read_text(encoding="utf-8").replace("movie", "the movie", 1), encoding="utf-8")
    assert digest(folder) != first
    moved = OwnTable(Settings(**settings(path, folder))).encoder
    assert str(tmp_path) in moved.model_dump_json()
    assert str(tmp_path) not in moved.content
    plain = OwnTable(Settings(file=str(PENGUINS), target="species")).encoder
    assert plain.content == plain.model_dump_json()


def test_another_encoder_in_the_place_of_a_runs_is_refused(folder, tmp_path):
    given = settings(reviews(tmp_path / "t.csv"), folder, epochs=1)
    predictor = bench.load(
        bench.run("map", "own_table", task_settings=given, out=tmp_path / "runs").directory
    )
    write_bert(folder, seed=1)
    with pytest.raises(
        UsageError, match="holds another than the one with which the column 'note' was"
    ) as caught:
        predictor.predict([{"note": "good", "stars": 1}])
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match=r"encoder/config\.json cannot be read"):
        predictor.predict([{"note": "good", "stars": 1}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("further", "said"),
    [
        ({"text_encoder": None}, "--task.text note: needs what reads it: --task.text_encoder FOLDER"),
        ({"text": None}, "--task.text_encoder: reads columns that --task.text names, and none is named"),
        ({"text": "notes"}, "--task.text notes: .* has no such column; it has note, stars, kind"),
        ({"categorical": "note"}, "--task.categorical and --task.text name one column, note"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(further, said, folder, tmp_path):
    given = settings(reviews(tmp_path / "t.csv"), folder) | further
    with pytest.raises(UsageError, match=said):
        OwnTable(Settings(**given)).data_digest()
