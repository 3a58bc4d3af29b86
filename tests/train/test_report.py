"""The page about runs: what is in it, and what it does with runs that are damaged, killed or none."""

import json
import os
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from hpcdp.cli import main
from hpcdp.train import report
from hpcdp.train.metrics import read_metrics
from hpcdp.train.report import draw_curves


def write_run(folder, epochs=3, ranks=2, lr=0.1, torn=False):
    folder.mkdir(parents=True)
    folder.joinpath("config.toml").write_text(f'model = "mlp"\ndata = "<digits>"\nlr = {lr}\nranks = {ranks}\n')
    lines = []
    for step in range(1, 10 * epochs + 1):
        common = {
            "step": step,
            "epoch": step / 10,
            "loss": 2 / step,
            "accuracy": 1 - 1 / step,
            "samples_per_s": 900 + step,
        }
        if step % 5 == 0:
            lines.append({"kind": "step", "seconds": 0.5, "comm_exposed_s": 0.1, **common})
        if step % 10 == 0:
            of_ranks = {
                part: [0.1 * (rank + 1) for rank in range(ranks)] for part in ("compute_s", "data_s", "exposed_s")
            }
            more = (
                {"slowest_rank": 1, "slowest_host": "node2", "slowest_ratio": 1.5, "by_rank": of_ranks}
                if ranks > 1
                else {}
            )
            lines.append({"kind": "epoch", "test_loss": 1 / step, "test_accuracy": 0.9, **common, **more})
    text = "".join(json.dumps(each) + "\n" for each in lines)
    folder.joinpath("metrics.jsonl").write_text(text[:-20] if torn else text)
    return folder


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.found = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def rows(page):
    found = {}
    for table in re.findall(r"<table>.*?</table>", page, re.DOTALL):
        for row in ElementTree.fromstring(table):
            name, *values = [cell.text or "" for cell in row]
            found[name] = values
    return found


def test_the_page_is_complete_in_itself_and_says_what_a_run_reached(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    assert main(["report", str(run)]) == 0
    assert (
        capsys.readouterr().out
        == f"report    {run}/report.html, {len((run / 'report.html').read_text()) / 1e3:.0f} kB\n"
    )
    page = (run / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    images = [attrs for tag, attrs in tags.found if tag == "img"]
    assert [each["alt"] for each in images] == [
        "Loss", "Accuracy", "Samples a second", "Exposed communication, ms a step", "Ranks, ms a step",
    ]  # fmt: skip
    assert all(each["src"].startswith("data:image/png;base64,iVBOR") for each in images)
    assert not re.search(r"<script|https?:", page)
    found = rows(page)
    assert found["network"] == ["mlp on <digits>"] and found["lr"] == ["0.1"]
    assert found["test accuracy"] == ["0.9000"] and found["epochs"] == ["3"] and found["steps"] == ["30"]
    assert found["training time"] == ["3.0 s"] and found["communication exposed"] == ["0.60 s, 20.0%"]
    assert found["slowest rank"] == ["rank 1 on node2 in 3 of 3 epochs, 1.50 x the median"]


def test_runs_stand_side_by_side_and_what_differs_is_marked(tmp_path):
    runs = [write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", ranks=1, lr=0.2)]
    output = tmp_path / "all.html"
    assert main(["report", *map(str, runs), "--output", str(output), "--png", str(tmp_path / "figures")]) == 0
    page = output.read_text()
    assert rows(page)["lr"] == ["0.1", "0.2"] and "x/run, y/run" in page
    marked = re.findall(r'<tr class="differs"><th>(.*?)</th>', page)
    assert "lr" in marked and "ranks" in marked and "model" not in marked
    assert rows(page)["communication exposed"] == ["0.60 s, 20.0%", ""]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "accuracy.png", "exposed-communication-ms-a-step.png", "loss.png", "ranks-ms-a-step.png",
        "samples-a-second.png",
    ]  # fmt: skip


def test_of_an_epoch_under_way_the_part_that_was_reached_is_shown(tmp_path):
    run = write_run(tmp_path / "a", epochs=2, torn=True)  # killed while it wrote the records of step 20
    metrics = run / "metrics.jsonl"
    lines = [each for each in metrics.read_text().splitlines(keepends=True) if '"step": 20' not in each]
    metrics.write_text("".join(lines))
    assert main(["report", str(run)]) == 0
    found = rows((run / "report.html").read_text())
    assert found["epochs"] == ["1.5"] and found["steps"] == ["15"]


@pytest.mark.parametrize("option", ["--output", "--png"])
def test_a_place_in_a_folder_that_is_not_there_is_refused(option, tmp_path, capsys):
    run, missing = write_run(tmp_path / "a"), tmp_path / "missing"
    assert main(["report", str(run), option, str(missing / "x.html")]) == 2
    assert f"expected an existing folder {missing}, got none" in capsys.readouterr().err
    assert not missing.exists() and not (run / "report.html").exists()


def test_times_of_ranks_are_those_of_a_step_after_the_first_epoch(tmp_path):
    (run,) = report.read_runs([write_run(tmp_path / "a", epochs=3, ranks=3)])
    found = report._by_rank(run)
    assert found["compute_s"] == pytest.approx([10.0, 20.0, 30.0])


@pytest.fixture
def drawn(monkeypatch):
    """The axes of each picture that a test draws."""
    kept, styled = [], report.styled

    def keep(*arguments, **options):
        figure, axes = styled(*arguments, **options)
        kept.append(axes)
        return figure, axes

    monkeypatch.setattr(report, "styled", keep)
    return kept


def test_bars_of_several_runs_have_one_scale(tmp_path, drawn):
    report.draw_all(
        report.read_runs([write_run(tmp_path / "a", ranks=4), write_run(tmp_path / "b"), write_run(tmp_path / "c", 1)])
    )
    assert len(drawn[-1]) == 3
    assert len({axes.get_ylim() for axes in drawn[-1]}) == 1
    assert drawn[-1][0].get_ylim()[1] > 4 * 3 * 10  # the slowest rank of all, in ms


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_run_that_was_killed_early_or_goes_on(epochs, tmp_path):
    run = write_run(tmp_path / "a", epochs=epochs, torn=True)
    assert main(["report", str(run)]) == 0
    assert ("Loss" in report.draw_all(report.read_runs([run]))) == bool(epochs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none"], "expected a run folder, which has a file metrics.jsonl, got no such folder"),
        (["a", "a/../a"], "expected each run once, got a duplicate"),
        (["x" * 300], "expected a run folder, which has a file metrics.jsonl, got no such folder"),
        (["a", "-o", f"{'x' * 300}/all.html"], "xxx, got none"),
        (["torn"], "expected a file written by a run, got"),
        (["strange"], "expected a file written by a run, got a line that is not a record"),
        (["a", "-o", "nowhere/at/all.html"], "expected an existing folder nowhere/at, got none"),
        (["a", "-o", "a/metrics.jsonl"], "expected a name that ends in .html, .htm, got 'a/metrics.jsonl'"),
        (["cut"], "got line 2 of the file is not JSON: "),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    for name, text in (("torn", '{"kind"\n{}\n'), ("strange", "[1]\n"), ("cut", '{}\n{"kind\n{}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hpcdp: report [") and said in error and error.count("\n") == 1
    assert (tmp_path / "a" / "metrics.jsonl").read_text().startswith("{")


def damaged(folder, **fields):
    """A run whose last record has other ``fields``; ... leaves one out."""
    run = write_run(folder)
    *lines, last = run.joinpath("metrics.jsonl").read_text().splitlines(keepends=True)
    record = {name: value for name, value in (json.loads(last) | fields).items() if value is not ...}
    run.joinpath("metrics.jsonl").write_text("".join(lines) + json.dumps(record) + "\n")
    return run


SCRIPT = "<script>alert(1)</script>"
TIMES = {"compute_s": [0.1, 0.2], "data_s": [0.1, 0.2], "exposed_s": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"epoch": "two", "loss": SCRIPT, "step": 1}, "got record 9: 'epoch' is 'two', not a number"),
        ({"epoch": None}, "'epoch' is None, not a number"),
        ({"step": [1]}, "'step' is [1], not a number"),
        ({"kind": ["epoch"]}, "'kind' is ['epoch'], not a text"),
        ({"loss": SCRIPT}, f"'loss' is '{SCRIPT}', not a number"),
        ({"accuracy": True}, "'accuracy' is True, not a number"),
        ({"test_loss": float("nan")}, "'test_loss' is nan, not a number"),
        ({"test_accuracy": float("inf")}, "'test_accuracy' is inf, not a number"),
        ({"samples_per_s": 10**400}, "'samples_per_s' is 1"),
        ({"seconds": {}}, "'seconds' is {}, not a number"),
        ({"comm_exposed_s": "x" * 200}, f"'comm_exposed_s' is '{'x' * 36}..., not a number"),
        ({"slowest_rank": [1]}, "'slowest_rank' is [1], not a number"),
        ({"slowest_ratio": "1"}, "'slowest_ratio' is '1', not a number"),
        ({"slowest_ratio": None}, "'slowest_ratio' is None, not a number"),
        ({"slowest_host": ...}, "'slowest_host' is None, not a text"),
        ({"by_rank": [1, 2]}, "'by_rank' is [1, 2], not equally many numbers for each part"),
        ({"by_rank": {"compute_s": [1]}}, "'by_rank' is {'compute_s': [1]}, not equally many numbers"),
        ({"by_rank": TIMES | {"data_s": [0.1]}}, "not equally many numbers for each part"),
        ({"by_rank": TIMES | {"data_s": [0.1, "x"]}}, "not equally many numbers for each part"),
    ],
)
def test_a_field_of_another_type_is_said_in_a_line(fields, said, tmp_path, capsys):
    run = damaged(tmp_path / "a", **fields)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hpcdp: report [{run}/metrics.jsonl]: expected a file written by a run, got ")
    assert said in error and error.count("\n") == 1 and not (run / "report.html").exists()


def test_losses_of_a_run_that_diverged_are_drawn(tmp_path, drawn):
    run = damaged(tmp_path / "a", loss=1.7e308, test_loss=1e308)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["report", str(run)]) == 0
        draw_curves(read_metrics(run / "metrics.jsonl"), run / "curves.png")
    assert rows((run / "report.html").read_text())["test loss"] == ["1e+308"]
    (axes,) = drawn[0]
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) > 2


def test_what_a_damaged_line_breaks_is_said_in_a_line(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    run.joinpath("metrics.jsonl").write_text("[" * 100_000 + "\n")
    assert main(["report", str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_numbers_that_json_lacks_are_left_out(tmp_path):
    names = ("loss", "accuracy", "test_loss", "test_accuracy", "samples_per_s", "comm_exposed_s", "seconds")
    assert main(["report", str(damaged(tmp_path / "a", **dict.fromkeys(names)))]) == 0
    assert rows((tmp_path / "a" / "report.html").read_text())["best test accuracy"] == ["0.9000"]


def test_texts_of_a_run_are_texts_of_the_page(tmp_path):
    run = damaged(tmp_path / SCRIPT.replace("/", "-"), slowest_host=SCRIPT, critical_path=SCRIPT)
    run.joinpath("config.toml").write_text(f'model = "{SCRIPT}"\n"{SCRIPT}" = "{SCRIPT}"\nranks = "{SCRIPT}"\n')
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<script" not in page
    found = rows(page)
    assert found["critical path"] == [SCRIPT] and found[SCRIPT] == [SCRIPT] and found["ranks"] == [SCRIPT]
    assert found["slowest rank"] == [f"rank 1 on {SCRIPT} in 3 of 3 epochs, 1.50 x the median"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("x$\\foo$", "x$\\foo$"),
        ("by\udcffte", "by\\xffte"),
        pytest.param("_two", "_two", marks=pytest.mark.thorough),
        pytest.param("a$b$c", "a$b$c", marks=pytest.mark.thorough),
        pytest.param("z\u00fcrich", "z\u00fcrich", marks=pytest.mark.thorough),
    ],
)
def test_a_run_may_have_any_name_and_has_it_in_page_and_pictures(name, shown, tmp_path, drawn):
    output = tmp_path / "all.html"
    runs = [str(write_run(tmp_path / each)) for each in (name, "other")]
    assert main(["report", *runs, "--output", str(output)]) == 0
    assert f"<h1>{shown}, other</h1>" in output.read_text("utf-8")
    (axes,), (of_run, _) = drawn[0], drawn[-1]
    (legend,) = axes.figure.legends
    assert f"{shown}, training" in [text.get_text() for text in legend.get_texts()]
    assert of_run.get_title("left") == shown
    assert not any(text.get_parse_math() for text in legend.get_texts())


@pytest.mark.thorough
def test_a_home_that_cannot_be_written_is_no_matter(tmp_path):
    command = [sys.executable, "-m", "hpcdp.cli", "report", str(write_run(tmp_path / "a"))]
    homeless = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")}
    done = subprocess.run(command, env=homeless | {"HOME": "/proc/none"}, capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("drawing")]  # on a slow machine
    assert said == []


def test_names_are_those_of_utf_8_in_any_locale(tmp_path):
    write_run(tmp_path / "z\u00fcrich")
    code = "import os, sys; from hpcdp.cli import main; sys.exit(main(['report', *os.listdir()]))"
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ascii_only, check=True)
    assert "<h1>z\u00fcrich</h1>" in (tmp_path / "z\u00fcrich" / "report.html").read_text("utf-8")
