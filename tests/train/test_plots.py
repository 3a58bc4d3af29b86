import os

import matplotlib.image
import numpy as np
import pytest
from raises import raises

from hpcdp.errors import ConfigError
from hpcdp.train import report
from hpcdp.train.report import draw_curves


def records(epochs: int, loss: float = 0.5) -> list[dict]:
    found = []
    for epoch in range(1, epochs + 1):
        found.append({"kind": "step", "step": epoch, "epoch": epoch - 0.5, "loss": loss / epoch, "accuracy": 0.9})
        found.append({"kind": "epoch", "step": epoch, "epoch": epoch, "test_loss": 0.6, "test_accuracy": 0.8})
    return found


def test_the_picture_shows_the_records(tmp_path):
    for name, loss in (("a.png", 0.5), ("b.png", 0.5), ("c.png", 0.1)):
        draw_curves(records(5, loss), tmp_path / name, "a run")
    first, again, other = (matplotlib.image.imread(tmp_path / name) for name in ("a.png", "b.png", "c.png"))
    assert first.shape[0] >= 300
    np.testing.assert_array_equal(first, again)
    assert first.shape == other.shape
    loss_half = np.abs(first - other)[:, : first.shape[1] // 2]
    assert (loss_half > 0.1).sum() > 100


@pytest.mark.parametrize("lines", [[], records(1), [{"kind": "step", "step": 1, "epoch": 1, "loss": None}]])
def test_few_or_no_numbers_still_give_a_picture(tmp_path, lines):
    draw_curves(lines, tmp_path / "curves.png")
    assert matplotlib.image.imread(tmp_path / "curves.png").size


def test_a_perfect_accuracy_and_a_loss_of_zero_are_drawn(tmp_path):
    lines = [
        {"kind": "step", "step": s, "epoch": s, "loss": 0.0, "accuracy": 1.0, "test_loss": 0.0, "test_accuracy": 1.0}
        for s in (1, 2)
    ]
    draw_curves(lines, tmp_path / "curves.png")
    assert matplotlib.image.imread(tmp_path / "curves.png").size


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_raises_and_leaves_nothing(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="Permission denied"):
        draw_curves(records(2), tmp_path / "curves.png")


def test_drawing_again_replaces_the_picture_and_leaves_no_other_file(tmp_path):
    for epochs in (1, 4):
        draw_curves(records(epochs), tmp_path / "curves.png")
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def test_lines_grow_with_every_point(tmp_path):
    animator = report.Animator(tmp_path / "test.png", "epoch", ("training", "test"), "accuracy")
    sizes = []
    for epoch in (1, 2, 3):
        animator.add(epoch, (0.5 * epoch, None if epoch == 1 else 0.25 * epoch))
        sizes.append(matplotlib.image.imread(tmp_path / "test.png").std())
    assert (animator.X, animator.Y) == ([[1, 2, 3], [2, 3]], [[0.5, 1.0, 1.5], [0.5, 0.75]])
    assert len(set(sizes)) == 3 and list(tmp_path.iterdir()) == [tmp_path / "test.png"]
    with raises(ConfigError, operation="Animator.add", expected=["list", 2], got=1):
        animator.add(4, (1.0,))
    gone = report.Animator(tmp_path / "test.png", "epoch", ("a",))
    gone.path = tmp_path / "none" / "test.png"
    with pytest.raises(OSError):
        gone.add(1, (2.0,))


@pytest.mark.parametrize(
    ("draw", "got"),
    [
        (lambda: report.Animator("a.xyz", "epoch", ["loss"]), "'a.xyz'"),
        (lambda: report.Animator("a.png", "epoch", "loss"), "'loss'"),
        (lambda: draw_curves([], "a"), "'a'"),
    ],
)
def test_other_files_and_names_that_are_no_list_are_refused(draw, got):
    with pytest.raises(ConfigError) as caught:
        draw()
    assert caught.value.got == got


def test_what_an_animator_cannot_draw_is_refused_when_it_is_said(tmp_path):
    with raises(ConfigError, operation="Animator", where=tmp_path / "none/a.png"):
        report.Animator(tmp_path / "none" / "a.png", "epoch", ["loss"])
    with raises(ConfigError, operation="Animator.add", expected=["list", 1], got="float"):
        report.Animator(tmp_path / "a.png", "epoch", ["loss"]).add(1, 0.5)
    animator = report.Animator(tmp_path / "a.png", "epoch", ["loss", "accuracy"])
    animator.add(1, (0.5, 0.5))
    with raises(ConfigError, operation="Animator.add", expected=None):
        animator.add(2, (0.5, "x"))
    animator.add(2, (0.4, None))
    assert (animator.X, animator.Y) == ([[1, 2], [1]], [[0.5, 0.4], [0.5]])
    for number, values in enumerate(((1e308, -1e308), (float("nan"), float("inf")), (1.0, 2.0))):
        animator.add(3 + number, values)
    with raises(ConfigError, operation="Animator.add", expected=None):
        animator.add(9, (10**400, 1))
