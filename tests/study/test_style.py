"""Looks: arms and decodings told apart, legends that fit, pictures in the colours of the figure."""

from io import BytesIO
from itertools import combinations

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
    lines = {line.get_label(): line.get_linestyle() for line in legend.get_lines()}
    assert len({lines[style.STROKES[name].label] for name in decodings}) == len(decodings)


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
    figure = Figure(figsize=(2, 2), layout="none")  # whatever style another test has left
    x, y = np.meshgrid(np.linspace(0, 1, 200), np.linspace(0, 1, 200))
    figure.add_axes([0, 0, 1, 1]).imshow(np.stack([x, y, 1 - x * y], -1))
    full = style.png(figure, style.SCREEN_DPI)
    assert style.embedded(figure) == full and Image.open(BytesIO(full)).mode == "RGB"


# Machado, Oliveira and Fernandes (2009): how dichromats see linear RGB
SEEN_BY = {
    "normal": np.eye(3),
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def _lab(color: str, eye: str) -> np.ndarray:
    """Return a colour in CIELAB, as it is seen: lightness from 0 to 100 first."""
    stored = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(stored <= 0.04045, stored / 12.92, ((stored + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SEEN_BY[eye]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_one_colour_has_one_meaning() -> None:
    arms = {look.color for look in style.ARMS.values()}
    others = [look.color for table in style.LOOKS for look in table.values()]
    assert len({*arms, *others}) == len(arms) + len(others)
    for color in others:
        assert min(np.linalg.norm(_lab(color, "normal") - _lab(arm, "normal")) for arm in arms) > 20, color


@pytest.mark.parametrize("eye", SEEN_BY)
@pytest.mark.parametrize("table", style.LOOKS, ids=lambda table: str(next(iter(table))))
def test_looks_of_one_table_can_be_told_apart_in_grey_and_by_every_eye(table: dict, eye: str) -> None:
    seen = [_lab(look.color, eye) for look in table.values()]
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(one - other) > 15 and abs(one[0] - other[0]) > 15
    for attribute in ("marker", "linestyle", "label"):
        assert len({getattr(look, attribute) for look in table.values()}) == len(table)
    (drawn,) = Figure().add_subplot().plot([0, 1], [0, 1], **next(iter(table.values())).line())
    assert drawn.get_color() == next(iter(table.values())).color


def test_arms_can_be_told_apart() -> None:
    looks = style.ARMS.values()
    assert len({look.marker for look in looks}) == len({look.label for look in looks}) == len(style.ARMS)
    compared = ("es", "es_shuffled", "es_sampled", "es_random", "grpo", "dr_grpo", "dapo", "base")
    assert len({style.ARMS[arm].color for arm in compared}) == len(compared)
    assert len({style.line("es", decoding)["linestyle"] for decoding in style.STROKES}) == len(style.STROKES)
    with pytest.raises(KeyError, match="no look for 'grppo'"):
        style.line("grppo")
