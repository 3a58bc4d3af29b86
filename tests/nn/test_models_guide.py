"""What docs/models.md says of networks is so."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_parameters_are_as_many_as_it_says():
    from hpcdp import nn

    shapes = {"char_lstm": ((64,), 62), "gpt": ((64,), 62), "resnet18_cifar": ((3, 32, 32), 10)}
    told = re.findall(r"^\| `(\w+)` \|.*\| ([\d,]+) for", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(name for name, _ in told) == sorted(nn.models.MODELS)
    for name, count in told:
        shape, classes = shapes.get(name, ((1, 28, 28), 10))
        net = nn.models.create(name, input_shape=shape, num_classes=classes, seed=0)
        assert sum(param.size for param in net.parameters()) == int(count.replace(",", ""))
