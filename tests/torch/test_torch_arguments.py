"""What scripts for torch's wrapper pass to it: this one takes it, or says what to do instead."""

import inspect

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import hpcdp.torch
from hpcdp.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"device_ids": [0]}, {"operation": "DistributedDataParallel", "where": "device_ids"}),
        (
            {"process_group": None},
            {"operation": "DistributedDataParallel", "where": "process_group", "remedy": "world=world.split"},
        ),
        (
            {"bukket_cap_mb": 25},
            {
                "operation": "unknown argument 'bukket_cap_mb'",
                "where": "DistributedDataParallel",
                "remedy": "bucket_cap_mb",
            },
        ),
    ],
)
def test_arguments_that_there_are_not_are_refused_with_what_to_do(given, fields):
    with raises(ConfigError, **fields):
        hpcdp.torch.DistributedDataParallel(torch.nn.Linear(3, 2), **given)


def test_every_argument_of_torchs_wrapper_is_taken_or_refused_by_name():
    ours, theirs = (
        inspect.signature(each.DistributedDataParallel).parameters for each in (hpcdp.torch, torch.nn.parallel)
    )
    for name in theirs.keys() - ours.keys():
        with raises(ConfigError, operation="DistributedDataParallel", where=name):
            hpcdp.torch.DistributedDataParallel(torch.nn.Linear(3, 2), **{name: None})
