"""Checkpoints that are damaged, of another layout, or half written: told, made again, never believed."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
import toys
from conformance import problems

import bench
from bench.contract import Budget
from bench.data import array_digest
from bench.engine import checkpoints
from bench.engine.checkpoints import Damaged
from bench.engine.engine import Engine, TrainerOptions
from bench.engine.watch import Watch
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.system.files import left_behind

BUDGET = Budget(epochs=4, batch_size=6)
CONTENT = {"state_dict": {"weight": torch.arange(3.0)}, "fit": {"steps": 3, "loss": 0.5}, "diverged": None}


def flipped(path, place=None):
    """Flips a byte of a file; the middle one is a weight's."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 0x10
    path.write_bytes(content)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def emptied(path):
    path.write_bytes(b"")


def without_digest(path):
    path.write_bytes(path.read_bytes()[:-32])


DAMAGES = [flipped, truncated, emptied, without_digest]


def engine(folder=None, cls=MAP, **options):
    """An engine, and a list that fills with what it tells the user."""
    made = Engine(cls, cls.settings_class(), 0, folder, TrainerOptions(accelerator="cpu", **options), 1, 0)
    told = []
    made.observe(lambda event, values: told.append(values["text"]) if event == "notice" else None)
    return made, told


def digest(*methods):
    return [array_digest({n: v.numpy() for n, v in m.state_dict().items()}) for m in methods]


def one_line(told, path):
    """The only line told names the file and says what follows."""
    (line,) = told
    assert line.startswith(f"{path} is damaged")
    assert "made again" in line
    assert "\n" not in line


class Stops(MAP):
    """Stops as if it were killed, in the third epoch."""

    def on_train_epoch_start(self):
        """Stops."""
        super().on_train_epoch_start()
        if self.current_epoch == 2:
            raise MemoryError


# ---- the file


def test_no_changed_byte_and_no_shorter_file_is_read(tmp_path):
    """Every byte, all of its bits and a single one; torch alone reads many of these files."""
    path = tmp_path / "a.ckpt"
    checkpoints.save(CONTENT, path)
    assert torch.equal(checkpoints.read(path)["state_dict"]["weight"], torch.arange(3.0))
    content = path.read_bytes()
    wrong = [
        content[:i] + bytes([byte ^ mask]) + content[i + 1 :]
        for i, byte in enumerate(content)
        for mask in (0xFF, 1 << i % 8)
    ]
    for damaged in wrong + [content[:i] for i in range(len(content))]:
        path.write_bytes(damaged)
        with pytest.raises(Damaged):
            checkpoints.read(path)
    path.write_bytes(content.replace(torch.ones(1).numpy().tobytes(), b"\0\0\0\0"))
    assert torch.load(path, weights_only=True)["state_dict"]["weight"].tolist() == [0, 0, 2]


# ---- a run that goes on


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_finished_fit_is_told_and_made_again(tmp_path, damage):
    def two(made):
        return [made.fit(problems.mlp(), BUDGET) for _ in range(2)]

    expected = digest(*two(engine(tmp_path)[0]))
    path = tmp_path / "000-fit.ckpt"
    damage(path)
    made, told = engine(tmp_path)
    assert digest(*two(made)) == expected
    one_line(told, path)
    assert len(made.fits) == 2
    made, told = engine(tmp_path)
    assert digest(*two(made)) == expected
    assert not told


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_unfinished_fit_is_told_and_made_again(tmp_path, damage):
    expected = digest(engine()[0].fit(problems.mlp(), BUDGET))
    with pytest.raises(MemoryError):
        engine(tmp_path, Stops)[0].fit(problems.mlp(), BUDGET)
    path = tmp_path / "000-fit.partial"
    damage(path)
    made, told = engine(tmp_path)
    method = made.fit(problems.mlp(), BUDGET)
    assert digest(method) == expected
    assert (len(method.history), made.fits[0]["steps"]) == (4, 16)
    one_line(told, path)
    assert [p.name for p in tmp_path.iterdir()] == ["000-fit.ckpt"]


def test_damaged_fits_side_by_side_are_told_and_made_again(tmp_path):
    def two(made):
        return made.fit_many(2 * [problems.mlp()], BUDGET)

    def stop(event, values):
        if event == "epoch" and values["epoch"] == 3:
            raise MemoryError

    expected = digest(*two(engine(stacked=True)[0]))
    stopped, _ = engine(tmp_path, stacked=True)
    stopped.observe(stop)
    with pytest.raises(MemoryError):
        two(stopped)
    path = tmp_path / "000-fit.stacked.partial"
    flipped(path)
    made, told = engine(tmp_path, stacked=True)
    assert digest(*two(made)) == expected
    one_line(told, path)
    path = tmp_path / "001-fit.ckpt"
    flipped(path)
    made, told = engine(tmp_path, stacked=True)
    assert digest(*two(made)) == expected
    one_line(told, path)
    assert len(made.fits) == 2


def test_damaged_arrays_are_told_and_made_again(tmp_path):
    def cached(made):
        def first_bias():
            return {"bias": made.fit(problems.mlp(), BUDGET).network[1].bias.detach().numpy()}

        return made.cached(first_bias)["bias"].tolist()

    expected = cached(engine(tmp_path)[0])
    path = tmp_path / "001.kept"
    flipped(path)
    made, told = engine(tmp_path)
    assert cached(made) == expected
    one_line(told, path)
    assert len(made.fits) == 1


# ---- another layout


def test_finished_fit_of_another_layout_is_refused_and_stays(tmp_path):
    path = tmp_path / "000-fit.ckpt"
    for content in (CONTENT, {"fit": {}}, {"state_dict": 3}):
        checkpoints.save(content, path)
        with pytest.raises(UsageError, match=r"000-fit\.ckpt does not fit: .*--force") as caught:
            engine(tmp_path)[0].fit(problems.mlp(), BUDGET)
        assert "\n" not in str(caught.value)
        assert path.exists()


def test_unfinished_fit_of_another_layout_is_refused_and_stays(tmp_path):
    with pytest.raises(MemoryError):
        engine(tmp_path, Stops)[0].fit(problems.mlp(), BUDGET)
    path = tmp_path / "000-fit.partial"
    whole = checkpoints.read(path)
    for key in ("state_dict", "method_history", "loops", "callbacks"):
        checkpoints.save({k: v for k, v in whole.items() if k != key}, path)
        with pytest.raises(UsageError, match=r"000-fit\.partial does not fit: ") as caught:
            engine(tmp_path)[0].fit(problems.mlp(), BUDGET)
        assert "\n" not in str(caught.value)
        assert path.exists()


def test_defect_of_a_method_is_not_the_checkpoints_fault(tmp_path):
    with pytest.raises(MemoryError):
        engine(tmp_path, Stops)[0].fit(problems.mlp(), BUDGET)
    with pytest.raises(RuntimeError, match="this method has a bug"):
        engine(tmp_path, toys.HasBug)[0].fit(problems.mlp(), BUDGET)


# ---- of an accelerator


class OfAnAccelerator:
    """Stands for an accelerator's generator, whose state no processor's takes."""

    def __init__(self, device):
        self.device, self.state = device, torch.zeros(16, dtype=torch.uint8)

    def get_state(self):
        """As torch.Generator."""
        return self.state

    def set_state(self, state):
        """As torch.Generator."""
        assert state.shape == self.state.shape
        self.state = state


@pytest.mark.parametrize("is_here", [True, False])
def test_noise_of_an_accelerator_goes_on_there_and_the_fit_is_read_anywhere(is_here, monkeypatch):
    """A method is on the processor when its checkpoint is read; a processor's generator refuses the state."""
    fitted = engine()[0].fit(problems.mlp(), BUDGET)
    fitted.generator = OfAnAccelerator(torch.device("cuda", 0))
    fitted.generator.state = torch.arange(16, dtype=torch.uint8)
    content = checkpoints.content(fitted, {})
    again = MAP(problems.mlp(), MAP.settings_class())
    with pytest.raises(RuntimeError, match="RNG state"):
        again.generator.set_state(content["generator_state"])
    own = again.generator

    class Module:
        """Stands for torch.cuda."""

        is_available = staticmethod(lambda: is_here)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(torch, "Generator", OfAnAccelerator)
    checkpoints.give(again, content)
    assert digest(again) == digest(fitted)
    assert again.history == fitted.history
    if is_here:
        assert again.generator.device == torch.device("cuda", 0)
        assert torch.equal(again.generator.state, fitted.generator.state)
    else:
        assert again.generator is own


def test_the_losses_of_a_stopped_fit_go_on_where_the_fit_does():
    """They lie on the processor when a checkpoint is read; `meta` stands for the accelerator."""
    watch = Watch("fit", lambda event, row: None, None, 0)
    watch.load_state_dict(Watch("fit", print, None, 0).state_dict() | {"_untold": [torch.ones(2)] * 3})
    watch.load_state_dict({"_sums": torch.ones(2)})
    here = torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match="device"):
        torch.stack([*watch._untold, here])
    watch.on_train_start(None, SimpleNamespace(device=here.device))
    assert torch.stack([*watch._untold, here]).shape == (4, 2)
    assert (watch._sums + here).device == here.device


# ---- stopped while writing


@pytest.mark.parametrize("name", ["000-fit.ckpt", "000-fit.partial"])
def test_process_killed_while_writing_leaves_nothing_in_the_end(tmp_path, monkeypatch, name):
    real = os.replace

    def killed(source, target):
        if str(target).endswith(name):
            raise KeyboardInterrupt
        real(source, target)

    made, _ = engine(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            made.fit(problems.mlp(), BUDGET)
    assert left_behind(tmp_path / name)
    long = Engine(MAP, MAP.settings_class(), 0, tmp_path, TrainerOptions(accelerator="cpu"))
    assert digest(long.fit(problems.mlp(), BUDGET)) == digest(engine()[0].fit(problems.mlp(), BUDGET))
    assert [p.name for p in tmp_path.iterdir()] == ["000-fit.ckpt"]


# ---- whole runs


def test_load_refuses_a_damaged_checkpoint_and_one_of_another_layout(tmp_path):
    done = bench.run("map", "iris_depth", preset="smoke", out=tmp_path, trainer={"accelerator": "cpu"})
    assert bench.load(done.directory).history
    path = sorted((done.directory / "checkpoints").glob("*.ckpt"))[-1]
    flipped(path)
    with pytest.raises(UsageError, match=re.escape(f"{path} is damaged: ") + ".*--force"):
        bench.load(done.directory)
    (done.directory / "files.json").unlink()  # as of a run from before lengths were kept
    checkpoints.save(CONTENT, path)
    with pytest.raises(UsageError, match=re.escape(f"{path} does not fit: ") + ".*--force") as caught:
        bench.load(done.directory)
    assert "\n" not in str(caught.value)


def test_damaged_marker_of_an_unfinished_run_is_one_line(tmp_path):
    def stop(event, values):
        if event == "epoch":
            raise KeyboardInterrupt

    options = {"preset": "smoke", "out": tmp_path, "trainer": {"accelerator": "cpu"}}
    with pytest.raises(KeyboardInterrupt):
        bench.run("map", "iris_depth", observers=(stop,), **options)
    (marker,) = tmp_path.rglob("unfinished.json")
    for content in (b"", b'{"seed": 0', b"\xff\xfe", b"[1]", b"null"):
        marker.write_bytes(content)
        with pytest.raises(UsageError, match=r"unfinished\.json is damaged.*--force starts anew") as caught:
            bench.run("map", "iris_depth", **options)
        assert "\n" not in str(caught.value)
    assert bench.run("map", "iris_depth", force=True, **options).record.status == "completed"


class DrawsWhenBuilt(MAP):
    """Scales its outputs by a number that no checkpoint holds."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        factor = DrawsWhenBuilt.next_factor
        self.network.register_forward_hook(lambda module, inputs, outputs: factor * outputs)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_fit_that_is_found_again_predicts_what_was_fitted(factor, tmp_path):
    """In the engine as under bench.load; nothing is drawn from torch's own generator for that."""
    DrawsWhenBuilt.next_factor = 2.0
    state = torch.get_rng_state()
    engine(tmp_path, DrawsWhenBuilt)[0].fit(problems.mlp(), BUDGET)
    DrawsWhenBuilt.next_factor = factor
    again = engine(tmp_path, DrawsWhenBuilt)[0]
    if factor == 2.0:
        again.fit(problems.mlp(), BUDGET)
    else:
        with pytest.raises(
            UsageError, match="what is built now predicts otherwise than what was fitted"
        ) as e:
            again.fit(problems.mlp(), BUDGET)
        assert "\n" not in str(e.value)
    assert torch.equal(state, torch.get_rng_state())
