"""The benchmark of hybridize() compares what it says, tells wrong bits, and its verdicts follow from its figures."""

import json
from pathlib import Path

import numpy as np
import pytest

import bench_hybrid as hybrid
from bench_harness import report, verdicts
from hpcdp import nn


def test_every_candidate_computes_the_documents_network() -> None:
    net = nn.models.mlp(512, 2, (256, 128))
    for param in net.parameters()[1::2]:
        param.data[...] = 0.1
    x = np.random.default_rng(0).standard_normal((1, 512)).astype(np.float32)
    thin = hybrid.bare(net, x)["thin NumPy"]()
    np.testing.assert_allclose(thin, net(x).data, rtol=1e-5)


def test_wrong_bits_are_told() -> None:
    net, other = nn.models.mlp(6, 3, (5,)), nn.models.mlp(6, 3, (5,))
    x = np.ones((2, 6), np.float32)
    other.hybridize()
    assert hybrid.wrong(net, other, x, True) == hybrid.wrong(net, other, x, False) == 0
    other.parameters()[-1].data[0] += 1e-3
    assert hybrid.wrong(net, other, x, False) == 2


@pytest.mark.thorough
def test_figures_are_written_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "pin_to_own_core", lambda world: 0)  # other tests need the other cores
    path = tmp_path / "hybrid.json"
    assert hybrid.main(["--turns", "2", "--brief", "--json", str(path)]) == 0
    assert "1000 calls of the MLP 512-256-128-2" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["rows"][0]["median_us"].keys() >= {"products", "products, bound", "thin NumPy", "eager", "replay"}
    results = {"hybrid": [found], "machine": {}}
    for ratio, met in ((1.0, True), (0.5, False)):
        found["rows"][0]["ratio"]["products"] = ratio
        found["rows"][0]["eager_over_torch"] = ratio * 1.5
        judged = [each for each in verdicts.verdicts(results) if each.target == "S12"]
        assert [each.met for each in judged[:2]] == [met, not met]
    assert "| MLP 512-256-128-2, batch 1, with backward |" in report._hybrid_table(verdicts.hybrid_rows(results))
