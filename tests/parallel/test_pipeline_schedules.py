"""Schedules: every stage computes everything, nothing waits for ever, and little is kept."""

import pytest

from hpcdp.parallel import SCHEDULES
from hpcdp.parallel.pipeline import Action

SIZES = [(s, m) for s in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 8, 11)]


def run(name: str, num_stages: int, num_micro: int) -> tuple[int, list[int]]:
    """How many time slots it takes where each forward and each backward takes one, and how much each stage kept."""
    left = [SCHEDULES[name](stage, num_stages, num_micro)[::-1] for stage in range(num_stages)]
    done: set[tuple[int, Action]] = set()
    kept, most, slots = [0] * num_stages, [0] * num_stages, 0
    while any(left):
        now = []
        for stage, actions in enumerate(left):
            source = stage - 1 if actions and actions[-1].is_forward else stage + 1
            if actions and (not 0 <= source < num_stages or (source, actions[-1]) in done):
                if not actions[-1].is_forward:
                    assert (stage, Action(True, actions[-1].micro)) in done
                kept[stage] += 1 if actions[-1].is_forward else -1
                most[stage] = max(most[stage], kept[stage])
                now.append((stage, actions.pop()))
        assert now, f"stages wait for each other: {left}"
        done.update(now)
        slots += 1
    assert len(done) == 2 * num_stages * num_micro and kept == [0] * num_stages
    return slots, most


@pytest.mark.parametrize(("num_stages", "num_micro"), SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_batch_takes_as_long_as_the_formula_says(name: str, num_stages: int, num_micro: int) -> None:
    slots, _ = run(name, num_stages, num_micro)
    assert slots == 2 * (num_micro + num_stages - 1)


@pytest.mark.parametrize(("num_stages", "num_micro"), SIZES)
def test_what_a_stage_keeps(num_stages: int, num_micro: int) -> None:
    assert run("gpipe", num_stages, num_micro)[1] == [num_micro] * num_stages
    assert run("1f1b", num_stages, num_micro)[1] == [min(num_micro, num_stages - stage) for stage in range(num_stages)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_backwards_come_in_the_order_of_the_micro_batches(name: str) -> None:
    for stage in range(3):
        actions = SCHEDULES[name](stage, 3, 5)
        assert [each.micro for each in actions if not each.is_forward] == list(range(5))
