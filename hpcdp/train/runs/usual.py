"""What a run does where nobody has said otherwise, which depends on its network and on who updates.

Rates were found on the sets that ship with the package, docs/models.md says how; those of another set may be others.
"""

from __future__ import annotations

from typing import Any

LEARNING_RATE, LATE_LEARNING_RATE, LARS_LEARNING_RATE = 0.05, 0.03, 1.0
"""For images. Late gradients push on when they should turn back, and so bear less; that of LARS is a part of another
length."""
SEQUENCE_LEARNING_RATES = {"char_lstm": 0.01, "gpt": 0.003}
"""Of AdamW and Adam, by network."""
SEQUENCE_CLIP_NORM = 1.0
"""Gradients through many steps are small but for a few that are large (Pascanu, Mikolov and Bengio 2013)."""

RATES = (
    f"{LEARNING_RATE}, with kv_store=dist_async {LATE_LEARNING_RATE}, with optimizer=lars {LARS_LEARNING_RATE:g}, "
    f"with adam and adamw {' and '.join(f'{lr} of {name}' for name, lr in SEQUENCE_LEARNING_RATES.items())}"
)
"""The rates, in words."""

SEQUENCE_MODELS = tuple(SEQUENCE_LEARNING_RATES)
TEXTS = ("shakespeare",)
"""Data sets that are for them alone."""


def usual(model: str, optimizer: str | None, kv_store: str | None) -> dict[str, Any]:
    """The values of the settings that depend on others, by name; those that were said count for the rest."""
    is_sequence = model in SEQUENCE_MODELS
    optimizer = optimizer or ("adamw" if is_sequence else "sgd")
    if is_sequence and optimizer in ("adam", "adamw"):
        lr = SEQUENCE_LEARNING_RATES[model]
    elif kv_store == "dist_async":
        lr = LATE_LEARNING_RATE
    else:
        lr = LARS_LEARNING_RATE if optimizer == "lars" else LEARNING_RATE
    return {
        "data": TEXTS[0] if is_sequence else "digits",
        "optimizer": optimizer,
        "lr": lr,
        "shift": 0 if is_sequence else 2,
        "clip_norm": SEQUENCE_CLIP_NORM if is_sequence and kv_store is None else None,
    }
