"""What scripts for torch's wrapper pass to it: this one takes it, or says what to do instead."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import hpcdp.torch
from hpcdp.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device_ids": [0]}, r"\[device_ids\]: expected no argument .* leave it out: call module.to"),
        ({"process_group": None}, r"\[process_group\]: expected no argument .* pass world=world.split"),
        ({"bukket_cap_mb": 25}, r"unknown argument 'bukket_cap_mb' .*; did you mean 'bucket_cap_mb'\? valid: module, "),
    ],
)
def test_arguments_that_there_are_not_are_refused_with_what_to_do(given, message):
    with pytest.raises(ConfigError, match=message):
        hpcdp.torch.DistributedDataParallel(torch.nn.Linear(3, 2), **given)


def test_every_argument_of_torchs_wrapper_is_taken_or_refused_by_name():
    ours, theirs = (
        inspect.signature(each.DistributedDataParallel).parameters for each in (hpcdp.torch, torch.nn.parallel)
    )
    for name in theirs.keys() - ours.keys():
        with pytest.raises(ConfigError, match=rf"\[{name}\]: expected no argument of torch"):
            hpcdp.torch.DistributedDataParallel(torch.nn.Linear(3, 2), **{name: None})
