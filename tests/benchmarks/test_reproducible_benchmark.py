"""The price of a reproducible run, and how two runs are compared."""

import pytest

from hpcdp.benchmarks import reproducible
from hpcdp.errors import ConfigError

RECORDS = [
    {"kind": "step", "loss": 1.5, "accuracy": 0.25, "samples_per_s": 7.0},
    {"kind": "epoch", "loss": 1.25, "accuracy": 0.5, "samples_per_s": 10.0, "test_loss": 1.0, "test_accuracy": 0.5},
    {"kind": "epoch", "loss": 1.0, "accuracy": 0.75, "samples_per_s": 30.0, "test_loss": 0.5, "test_accuracy": 0.75},
    {"kind": "epoch", "loss": 0.5, "accuracy": 0.75, "samples_per_s": 40.0, "test_loss": 0.25, "test_accuracy": 0.75},
]


def test_the_first_epoch_is_not_counted():
    assert reproducible.speed(RECORDS) == 35.0
    assert reproducible.speed(RECORDS[:2]) == 10.0


def test_a_fingerprint_is_of_losses_and_accuracies_to_the_bit():
    first = reproducible.fingerprint(RECORDS)
    assert reproducible.fingerprint([each | {"samples_per_s": 1.0} for each in RECORDS]) == first
    other = [*RECORDS[:3], RECORDS[3] | {"test_loss": 0.25 * (1 + 2**-52)}]
    assert reproducible.fingerprint(other) != first
    assert reproducible.fingerprint(RECORDS[:3]) != first


def test_ratios_are_of_turns_and_the_table_is_narrow(monkeypatch):
    rates = iter([100, 50, 400, 300, 200, 150, 400, 300, 100, 80, 400, 300])
    monkeypatch.setattr(reproducible, "train", lambda *args, **options: None)
    monkeypatch.setattr(reproducible, "speed", lambda records: next(rates))
    found = reproducible.price(2, 32, 4, 3)
    assert (found["ratio"], found["lowest"], found["highest"], found["pieces"]) == (0.75, 0.5, 0.8, 0.75)
    lines = reproducible.table([found]).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["2", "32", "100", "80", "0.75", "0.50", "0.80", "0.75"]


def test_runs_are_compared_and_differences_told(monkeypatch, capsys, trains):
    programs = trains(reproducible, RECORDS)
    monkeypatch.setattr(reproducible, "price", lambda *args: None)
    monkeypatch.setattr(reproducible, "table", lambda found: "")
    monkeypatch.setattr(reproducible, "_ALIKE_EPOCHS", 1)
    assert reproducible.main(["--batches", "256", "--alike", "1"]) == 0
    assert "# the same bits on 1 ranks\n" in capsys.readouterr().out
    assert {"--batch-size=256", "--epochs=1", "--reproducible"} < set(programs[0])
    fingerprints = iter("aaabab")
    monkeypatch.setattr(reproducible, "fingerprint", lambda records: next(fingerprints))
    monkeypatch.setattr(reproducible, "train", lambda *args, **options: None)
    assert reproducible.main(["--alike", "2"]) == 0
    assert "# the same bits on 2 ranks, 2 ranks, 1 a node\n" in capsys.readouterr().out
    assert reproducible.main(["--alike", "1", "2"]) == 1
    assert "# DIFFERENT BITS on 1 ranks, 2 ranks" in capsys.readouterr().out


def test_more_ranks_than_shards_are_refused():
    with pytest.raises(ConfigError, match="expected at most 8 ranks, got 9"):
        reproducible.main(["--alike", "9"])
