"""What all figures have in common. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import io

try:
    from matplotlib import colors, ticker
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("drawing figures needs matplotlib: pip install 'dasc[plot]'") from error

__all__ = ["BLUE", "GOLD", "GREY", "ORANGE", "Figure", "colors", "figure_bytes", "ticker"]

BLUE = "#3b6ea5"
ORANGE = "#c8553d"
GREY = "#8a8a8a"
GOLD = "#d9a21b"


def figure_bytes(name: str, figure: Figure) -> dict[str, bytes]:
    """``<name>.png`` and ``<name>.svg`` of a figure."""
    files = {}
    for suffix in ("png", "svg"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=160, bbox_inches="tight")
        files[f"{name}.{suffix}"] = buffer.getvalue()
    return files
