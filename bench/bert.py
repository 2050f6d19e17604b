"""Texts as vectors, by a sentence encoder in a local folder: WordPiece, BERT, and a mean over tokens.

The folder is one that sentence-transformers writes of a BERT: `config.json`, `vocab.txt`,
`model.safetensors`, and, where they are there, `tokenizer_config.json`, `modules.json`,
`sentence_bert_config.json` and `1_Pooling/config.json`. Only these are read; nothing is fetched, and no code
of the folder is run.

Source: Devlin et al. 2019, "BERT"; Reimers and Gurevych 2019, "Sentence-BERT". Words that stand for special
tokens, such as [SEP], are words here, since a text is a user's and says nothing to the model.

Shapes: N texts, B texts of T tokens each, H numbers a vector, L tokens of a text at most.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from bench.errors import UsageError
from bench.system import keeping
from bench.text import one_line

WEIGHTS = "model.safetensors"
FILES = ("config.json", "vocab.txt", WEIGHTS)
FURTHER = ("tokenizer_config.json", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json")
LONGEST_WORD = 100
"""Characters; a longer word is unknown, as to BERT's own tokeniser."""
_TOKENS_AT_A_TIME = 2**13
_WORTH_KEEPING = 20
"""Texts from which on their vectors are kept on disk."""


class Layers(NamedTuple):
    """The last layers of an encoder: their weights and biases by name, heads, and what a variance gets."""

    weights: Sequence[Mapping[str, Tensor]]
    heads: int
    epsilon: float


@lru_cache(maxsize=2)
def _opened(folder: str, _changed: tuple[int, ...]) -> Encoder:
    return Encoder(Path(folder))


def opened(folder: str | Path) -> Encoder:
    """The encoder of a folder, read once in a process unless a file of it changes.

    Raises:
        UsageError: If the folder holds none that can be used; one line.
    """
    paths = [Path(folder) / name for name in (*FILES, *FURTHER)]
    return _opened(str(folder), tuple(p.stat().st_mtime_ns if p.is_file() else 0 for p in paths))


class Encoder:
    """What turns texts into vectors.

    Args:
        folder: Where it lies.

    Attributes:
        width: Numbers of a vector, H.
        digest: SHA-256 of all that decides a vector.

    Raises:
        UsageError: If a file is missing or says something else than is computed here; one line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        content = {name: self._read(name) for name in FILES}
        content |= {name: self._read(name) for name in FURTHER if (folder / name).is_file()}
        sha = hashlib.sha256()
        for name, found in content.items():
            sha.update(f"{name} {len(found)}\n".encode() + found)
        self.digest = sha.hexdigest()
        told = {name: self._json(name, content[name]) for name in content if name.endswith(".json")}
        config = told["config.json"]
        self.width = self._number(config, "hidden_size")
        self._layers = self._number(config, "num_hidden_layers")
        self._heads = self._number(config, "num_attention_heads")
        self._epsilon = float(config.get("layer_norm_eps", 1e-12))
        self._lower = bool(told.get("tokenizer_config.json", {}).get("do_lower_case", True))
        limits = [(config, "max_position_embeddings")]
        if (further := told.get("sentence_bert_config.json", {})).get("max_seq_length") is not None:
            limits.append((further, "max_seq_length"))
        self._longest = min(self._number(where, key) for where, key in limits)
        pooling = told.get("1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
        self._refuse_others(config, pooling, told.get("modules.json", []))
        self._is_mean = bool(pooling.get("pooling_mode_mean_tokens"))
        words = content["vocab.txt"].decode("utf-8", "replace").split("\n")
        self._ids = {word.rstrip("\r"): number for number, word in enumerate(words)}
        for special in ("[UNK]", "[CLS]", "[SEP]"):
            if special not in self._ids:
                raise self._refusal("vocab.txt", f"has no {special}, as a vocabulary of WordPiece has")
        self._weights = self._checked(content[WEIGHTS], config)

    # ---- reading

    def _refusal(self, name: str, said: str) -> UsageError:
        return UsageError(f"encoder of texts: {self._folder / name} {said}")

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            wanted = "the folder of a BERT, as sentence-transformers writes it, is needed"
            raise self._refusal(name, f"cannot be read: {error.strerror or error}: {wanted}") from None

    def _json(self, name: str, content: bytes) -> Any:
        try:
            found = json.loads(content)
        except ValueError as error:
            raise self._refusal(name, f"is no JSON: {one_line(error)}") from None
        if not isinstance(found, list if name == "modules.json" else dict):
            raise self._refusal(name, "holds something else than is expected there")
        return found

    def _number(self, config: dict[str, Any], key: str) -> int:
        found = config.get(key)
        if not isinstance(found, int) or found < 1:
            name = "sentence_bert_config.json" if key == "max_seq_length" else "config.json"
            raise self._refusal(name, f"must have {key}, a whole number of at least 1")
        return found

    def _refuse_others(self, config: dict[str, Any], pooling: dict[str, Any], modules: list[Any]) -> None:
        """Refuses what would be computed otherwise than its authors did."""
        usual = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for key, value in usual.items():
            if config.get(key, value) != value:
                raise self._refusal("config.json", f"has {key} {one_line(config[key])}: only {value} is read")
        if self.width % self._heads:
            raise self._refusal("config.json", "has a hidden_size that num_attention_heads does not divide")
        modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
        if modes not in (["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
            raise self._refusal("1_Pooling/config.json", "pools neither by the mean nor by the first token")
        for module in modules:
            kind = str(module.get("type", "") if isinstance(module, dict) else module).rpartition(".")[2]
            if kind not in ("Transformer", "Pooling", "Normalize"):
                raise self._refusal("modules.json", f"has a module {one_line(kind)[:40]}, which is not read")

    def _checked(self, content: bytes, config: dict[str, Any]) -> dict[str, Tensor]:
        """The weights by name, each of the shape that the configuration says."""
        try:
            given = safetensors.torch.load(content)
        except safetensors.SafetensorError as error:
            raise self._refusal(WEIGHTS, f"cannot be read: {one_line(error)}") from None
        given = {name.removeprefix("bert."): value for name, value in given.items()}
        width, wide = self.width, self._number(config, "intermediate_size")
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (self._number(config, "vocab_size"), width),
            "embeddings.position_embeddings.weight": (self._number(config, "max_position_embeddings"), width),
            "embeddings.token_type_embeddings.weight": (self._number(config, "type_vocab_size"), width),
        }
        sizes = {f"attention.{name}": (width, width) for name in ("self.query", "self.key", "self.value")}
        sizes |= {"attention.output.dense": (width, width)}
        sizes |= {"intermediate.dense": (wide, width), "output.dense": (width, wide)}
        norms = ["embeddings.LayerNorm"]
        for layer in range(self._layers):
            at = f"encoder.layer.{layer}."
            shapes |= {f"{at}{name}.weight": size for name, size in sizes.items()}
            shapes |= {f"{at}{name}.bias": size[:1] for name, size in sizes.items()}
            norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
        shapes |= {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
        for name, shape in shapes.items():
            if name not in given or tuple(given[name].shape) != shape:
                got = list(given[name].shape) if name in given else "nothing"
                raise self._refusal(WEIGHTS, f"must have {name} of shape {list(shape)}, and has {got}")
        number = shapes["embeddings.word_embeddings.weight"][0]
        if max(place for word, place in self._ids.items() if word) >= number:
            raise self._refusal("vocab.txt", "has more words than the weights know")
        return {name: given[name].float() for name in shapes}

    # ---- tokens

    def tokens(self, text: str, most: int | None = None) -> list[int]:
        """Numbers of the tokens of a text, the first and last one's being those of [CLS] and [SEP].

        Args:
            text: Any.
            most: How many there may be, at least 2, where that is fewer than the encoder reads.
        """
        pieces = [piece for word in words(text, self._lower) for piece in self._pieces(word)]
        ends = self._ids["[CLS]"], self._ids["[SEP]"]
        return [ends[0], *pieces[: min(self._longest, most or self._longest) - 2], ends[1]]

    def _pieces(self, word: str) -> list[int]:
        """A word as the longest pieces that are known, from its start on; unknown where one is not."""
        found, start = [], 0
        while start < len(word) and len(word) <= LONGEST_WORD:
            mark = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if mark + word[start:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[mark + word[start:end]])
            start = end
        return found if start == len(word) else [self._ids["[UNK]"]]

    # ---- vectors

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors `[N, H]` of length 1, float32, each of its text alone.

        Those of many texts are kept on disk, in `texts` of the project's cache, by the digest of encoder and
        texts, so that a second run computes none.
        """
        different = sorted(set(texts))
        key = hashlib.sha256(json.dumps([self.digest, *different]).encode()).hexdigest()
        compute = partial(self._computed, different)
        many = len(different) >= _WORTH_KEEPING
        made = keeping.kept("texts", key, (len(different), self.width), compute) if many else compute()
        place = {text: number for number, text in enumerate(different)}
        return made[[place[text] for text in texts]]

    def _computed(self, texts: Sequence[str]) -> np.ndarray:
        """Of different texts."""
        made = np.empty((len(texts), self.width), np.float32)
        for rows, tokens in _of_one_length([self.tokens(text) for text in texts]):
            made[rows] = self._pooled(tokens).numpy()
        return made

    @torch.no_grad()
    def _pooled(self, tokens: Tensor) -> Tensor:
        """Vectors `[B, H]` of tokens `[B, T]`."""
        hidden = self._hidden(tokens, self._layers)
        return functional.normalize(hidden.mean(1) if self._is_mean else hidden[:, 0], dim=1)

    # ---- below and above a cut

    def states(self, texts: Sequence[str], upper: int, most: int) -> np.ndarray:
        """What the layers below the last `upper` say of the tokens of each text, `[N, L, H]`, float32.

        Rows of zeros follow the last token of a text: no token has one, since layers end in a layer norm.
        They are rounded to float16, and kept on disk as vectors are.

        Args:
            texts: N of them.
            upper: Layers that are not run.
            most: Tokens of a text that are read, L, at least 2.

        Raises:
            UsageError: If the encoder has fewer layers; one line.
        """
        below = self._below(upper)
        different = sorted(set(texts))
        key = hashlib.sha256(json.dumps([self.digest, below, most, *different]).encode()).hexdigest()
        tokens = [self.tokens(text, most) for text in different]
        ends = np.cumsum([0, *map(len, tokens)])

        def compute() -> np.ndarray:
            found = np.empty((ends[-1], self.width), np.float16)
            with torch.no_grad():
                for rows, some in _of_one_length(tokens):
                    for row, hidden in zip(rows, self._hidden(some, below), strict=True):
                        found[ends[row] : ends[row + 1]] = hidden.numpy()
            return found

        many, shape = len(different) >= _WORTH_KEEPING, (int(ends[-1]), self.width)
        kept = keeping.kept("texts", key, shape, compute, np.float16) if many else compute()
        place = {text: number for number, text in enumerate(different)}
        made = np.zeros((len(texts), most, self.width), np.float32)
        for row, text in enumerate(texts):
            first, end = ends[place[text] : place[text] + 2]
            made[row, : end - first] = kept[first:end]
        return made

    def upper(self, count: int) -> Layers:
        """The last layers, by what `states` says of which the rest of the encoder is computed.

        Raises:
            UsageError: If the encoder has fewer; one line.
        """
        names = [f"encoder.layer.{layer}." for layer in range(self._below(count), self._layers)]
        every = self._weights.items()
        found = [{n.removeprefix(at): w for n, w in every if n.startswith(at)} for at in names]
        return Layers(found, self._heads, self._epsilon)

    def _below(self, upper: int) -> int:
        if upper > self._layers:
            raise self._refusal("config.json", f"has {self._layers} layers, and {upper} are asked for")
        return self._layers - upper

    # ---- layers

    def _hidden(self, tokens: Tensor, layers: int) -> Tensor:
        """What the first layers say of every token, `[B, T, H]`."""
        weights = self._weights

        def linear(name: str, inputs: Tensor) -> Tensor:
            return functional.linear(inputs, weights[f"{name}.weight"], weights[f"{name}.bias"])

        def norm(name: str, inputs: Tensor) -> Tensor:
            scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
            return functional.layer_norm(inputs, (self.width,), scale, shift, self._epsilon)

        hidden = weights["embeddings.word_embeddings.weight"][tokens]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        hidden = norm("embeddings.LayerNorm", hidden + weights["embeddings.token_type_embeddings.weight"][0])
        for layer in range(layers):
            at = f"encoder.layer.{layer}."
            query, key, value = (
                linear(f"{at}attention.self.{name}", hidden).unflatten(2, (self._heads, -1)).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
            mixed = linear(f"{at}attention.output.dense", mixed)
            hidden = norm(f"{at}attention.output.LayerNorm", hidden + mixed)
            inner = functional.gelu(linear(f"{at}intermediate.dense", hidden))
            hidden = norm(f"{at}output.LayerNorm", hidden + linear(f"{at}output.dense", inner))
        return hidden


def _of_one_length(tokens: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Places of texts of one number of tokens, and their tokens `[B, T]`: so none is padded."""
    of_length: dict[int, list[int]] = {}
    for number, found in enumerate(tokens):
        of_length.setdefault(len(found), []).append(number)
    for length, numbers in of_length.items():
        size = max(1, _TOKENS_AT_A_TIME // length)
        for rows in (numbers[i : i + size] for i in range(0, len(numbers), size)):
            yield rows, torch.tensor([tokens[row] for row in rows])


def words(text: str, lower: bool) -> Iterator[str]:
    """The words of a text and its marks of punctuation, as BERT parts them.

    Args:
        text: Any.
        lower: Whether letters become small, and lose their accents.
    """
    spaced = "".join(f" {c} " if _stands_alone(c) else c for c in map(_cleaned, text))
    if lower:
        plain = unicodedata.normalize("NFD", spaced)
        spaced = "".join(c for c in plain if unicodedata.category(c) != "Mn").lower()
    for chunk in spaced.split():
        word = ""
        for c in chunk:
            if not _is_punctuation(c):
                word += c
                continue
            if word:
                yield word
            yield c
            word = ""
        if word:
            yield word


def _cleaned(c: str) -> str:
    if c in "\t\n\r" or unicodedata.category(c) == "Zs":
        return " "
    return "" if c == "\ufffd" or unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs") else c


def _is_punctuation(c: str) -> bool:
    return unicodedata.category(c).startswith("P") or (c.isascii() and c.isprintable() and not c.isalnum())


_IDEOGRAPHS = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


def _stands_alone(c: str) -> bool:
    """Whether a character is an ideograph, each of which is a word."""
    return len(c) == 1 and any(low <= ord(c) <= high for low, high in _IDEOGRAPHS)
