"""The learning curve of a run as PNG and as a standalone HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_COLOUR = "#0072B2"  # Okabe-Ito blue and orange: told apart by colour-blind readers
TRAIN_COLOUR = "#E69F00"
SMOOTHING_STEPS = 9


@dataclass(frozen=True)
class Curve:
    """What is drawn. Rates are shares in [0, 1]; steps count policy updates."""

    title: str
    evaluations: Sequence[tuple[int, float, int]]  # (step, held-out solve rate, trials)
    training: Sequence[tuple[int, float]]  # (step, solve rate of the training trials)


def smooth(points: Sequence[tuple[int, float]], window: int = SMOOTHING_STEPS) -> list[tuple[int, float]]:
    """Centred moving average; the window shrinks at the ends."""
    half = window // 2
    rates = [rate for _, rate in points]
    return [
        (step, sum(part) / len(part))
        for i, (step, _) in enumerate(points)
        if (part := rates[max(0, i - half) : i + half + 1])
    ]


def standard_error(rate: float, num: int) -> float:
    """Binomial standard error of a solve rate over `num` trials."""
    return float((rate * (1 - rate) / num) ** 0.5) if num else 0.0


def write_png(curve: Curve, path: Path) -> None:
    """Draw to `path` without a display."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=130)
    if curve.training:
        axes.plot(*zip(*curve.training, strict=True), ".", color=TRAIN_COLOUR, alpha=0.35, markersize=4)
        axes.plot(
            *zip(*smooth(curve.training), strict=True),
            "-",
            color=TRAIN_COLOUR,
            label="training trials (moving average)",
        )
    if curve.evaluations:
        steps, rates, counts = zip(*curve.evaluations, strict=True)
        errors = [standard_error(r, n) for r, n in zip(rates, counts, strict=True)]
        axes.errorbar(steps, rates, yerr=errors, fmt="o-", color=HELD_OUT_COLOUR, capsize=3, label="held-out tasks")
    axes.set(xlabel="policy update", ylabel="solve rate at temperature 1", title=curve.title, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write_html(curve: Curve, path: Path) -> None:
    """One file that opens without a network."""
    import plotly.graph_objects as go

    figure = go.Figure()
    if curve.training:
        steps, rates = zip(*smooth(curve.training), strict=True)
        figure.add_scatter(x=steps, y=rates, name="training trials (moving average)", line_color=TRAIN_COLOUR)
    if curve.evaluations:
        steps, rates, counts = zip(*curve.evaluations, strict=True)
        errors = [standard_error(r, n) for r, n in zip(rates, counts, strict=True)]
        figure.add_scatter(
            x=steps,
            y=rates,
            error_y={"array": errors},
            name="held-out tasks",
            mode="lines+markers",
            line_color=HELD_OUT_COLOUR,
        )
    figure.update_layout(
        title=curve.title,
        xaxis_title="policy update",
        yaxis={"title": "solve rate at temperature 1", "range": [0, 1]},
        template="plotly_white",
    )
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))
