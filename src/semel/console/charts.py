"""Small charts as SVG: no script, no style attribute, and gaps where nothing was measured. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from semel.core.value import value

#: Units of the drawing; a browser scales it to any width.
WIDTH, HEIGHT = 240, 44
#: Space above the highest point.
_AIR = 3


@value
class Series:
    """One value for each minute, oldest first; None: it was not measured."""

    name: str
    values: tuple[int | None, ...]
    #: What is counted, in a few words.
    means: str

    @property
    def last(self) -> int | None:
        """The newest value."""
        return next((each for each in reversed(self.values) if each is not None), None)

    @property
    def highest(self) -> int:
        """The highest value."""
        return max((each for each in self.values if each is not None), default=0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return all(each is None for each in self.values)


def bars(series: Series) -> Markup:
    """Draw a bar for each minute, and a pale ground where nothing was measured."""
    step = WIDTH / max(len(series.values), 1)
    parts = list(_gaps(series.values, step))
    for number, each in enumerate(series.values):
        if each:
            height = _scaled(each, series.highest)
            parts.append(_rect("bar", number * step + 0.5, HEIGHT - height, step - 1, height))
    return _drawing(series, parts)


def line(series: Series) -> Markup:
    """Draw a line through the minutes, broken where nothing was measured."""
    step = WIDTH / max(len(series.values), 1)
    parts = list(_gaps(series.values, step))
    for start, run in _runs(series.values):
        points = [((start + number + 0.5) * step, HEIGHT - 1 - _scaled(each, series.highest)) for number, each in run]
        if len(points) == 1:
            points = [(points[0][0] - step / 2, points[0][1]), (points[0][0] + step / 2, points[0][1])]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        ground = f"{points[0][0]:.1f},{HEIGHT} {drawn} {points[-1][0]:.1f},{HEIGHT}"
        parts.append(f'<polygon class="area" points="{ground}"/><polyline class="line" points="{drawn}"/>')
    return _drawing(series, parts)


def _drawing(series: Series, parts: Sequence[str]) -> Markup:
    said = Markup("{}, by minute, last hour; highest {}").format(series.name, series.highest)
    return Markup(  # noqa: S704 - numbers, and an escaped name
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'<line class="ground" x1="0" y1="{HEIGHT}" x2="{WIDTH}" y2="{HEIGHT}"/>{"".join(parts)}</svg>'
    )


def _gaps(values: Sequence[int | None], step: float) -> list[str]:
    drawn, start = [], None
    for number, each in enumerate((*values, 0)):
        if each is None and start is None:
            start = number
        elif each is not None and start is not None:
            drawn.append(_rect("gap", start * step, 0, (number - start) * step, HEIGHT))
            start = None
    return drawn


def _runs(values: Sequence[int | None]) -> list[tuple[int, list[tuple[int, int]]]]:
    runs: list[tuple[int, list[tuple[int, int]]]] = []
    for number, each in enumerate(values):
        if each is None:
            continue
        if number == 0 or values[number - 1] is None:
            runs.append((number, []))
        start, run = runs[-1]
        run.append((number - start, each))
    return runs


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _scaled(number: int, highest: int) -> float:
    return (HEIGHT - _AIR) * number / highest if highest else 0.0
