"""Draw how a gradient travels over two nodes of two ranks: makes gradient.png beside this file.

python docs/images/gradient.py
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

BLUE, ORANGE, GRAY = "#4C78A8", "#F58518", "#666666"
STEPS = {50.5: "1  backward", 33: "2  reduce in\n    the node", 20: "3  rails between\n    the nodes", 7: "4  update"}

figure, axes = plt.subplots(figsize=(9, 5.4), dpi=110)
axes.set(xlim=(0, 100), ylim=(0, 60))
axes.axis("off")


def text(x, y, words, size=9, color="black", **settings):
    axes.text(x, y, words, fontsize=size, color=color, va="center", **{"ha": "center"} | settings)


def box(x, y, color, label, alpha=0.35):
    axes.add_patch(Rectangle((x, y), 12, 4, facecolor=color, alpha=alpha, edgecolor=color))
    text(x + 6, y + 2, label, 8.5)


def arrow(start, end, color, style="-|>"):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=12, color=color, lw=1.4))


for y, label in STEPS.items():
    text(0.5, y, label, 9.5, ha="left", weight="bold")
for node, x in enumerate((22, 63)):
    frame: dict[str, Any] = {"boxstyle": "round,pad=0.3", "facecolor": "#F7F7F7", "edgecolor": "#BBBBBB"}
    axes.add_patch(FancyBboxPatch((x - 2, 2), 37, 56, **frame))
    text(x + 17, 56.6, f"node {node}", 10, weight="bold")
    first, second = 2 * node, 2 * node + 1
    for rank, y in ((first, 50), (second, 44)):
        text(x - 0.5, y + 2, f"rank {rank}", 8.5, ha="left")
        box(x + 8, y, BLUE, f"g{rank}, shard 0")
        box(x + 21, y, ORANGE, f"g{rank}, shard 1")
    for color, owner, left in ((BLUE, first, x + 8), (ORANGE, second, x + 21)):
        middle = left + 6
        arrow((middle, 43.6), (middle, 36.2), color)
        box(left, 32, color, f"g{first} + g{second}")
        text(middle, 30.6, f"by rank {owner}", 7, GRAY)
        arrow((middle, 29.4), (middle, 22.6), color)
        box(left, 18, color, "sum of all 4", 0.6)
        arrow((middle, 17.6), (middle, 10.2), color)
        box(left, 6, color, "new weights", 0.9)
    text(x + 20.5, 4.3, "one copy a node, read by both ranks", 7, GRAY)
arrow((36, 26.6), (77, 26.6), BLUE, "<|-|>")
text(59, 27.9, "rail 0", 8, BLUE)
arrow((49, 24.4), (90, 24.4), ORANGE, "<|-|>")
text(60.2, 23.2, "rail 1", 8, ORANGE)
figure.savefig(Path(__file__).with_suffix(".png"), bbox_inches="tight", pad_inches=0.1)
