"""Readers of strangers' bytes, under bytes made at random: what they accept, others read the same way."""

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.leaderboard.check import reading
from bench.leaderboard.check.codes import Rejected
from bench.leaderboard.check.facts import deceiving
from bench.text import escaped

QUICK = settings(max_examples=200, deadline=None, derandomize=True)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
documents = st.recursive(
    scalars | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


REFUSED = object()


def read(reader, content):
    """What a reader makes of bytes; REFUSED if it says in one clean line why not, and nothing else may be."""
    try:
        return reader(content, "x")
    except Rejected as reason:
        message = str(reason)
    assert escaped(message) == message
    return REFUSED


def texts(value):
    """Every text inside a document, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts([*value, *value.values()])
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


@QUICK
@given(documents, st.booleans())
@example({" ": None}, False)
@example({"\u2800": ["\u3164"]}, True)
def test_json_that_is_accepted_is_the_document(document, ascii):
    """Refused are infinities and texts that deceive, nothing else of what is this small."""
    content = json.dumps(document, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    found = read(reading.read_json, content)
    if found is REFUSED:
        assert "Infinity" in json.dumps(document) or any(map(deceiving, texts(document)))
    else:
        assert found == document


@QUICK
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(content):
    found = read(reading.read_json, content)
    if found is not REFUSED:
        assert found == json.loads(content)
    for reader in (reading.read_record, reading.read_header):
        assert read(reader, content) is REFUSED


@QUICK
@given(documents, st.integers(0, 10**6), st.binary(min_size=1, max_size=3))
def test_damaged_json_is_read_or_refused(document, place, damage):
    content = bytearray(json.dumps(document).encode())
    place %= len(content)
    content[place : place + len(damage)] = damage
    found = read(reading.read_json, bytes(content))
    if found is not REFUSED:
        assert found == json.loads(bytes(content))


arrays = st.dictionaries(
    st.sampled_from(["labels", "log_probs", "x"]),
    st.tuples(
        st.sampled_from([np.float16, np.float32, np.float64, np.uint8, np.int32, np.int64]),
        st.lists(st.integers(1, 3), max_size=3),
    ).map(lambda made: np.arange(np.prod(made[1], dtype=int)).reshape(made[1]).astype(made[0])),
    min_size=1,
)


def taken(content):
    """The arrays of a file; None if it is refused."""
    header = read(reading.read_header, content)
    return None if header is REFUSED else reading.arrays_of(content, header)


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype
        np.testing.assert_array_equal(array, second[name])


@QUICK
@given(arrays)
def test_what_the_library_wrote_is_read(made):
    assert_same(taken(safetensors.numpy.save(made)), made)


@QUICK
@given(arrays, st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_damaged_arrays_are_read_as_the_library_reads_them_or_refused(made, place, damage):
    """Stricter than the library, never laxer; damaged are length, header and data alike."""
    content = bytearray(safetensors.numpy.save(made))
    place %= len(content)
    content[place : place + len(damage)] = damage
    if (found := taken(bytes(content))) is not None:
        with np.errstate(all="ignore"):
            assert_same(found, safetensors.numpy.load(bytes(content)))


sizes = st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 2**31, 2**32, 2**40, 2**62])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F16", "F32", "U8", "BF16", "O", "f4", ""]),
        "shape": st.lists(sizes, max_size=4),
        "data_offsets": st.lists(sizes, min_size=1, max_size=3),
    }
)


@settings(QUICK, max_examples=400)
@given(st.dictionaries(st.sampled_from(["x", "y", "__metadata__", "../x", "é"]), entries), st.integers(0, 16))
def test_hostile_headers_are_read_as_the_library_reads_them_or_refused(header, size):
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(size)
    if (found := taken(content)) is not None:
        assert_same(found, safetensors.numpy.load(content))


def test_fuzzing_would_notice(monkeypatch):
    """The control: a reader that lets a hole pass is laxer than the library, and the law above sees it."""
    text = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(2)
    assert taken(content) is None
    laxer = {"x": reading.Stored("|u1", (1,), 8 + len(text), 9 + len(text))}
    monkeypatch.setattr(reading, "read_header", lambda content, where: laxer)
    assert taken(content) is not None
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.load(content)
