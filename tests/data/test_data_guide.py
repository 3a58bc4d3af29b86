"""The names in docs/data.md exist."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "data.md"


def test_every_name_of_the_guide_exists() -> None:
    from hpcdp import data

    text = GUIDE.read_text()
    called = set(re.findall(r"`([A-Z]\w+|read_\w+|split_\w+)\(", text)) | set(re.findall(r"data\.(\w+)\(", text))
    assert {"ShardedSampler", "load", "read_csv"} <= called
    assert not [name for name in called if not hasattr(data, name)]
