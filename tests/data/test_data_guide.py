"""The examples of docs/data.md run."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "data.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.splitlines()[-1].strip()[:30])
def test_example(example: str) -> None:
    exec(compile(example, str(GUIDE), "exec"), {"__name__": "example"})


def test_every_name_of_the_guide_exists() -> None:
    from hpcdp import data

    assert len(EXAMPLES) == 3
    text = GUIDE.read_text()
    called = set(re.findall(r"`([A-Z]\w+|read_\w+|split_\w+)\(", text)) | set(re.findall(r"data\.(\w+)\(", text))
    assert {"ShardedSampler", "load", "read_csv"} <= called
    assert not [name for name in called if not hasattr(data, name)]
