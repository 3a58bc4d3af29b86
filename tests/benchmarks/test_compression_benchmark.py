"""Steps with every codec, turn by turn."""

import argparse
from typing import Any

import numpy as np
import pytest
from raises import raises

import bench_compression as compression
import bench_overlap as overlap
from hpcdp import nn
from hpcdp.comm import thread_comm
from hpcdp.compression import OneBit, TwoBit, pays_below
from hpcdp.errors import ConfigError

TINY = overlap.Model("a model", lambda: nn.models.mlp(6, 10, (40, 50), seed=0), (6,), 4)


@pytest.mark.parametrize(("n", "ranks_per_node"), [(2, 1), (4, 2), (5, 2)])
def test_what_hosts_send(n: int, ranks_per_node: int) -> None:
    rows = thread_comm.run(n, lambda world: compression.measure(world, TINY, ["2bit", "fp16"], 2, 2), ranks_per_node)
    assert all(row["codecs"].keys() == {"none", "2bit", "fp16"} for row in rows)
    found = rows[0]["codecs"]
    assert all(each["steps_s"] > 0 for each in found.values())
    assert found["none"]["ratio"] == 1
    assert found["fp16"]["sent_mb"] == pytest.approx(found["none"]["sent_mb"] / 2)
    assert found["none"]["sent_mb"] / 17 < found["2bit"]["sent_mb"] < found["none"]["sent_mb"] / 14
    assert found["none"]["pays_below_mb_s"] is None
    assert found["fp16"]["pays_below_mb_s"] > 1


def test_the_table_is_narrow() -> None:
    codec = {"steps_s": 1234.5, "ratio": 12.34, "sent_mb": 123.456, "pays_below_mb_s": 1250.0}
    place: dict[str, Any] = {"hosts": 4, "ranks_per_node": 2, "rate": "100mbit", "library": "A library"}
    place |= {"link_mb_s": {"one_way": 12.0, "both_ways": 12.0}, "rows": [{"model": "a model", "codecs": {}}]}
    place["rows"][0]["codecs"] = {"none": codec | {"pays_below_mb_s": None}, "topk:ratio=0.2": codec}
    lines = compression.table(place).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["topk:ratio=0.2", "1234.50", "12.34", "123.456", "10288.0", "10.0", "Gbit/s"]


def test_slower_codecs_pay_on_slower_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdp.compression.coding_s", lambda codec: (1e-3, 0.5e-3))
    nbytes = 4 * 2**18
    left = nbytes - TwoBit().nbytes(2**18, np.dtype("f4"))
    assert pays_below(TwoBit(), 2) == pytest.approx(left / (1e-3 + 1.5 * 0.5e-3))
    assert pays_below("1bit", 2) == pays_below(OneBit(), 2) > pays_below(TwoBit(), 2)
    for wrong in ((None, 2), ("2bit", 1)):
        with raises(ConfigError, operation="pays_below", expected=2):
            pays_below(*wrong)
    assert pays_below(TwoBit(), 4) == pytest.approx(1.5 * left / (1e-3 + 1.75 * 0.5e-3))


def test_ranks_that_send_no_messages_are_refused() -> None:
    args = argparse.Namespace(models="lenet", codecs=["2bit"], turns=1, steps=1, json=None)
    with raises(ConfigError, operation="compression", where="ranks", remedy="HPCDP_RANKS_PER_NODE=1"):
        compression.job(args)


@pytest.mark.parametrize(
    ("main", "given", "fields"),
    [
        (compression.main, ["--codecs", "3bit"], {"operation": "compression", "expected": "fp16"}),
        (compression.main, ["--models", "huge"], {"operation": "unknown model 'huge'"}),
    ],
)
def test_what_is_refused(main: Any, given: list[str], fields: dict[str, object]) -> None:
    with raises(ConfigError, **fields):
        main(given)
