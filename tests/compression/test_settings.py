"""A codec by its name and settings."""

import numpy as np
import pytest

from hpcdp.compression import CODECS, BFloat16, Compression, Float16, OneBit, TopK, TwoBit
from hpcdp.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("fp16", Compression(Float16())),
        ("bf16", Compression(BFloat16())),
        ("2bit", Compression(TwoBit())),
        ("2bit:threshold=0.5", Compression(TwoBit(0.5))),
        ("1bit:feedback=0", Compression(OneBit(), feedback=0)),
        ("topk:ratio=0.05,inside_nodes=on", Compression(TopK(0.05), inside_nodes=True)),
        (TopK(0.2), Compression(TopK(0.2))),
        (Compression(TwoBit(2.0)), Compression(TwoBit(2.0))),
        (Compression(TopK(np.float64(0.1)), feedback=np.float32(0.5)), Compression(TopK(0.1), feedback=0.5)),
        (TwoBit(np.float32(0.5)), Compression(TwoBit(0.5))),
        (OneBit(np.int64(0), np.float64(2)), Compression(OneBit(0.0, 2.0))),
        (None, None),
    ],
)
def test_what_a_trainer_takes(given, wanted):
    assert Compression.of(given) == wanted
    if wanted is not None:
        assert Compression.of(str(wanted)) == wanted
        assert str(Compression.of(given)) == str(wanted)  # which ranks compare, and servers are told


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("3bit", "expected one of fp16, bf16, 2bit, 1bit, topk, got '3bit'"),
        ("", "got ''"),
        (
            "topk:k=5",
            "compression topk: expected ratio=NUMBER or feedback=NUMBER or inside_nodes=on|off, each once, got 'k=5'",
        ),
        ("topk:ratio=many", "got 'ratio=many'"),
        ("topk:ratio", "got 'ratio'"),
        ("fp16:feedback=no", "got 'feedback=no'"),
        ("fp16:feedback=2", "compression [feedback]: expected a number in [0, 1], got 2.0"),
        ("2bit:feedback=0,feedback=1", "each once, got 'feedback=1'"),
        ("2bit:threshold=1e300", "got 1e+300"),
        ("2bit:threshold=1e-50", "got 1e-50"),
        ("fp16:inside_nodes=yes", "got 'inside_nodes=yes'"),
        ("2bit:threshold=-1", "2bit [threshold]"),
        ("1bit:magnitude=2", "1bit [magnitude]: expected 1 without a threshold, got 2.0"),
        (2, "got 2"),
        (TwoBit, "got <class"),
    ],
)
def test_what_it_refuses(given, named):
    with pytest.raises(ConfigError) as caught:
        Compression.of(given)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"type": "2bit", "threshold": 0.25}, Compression(TwoBit(0.25))),
        ({"type": "2bit"}, Compression(TwoBit(0.5))),
        ({"type": "topk", "ratio": 0.1, "feedback": 0.5}, Compression(TopK(0.1), 0.5)),
    ],
)
def test_a_dict_as_mxnet_takes(given, same):
    assert Compression.of(given) == same


def test_settings_that_differ_a_little_do_not_look_alike():
    assert str(Compression(TopK(0.0105))) != str(Compression(TopK(0.01050001)))


def test_settings_of_another_kind_are_refused():
    for make in (
        lambda: TwoBit(threshold="0.5"),
        lambda: TopK(ratio="0.5"),
        lambda: Compression(TwoBit(), feedback="x"),
        lambda: Compression(TwoBit(), inside_nodes="off"),
        lambda: Compression("2bit"),
        lambda: Compression(TwoBit),
    ):
        with pytest.raises(ConfigError):
            make()


def test_every_codec_has_its_name():
    assert all(Compression.of(name).codec.name == name for name in CODECS)
