"""Looks: arms and decodings told apart, legends that fit, pictures in the colours of the figure."""

from io import BytesIO

import matplotlib
import numpy as np
import pytest
from evoalign_study import style
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from evoalign_lib import drawing


@pytest.mark.parametrize("decodings", [("greedy", "t0.6", "t1"), ("greedy",)])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("width", [style.COLUMN, style.PAGE])
def test_the_legend_names_every_arm_and_decoding_within_the_figure(
    count: int, decodings: tuple[str, ...], width: float
) -> None:
    arms = dict(list({"es": 16, "grpo": 16, "base": None, "es_random": 8, "grpo_random": 8, "sft": 8}.items())[:count])
    with matplotlib.rc_context(drawing._RC):
        figure = Figure(figsize=(width, 3))
        figure.add_subplot()
        style.legend(figure, arms, decodings)
        figure.draw_without_rendering()
    (legend,) = figure.legends
    shown = [text for text in legend.get_texts() if text.get_text() != " "]
    expected = {style.ARMS[arm].label + ("" if n is None else f" (n = {n})") for arm, n in arms.items()}
    assert {text.get_text() for text in shown} == expected | {style.STROKES[name].label for name in decodings}
    assert len(shown) == count + len(decodings)
    for text in shown:
        extent = text.get_window_extent()
        assert 0 <= extent.x0 and extent.x1 <= figure.bbox.width and 0 <= extent.y0


def test_dots_show_every_run_the_failed_ones_as_crosses_and_the_mean_of_all() -> None:
    axes = Figure().subplots()
    style.dots(axes, 2.0, [0.1, 0.5, 0.6], [True, False, False], "grpo")
    kept, failed = axes.collections
    assert kept.get_offsets().tolist() == [[2.0, 0.5], [2.0, 0.6]]
    assert failed.get_offsets().tolist() == [[2.0, 0.1]]
    (mean,) = axes.lines
    assert mean.get_xdata().tolist() == [2.0] and mean.get_ydata() == pytest.approx([0.4])
    assert mean.get_marker() == style.ARMS["grpo"].marker
    style.dots(axes, 2.0, [0.1, 0.5, 0.6, 0.6], [False] * 4, "grpo", width=0.4)
    places = axes.collections[2].get_offsets()[:, 0] - 2
    assert len(set(places)) == 4 and abs(places).max() <= 0.2  # none hides another
    style.dots(axes, 3.0, [0.1], [True], "es")  # an arm of which no run is left
    assert axes.lines[-1].get_ydata() == pytest.approx([0.1])


def _pixels(png: bytes) -> np.ndarray:
    return np.array(Image.open(BytesIO(png)).convert("RGB"), int)


def colourful(arms: tuple[str, ...]) -> Figure:
    """Curves with bands, and a legend in which each arm's colour fills few pixels."""
    figure = plt.figure(figsize=(style.PAGE, 2.4))
    for ax in figure.subplots(1, 3):
        for height, arm in enumerate(arms):
            ax.plot([0, 1, 2], [height, height + 1, height + 0.5], **style.line(arm))
            style.band(ax, [0, 1, 2], [height - 0.5] * 3, [height + 1] * 3, style.ARMS[arm].color)
    style.legend(figure, dict.fromkeys(arms, 8))
    return figure


def test_a_picture_in_a_notebook_has_the_colours_of_the_figure() -> None:
    arms = ("es", "es_shuffled", "es_sampled", "grpo", "dr_grpo", "dapo", "base")
    figure = colourful(arms)
    full, small = style.png(figure, style.SCREEN_DPI), style.embedded(figure)
    assert len(small) < 0.6 * len(full)
    assert abs(_pixels(full) - _pixels(small)).max() <= style.FURTHEST
    assert small == style.embedded(figure)
    picture = Image.open(BytesIO(small))
    assert picture.size == (round(style.PAGE * style.SCREEN_DPI), round(2.4 * style.SCREEN_DPI))
    shown = {tuple(pixel) for pixel in _pixels(small).reshape(-1, 3)}
    assert shown <= {tuple(pixel) for pixel in _pixels(full).reshape(-1, 3)}  # no colour is made up
    for arm in arms:
        color = np.array([int(style.ARMS[arm].color[i : i + 2], 16) for i in (1, 3, 5)])
        assert min(abs(color - pixel).max() for pixel in shown) <= 2, arm
    plt.close(figure)


def test_a_picture_of_too_many_colours_is_embedded_in_full_colour() -> None:
    figure = Figure(figsize=(2, 2))
    figure.set_layout_engine("none")  # whatever style another test has left
    x, y = np.meshgrid(np.linspace(0, 1, 200), np.linspace(0, 1, 200))
    figure.add_axes([0, 0, 1, 1]).imshow(np.stack([x, y, 1 - x * y], -1))
    full = style.png(figure, style.SCREEN_DPI)
    assert style.embedded(figure) == full and Image.open(BytesIO(full)).mode == "RGB"


def test_looks_can_be_told_apart_and_one_colour_has_one_meaning() -> None:
    arms, others = list(style.ARMS.values()), [look for table in style.LOOKS for look in table.values()]
    assert len({look.marker for look in arms}) == len({look.label for look in arms}) == len(arms)
    colors = [look.color for look in others] + [arm.color for arm in arms if not arm.null]
    assert len(set(colors)) == len(colors) and not set(colors) & {arm.color for arm in arms if arm.null}
    for table in style.LOOKS:
        for attribute in ("marker", "linestyle", "label"):
            assert len({getattr(look, attribute) for look in table.values()}) == len(table)
    assert len({style.line("es", decoding)["linestyle"] for decoding in style.STROKES}) == len(style.STROKES)
    with pytest.raises(KeyError, match="'grppo'"):
        style.line("grppo")
