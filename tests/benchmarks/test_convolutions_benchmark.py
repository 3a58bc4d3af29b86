"""The benchmark of convolutions checks what it times, and its verdicts follow from its figures."""

import json
from pathlib import Path

import numpy as np
import pytest

import bench_convolutions as convolutions
from bench_convolutions import PASSES, Arrays, Layer
from bench_harness import report, verdicts
from bench_kernels import torch_or_reason

LAYER = Layer((3, 5), 7, 3, 2, 1, 2)


def test_candidates_multiply_as_often_as_a_layer_says() -> None:
    arrays = Arrays(LAYER)
    assert arrays.gy.shape == (2, 5, 4, 4)
    for call in arrays.products().values():
        left, right = call.args
        assert 2e-9 * left.size * right.shape[1] == pytest.approx(LAYER.gflop)


def test_pytorch_computes_the_same() -> None:
    torch, reason = torch_or_reason()
    if torch is None:
        pytest.skip(reason)
    arrays = Arrays(LAYER)
    assert arrays.wrong() == dict.fromkeys(PASSES, 0)
    found = {name: call() for name, call in arrays.torch(torch).items()}
    dx, dweight = found["to input"][0], found["to weights"][1]
    for name, theirs in zip(PASSES, (found["forward"], dweight, dx), strict=True):
        np.testing.assert_allclose(arrays.results[name], theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("value", [0, np.nan])
def test_wrong_results_are_told(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    conv = convolutions.kernels.load("convolution")
    monkeypatch.setattr(conv, "conv2d", lambda x, weight, bias, out, stride, padding, relu: out.fill(value))
    assert Arrays(LAYER).wrong() == {"forward": 2 * 5 * 4 * 4, "to weights": 0, "to input": 0}


def test_figures_are_written_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "pin_to_own_core", lambda world: 0)  # other tests need the other cores
    monkeypatch.setattr(convolutions, "LAYERS", (LAYER, Layer((64, 64), 4, 3, 1, 1, 1)))
    path = tmp_path / "convolutions.json"
    assert convolutions.main(["--turns", "2", "--json", str(path)]) == 0
    assert "64 to 64, 3 x 3, on 4 x 4, batch 1" in capsys.readouterr().out
    found = json.loads(path.read_text())
    results = {"convolutions": [found], "machine": {}}
    for share, peer, met in ((0.9, 0.9, [False, True]), (0.8, 1.2, [True, False])):
        for row in found["rows"]:
            row["share"], row["peer_ratio"] = share, peer
        assert [each.met for each in verdicts.verdicts(results) if each.target == "S8"] == met
    found["rows"][0]["peer_ratio"] = None  # without PyTorch
    assert [each.measured is None for each in verdicts.verdicts(results) if each.target == "S8"] == [True, False]
    assert "3 x 3, on 4 x 4, batch 1: to weights |" in report._convolution_table(results)
