"""Names, presets and identities."""

import string
import sys
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from plans import resolved

import bench.methods
import bench.tasks
from bench.contract import CAPABILITIES, Method, Task
from bench.errors import UsageError
from bench.runs import registry, resolution
from bench.runs.plan import Plan
from bench.runs.registry import Entry
from bench.runs.resolution import identity, resolve

KINDS = {
    "methods": (registry.methods, bench.methods, Method),
    "tasks": (registry.tasks, bench.tasks, Task),
}


def spec_of(task):
    """What a task measures under its preset standard."""
    entry = registry.task(task)
    return entry.cls(registry.build(entry.cls.settings_class, dict(entry.fixed), "task")).spec


PAIRS = [
    (m, t)
    for m in registry.methods()
    for t in registry.tasks()
    if not (spec := spec_of(t)).closed_form and not spec.requires - registry.method(m).provides
]


# ---- discovery


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_found(kind):
    known, package, base = KINDS[kind]
    folder = Path(package.__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {entry.file for entry in known().values()} == files
    for name, entry in known().items():
        assert entry.name == name
        assert issubclass(entry.cls, base)
        assert entry.cls.__module__ == f"{package.__name__}.{entry.file}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_says_what_it_is(kind):
    for entry in KINDS[kind][0]().values():
        assert len(entry.summary) > 20
        assert not entry.summary.startswith("Settings")
        assert {field.name for field in fields(entry.cls.settings_class)} == {*entry.flags(), *entry.fixed}
        registry.build(entry.cls.settings_class, dict(entry.fixed), "setting")


def test_methods_declare_known_capabilities_and_no_more_than_they_have():
    for entry in registry.methods().values():
        assert entry.provides <= CAPABILITIES.keys()
        assert len(entry.cls.approximates) > 10
        own = {
            "weight_samples": "sample_weights",
            "density": "log_prob",
            "moments": "moments",
            "sequential": "as_prior",
            "loss_terms": "loss_terms",
        }
        for capability, name in own.items():
            is_own = getattr(entry.cls, name) is not getattr(Method, name)
            assert is_own == (capability in entry.cls.provides), (entry.name, capability)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of method files that can be written to."""
    (tmp_path / "own_methods").mkdir()
    (tmp_path / "own_methods" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "own_methods"
    for name in [name for name in sys.modules if name.startswith("own_methods")]:
        del sys.modules[name]


METHOD = """\
'''A method.'''
from bench.contract import Method
NAMES = {names}
class Own(Method):
    pass
"""


def discover():
    import own_methods

    return dict(registry.Entries(own_methods, "method"))


def test_discovery_lists_the_names_of_all_files(package):
    (package / "b.py").write_text(METHOD.format(names="{'one': {}, 'two': {'x': 1}}"))
    (package / "a.py").write_text(METHOD.format(names="{'three': {}}"))
    found = discover()
    assert list(found) == ["three", "one", "two"]
    assert found["two"].fixed == {"x": 1}
    assert found["two"].file == "b"
    assert found["one"].presets == {}


def test_name_of_two_files_is_refused(package):
    for stem in "ab":
        (package / f"{stem}.py").write_text(METHOD.format(names="{'same': {}}"))
    with pytest.raises(UsageError, match=r"the name 'same' is declared in a\.py and b\.py"):
        discover()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("from bench.contract import Method\nNAMES = {'x': {}}\n", "one Method, not 0"),  # imported
        (METHOD.format(names="{'x': {}}") + "class Second(Method):\n    pass\n", "one Method, not 2"),
        (METHOD.format(names="{'x': {}}").replace("NAMES", "NAME"), "NAMES, written out as a dictionary"),
        (METHOD.format(names="{n: {} for n in 'xy'}"), "NAMES, written out as a dictionary"),
        (METHOD.format(names="['x', 'y']"), "NAMES, written out as a dictionary"),
        (METHOD.format(names="{'x': 3}"), "NAMES, written out as a dictionary"),
    ],
    ids=[
        "no class",
        "two classes",
        "no names",
        "names computed",
        "names in a list",
        "settings no dictionary",
    ],
)
def test_file_that_does_not_declare_one_method_is_refused(package, content, message):
    (package / "a.py").write_text(content)
    with pytest.raises(UsageError, match=f"must declare {message}"):
        discover()


def test_a_file_is_imported_when_its_entry_is_asked_for(package):
    """Names come from the source: a file that cannot be imported keeps nobody from the others."""
    (package / "a.py").write_text("NAMES = {'one': {}}\nraise RuntimeError('not\\nnow')")
    (package / "b.py").write_text("this is no Python")
    (package / "c.py").write_text(METHOD.format(names="{'two': {}}"))
    import own_methods

    found = registry.Entries(own_methods, "method")
    assert list(found) == ["one", "b", "two"]
    assert found["two"].file == "c"
    assert "own_methods.a" not in sys.modules
    for name, reason in (("one", "a: RuntimeError: not now"), ("b", "b: SyntaxError: ")):
        with pytest.raises(UsageError, match=f"cannot import own_methods.{reason}"):
            found[name]


def test_names_that_spell_out_settings_begin_with_the_name_of_their_file():
    """Only then is the file found that knows the pattern."""
    for entry in registry.methods().values():
        pattern = getattr(sys.modules[entry.cls.__module__], "PATTERN", None)
        assert pattern is None or pattern.pattern.startswith(f"{entry.file}_"), entry.file


def test_names_of_methods_and_tasks_do_not_collide():
    assert not registry.methods().keys() & registry.tasks().keys()


@pytest.mark.parametrize(
    ("typed", "settings", "members", "identity"),
    [
        ("laplace", {"weights": "last_layer", "curvature": "full"}, None, "laplace_last_layer"),
        ("laplace_last_layer", {}, None, "laplace_last_layer"),
        (
            "laplace",
            {"weights": "last_layer", "curvature": "full", "prior_precision": "tuned"},
            None,
            "laplace_last_layer+prior_precision=tuned",
        ),
        ("laplace", {"weights": "last_layer", "curvature": "full"}, 4, "laplace_last_layer+members=4"),
        ("laplace", {"weights": "last_layer"}, None, "laplace+weights=last_layer"),
        ("laplace", {"curvature": "full"}, 2, "laplace+members=2,curvature=full"),
        ("sghmc", {"schedule": "cyclical"}, None, "sghmc_cyclical"),
        ("map", {}, 3, "deep_ensemble"),
        ("nf_gamma_10_1_100_True", {}, None, "nf_gamma_10_1_100_True"),
    ],
)
def test_a_run_has_the_name_that_fixes_most_of_its_settings(typed, settings, members, identity):
    """However it was typed, with the settings that were typed; both laplaces have untuned presets here."""
    values = {"method_settings": settings, "members": members}
    chosen = resolve(Plan(method=typed, task="toy_regression", **values))
    assert chosen.method_identity == identity
    assert asdict(chosen.method_settings).items() >= settings.items()
    assert chosen.tuning == resolved(chosen.method.name, "toy_regression").tuning


# ---- presets


@pytest.mark.parametrize("preset", resolution.PRESETS)
def test_preset_is_valid_and_names_its_source(preset):
    """Of every method on every task that it can run."""
    for method, task in PAIRS:
        choice = resolved(method, task, preset)
        assert choice.tuning in get_args(resolution.Tuning), (method, task)
        assert choice.preset == preset
        assert isinstance(choice.method_settings, choice.method.cls.settings_class), (method, task)


def test_preset_files_speak_of_known_methods_and_tasks():
    for path in resolution.PRESET_FILES.glob("*.toml"):
        assert path.stem in {entry.file for entry in registry.tasks().values()}
        table = tomllib.loads(path.read_text())
        assert table.keys() <= {"standard", "paper"}
        for methods in table.values():
            assert methods.keys() <= registry.methods().keys()
            for name, values in methods.items():
                assert values.pop("provenance") in get_args(resolution.Tuning)
                assert values.keys() <= set(registry.method(name).flags())


def test_presets_of_the_split_task():
    chosen = {preset: resolved("mfvi", "split_mnist", preset) for preset in resolution.PRESETS}
    smoke, standard, paper = chosen.values()
    assert (standard.task_identity, standard.method_identity) == ("split_mnist", "mfvi")
    assert smoke.task_identity == "split_mnist+epochs=1,test_samples=4"
    assert smoke.method_identity == "mfvi"
    assert (paper.task_settings.epochs, paper.task_settings.batch_size) == (120, None)
    assert paper.method_settings.train_samples == 10
    assert (standard.tuning, paper.tuning) == ("by_hand", "published")


def test_what_somebody_set_says_so():
    """In a preset, or on the command line; the defaults of a method and a published table do not."""
    assert resolved("map", "split_mnist").tuning == "untuned"
    assert resolved("map", "split_mnist", method_settings={"learning_rate": 1e-4}).tuning == "by_hand"
    assert resolved("mc_dropout", "retinopathy_synthetic").tuning == "by_hand"
    assert resolved("mfvi", "iris_depth").tuning == "published"
    assert resolved("mfvi", "iris_depth", method_settings={"train_samples": 2}).tuning == "by_hand"
    assert resolved("map", "split_mnist", task_settings={"epochs": 1}).tuning == "untuned"


def test_preset_file_is_read_preset_by_preset(monkeypatch):
    """Paper is standard plus its own; smoke trains the standard method."""
    table = {"standard": {"x": {"provenance": "tuned", "a": 1, "b": 1}}, "paper": {"x": {"b": 2}}}
    pairs = {p: table.get(p, {}).get("x", {}) for p in resolution.PRESETS}
    monkeypatch.setattr(resolution, "_pair_presets", lambda *_: pairs)
    method = Entry("x", object, {}, "x", {})
    task = Entry("t", object, {"c": 3}, "t", {"smoke": {"d": 4}})
    assert resolution.preset_values(method, task, "standard") == ({"a": 1, "b": 1}, {"c": 3}, "tuned")
    assert resolution.preset_values(method, task, "smoke") == ({"a": 1, "b": 1}, {"c": 3, "d": 4}, "tuned")
    assert resolution.preset_values(method, task, "paper") == ({"a": 1, "b": 2}, {"c": 3}, "tuned")


# ---- names that spell out settings


def test_names_of_a_pattern_are_no_entries_of_their_own():
    """They resolve, with the file's documentation, and are listed nowhere."""
    entry = registry.method("nf_gamma_10_1_100_True")
    assert entry.name not in registry.methods()
    assert entry.file == "nf_gamma"
    assert entry.summary == registry.method("nf_gamma").summary
    assert set(registry.method("nf_gamma").flags()) - set(entry.flags()) == entry.fixed.keys()


def test_identity_of_a_name_of_a_pattern_is_the_name():
    """Every row has a folder of its own; further settings and members follow the name."""
    name = "nf_gamma_10_1_100_True"
    assert resolved(name, "singular_evidence").method_identity == name
    other = resolved(name, "singular_evidence", method_settings={"train_samples": 7}, members=2)
    assert other.method_identity == f"{name}+members=2,train_samples=7"
    assert other.method.members == 2


@pytest.mark.parametrize("members", [1, 3])
def test_presets_of_a_method_are_those_of_its_spelled_names(monkeypatch, tmp_path, members):
    """A task's table for nf_gamma sets what the name leaves open; what it spells out stands."""
    (tmp_path / "singular_evidence.toml").write_text(
        """
        [standard.nf_gamma]
        provenance = "tuned"
        learning_rate = 0.02
        shape = 7.0
        [paper.nf_gamma]
        provenance = "published"
        train_samples = 9
        """
    )
    monkeypatch.setattr(resolution, "PRESET_FILES", tmp_path)
    for name, shape in (("nf_gamma", 7), ("nf_gamma_10_1_100_True", 10)):
        standard, paper = (
            resolved(name, "singular_evidence", preset, members=members) for preset in ("standard", "paper")
        )
        assert standard.method_settings.learning_rate == paper.method_settings.learning_rate == 0.02
        assert standard.method_settings.shape == paper.method_settings.shape == shape
        assert (standard.method_settings.train_samples, paper.method_settings.train_samples) == (5, 9)
        assert (standard.tuning, paper.tuning) == ("tuned", "published")
    elsewhere = resolved("nf_gaussian_0_1", "singular_evidence")
    assert elsewhere.method_settings.learning_rate == 1e-3


def test_unknown_names_near_a_pattern_are_one_line():
    with pytest.raises(UsageError, match=r"unknown method 'nf_gama_10_1_100_True': .*nf_gamma") as info:
        registry.method("nf_gama_10_1_100_True")
    assert "\n" not in str(info.value)


# ---- identity

SAFE = {*string.ascii_letters, *string.digits, *"._+-,=~"}
MFVI = registry.method("mfvi")
STANDARD = MFVI.cls.settings_class()
VALUES = {
    "learning_rate": st.floats(1e-6, 1e3),
    "optimizer": st.sampled_from(["adam", "amsgrad", "sgd"]),
    "rate_decay": st.floats(0.01, 1),
    "train_samples": st.integers(1, 1000),
    "initial_rho": st.floats(-10, 10),
    "pretrain_epochs": st.integers(0, 500),
    "kl_weight": st.floats(0, 1e6),
    "kl_annealing_epochs": st.integers(0, 500),
    "prior": st.sampled_from(["task", "tight", "scale_mixture"]),
    "prior_mean_follows": st.booleans(),
    "truncation": st.none() | st.floats(0.1, 5),
    "estimator": st.sampled_from(["pathwise", "local", "flipout"]),
}
SETTINGS = st.fixed_dictionaries({}, optional=VALUES).map(lambda values: MFVI.cls.settings_class(**values))


def test_random_settings_cover_all_of_mfvi():
    assert VALUES.keys() == {field.name for field in fields(MFVI.cls.settings_class)}


@given(SETTINGS, SETTINGS)
@example(*(MFVI.cls.settings_class(initial_rho=zero) for zero in (0.0, -0.0)))
def test_equal_identity_is_equal_settings(a, b):
    assert (identity(MFVI, a, STANDARD) == identity(MFVI, b, STANDARD)) == (a == b)
    assert identity(MFVI, a, STANDARD) == identity(MFVI, MFVI.cls.settings_class(**asdict(a)), STANDARD)


@given(SETTINGS)
def test_identity_is_a_file_name(settings):
    text = identity(MFVI, settings, STANDARD)
    assert set(text) <= SAFE
    assert len(text) <= 120
    assert text.startswith("mfvi")


@dataclass
class Named:
    """Settings of one text."""

    name: str


@given(st.text(max_size=150), st.text(max_size=150))
@example("a/b", "a_b")
@example("a/b", "a:b")
@example("a~2f~b", "a/b")
@example("x" * 140 + "1", "x" * 140 + "2")
def test_any_text_makes_a_file_name_and_no_two_the_same(a, b):
    entry = Entry("own.module:Method", Named, {}, "own", {})
    texts = [identity(entry, Named(name), Named("standard")) for name in (a, b)]
    for text in texts:
        assert set(text) <= SAFE
        assert len(text) <= 120
    assert (texts[0] == texts[1]) == (a == b)


def test_standard_settings_are_the_bare_name():
    assert identity(MFVI, STANDARD, STANDARD) == "mfvi"


def test_identity_names_what_differs():
    settings = MFVI.cls.settings_class(learning_rate=0.01, prior_mean_follows=True)
    assert identity(MFVI, settings, STANDARD) == "mfvi+learning_rate=0.01,prior_mean_follows=true"
    task = resolved("map", "split_digits", "standard", {}, {"batch_size": None, "order": "joint"})
    assert task.task_identity == "split_digits+order=joint,batch_size=null"


def test_identity_is_relative_to_the_standard_preset_and_not_to_defaults():
    """Settings that `standard` already has leave no trace; the class default then does."""
    tuned = MFVI.cls.settings_class(learning_rate=0.01)
    assert identity(MFVI, tuned, tuned) == "mfvi"
    assert identity(MFVI, STANDARD, tuned) == "mfvi+learning_rate=0.001"


def test_long_identity_ends_in_a_hash():
    settings = MFVI.cls.settings_class(
        learning_rate=0.012345678901234567,
        train_samples=7,
        initial_rho=-1.2345678901234567,
        pretrain_epochs=77,
        kl_weight=0.12345678901234567,
        prior="scale_mixture",
    )
    text = identity(MFVI, settings, STANDARD)
    assert len(text) == 120
    assert text[-13] == "-"
    assert int(text[-12:], 16) >= 0
    other = MFVI.cls.settings_class(**{**asdict(settings), "prior": "tight"})
    assert identity(MFVI, other, STANDARD) != text


def test_own_classes_have_identities_without_colon():
    registry.import_own("toys:OnlyFirstStep", "toys:OwnTask")
    choice = resolved("toys:OnlyFirstStep", "toys:OwnTask")
    assert (choice.method_identity, choice.task_identity) == ("toys.OnlyFirstStep", "toys.OwnTask")
    assert registry.method(choice.method.name).cls is choice.method.cls
    assert registry.task(choice.task.name).cls is choice.task.cls


# ---- choosing


def test_lacking_capability_is_refused_with_those_that_have_it():
    registry.import_own("toys:CannotGoOn")
    with pytest.raises(UsageError, match=r"lacks the capability sequential; methods that have it: .*map"):
        resolved("toys:CannotGoOn", "split_digits")
    resolved("toys:CannotGoOn", "split_digits", task_settings={"order": "joint"})


@pytest.mark.parametrize(
    ("name", "among", "hint"),
    [
        ("redial", ["radial", "map"], "did you mean radial?"),
        ("zzz", ["radial", "map"], "choose from radial, map"),
    ],
)
def test_nearest_names(name, among, hint):
    assert registry.nearest(name, among) == hint
