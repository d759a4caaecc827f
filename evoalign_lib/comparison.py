"""`evoalign compare`: compare the weights of two models trained from one base with the nulls of `analysis.geometry`.

It takes folders, adapters and ledgers of any size (see `weights`), prints a table, and says in sentences which of the
numbers a random direction, or any ES with the same settings, would show as well.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evoalign_lib import drawing, ledger, update_rules
from evoalign_lib.analysis import geometry
from evoalign_lib.weight_files import StateDict, untied, weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_SIZE = "#D9D9D9"  # colour of the nulls: shares of sizes, bands of random directions
_LOOKS = (("a", "#0A332C", "o", -0.14), ("b", "#7CB9BF", "s", 0.14))  # end, colour, marker, shift
_MANY = 12  # most layers whose tick labels fit side by side
_LEAST_SHARE = 0.05  # of the entries: if rounding hides fewer, no sentence mentions it


@dataclass(frozen=True)
class Expected:
    """The norm that an ES run has under any reward."""

    norm: float
    """the expected norm, weight units"""
    formula: str
    """the formula it was computed with"""
    settings: str
    """the settings in the formula"""
    d: float
    """number of independent coordinates, which determines the spread"""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Measurements of two models trained from one base."""

    sources: tuple[str, str, str]
    """base, A and B, as the user named them"""
    tensors: geometry.Displacements
    """sums for each tensor"""
    expected: tuple[Expected | None, Expected | None]
    """norm of ES expected for A and for B, if their settings are known"""
    dtypes: tuple[frozenset[str], frozenset[str]]
    """dtypes in which A and B are stored"""
    shared_noise: bool
    """whether both are ES runs with the same run key, so that they drew the same noise"""

    def table(self) -> DataFrame:
        """Return the quantities of A and B as text, one row per quantity."""
        import pandas as pd

        layers, d = self.tensors.by("layer"), self.tensors.by("all")
        null = geometry.size_null(layers.entries)
        ratios = [np.nan if e is None else n / e.norm for e, n in zip(self.expected, d.norms[0], strict=True)]
        numbers = {
            "norm |D|": d.norms[0],
            "norm over that of the start": d.relative_norms[0],
            "norm over its formula for ES": ratios,
            f"{'tied embedding' if self.tensors.tied else 'head'}: share of |D|^2 over share of d": (
                geometry.head_concentration(self.tensors)
            ),
            f"Gini of layers (random: up to {null.gini:.3g})": [
                geometry.gini(share, layers.entries) for share in layers.shares.T
            ],
            f"distance of layers from sizes (random: up to {null.distance:.3g})": self._distances(),
        }
        if not any(self.expected):
            del numbers["norm over its formula for ES"]
        rows = {"entries d": [f"{self.tensors.d:,}"] * 2}
        rows |= {name: ["" if np.isnan(x) else f"{x:.3g}" for x in pair] for name, pair in numbers.items()}
        for dtype in self.tensors.moved:
            how = "as" if dtype == "float32" else "rounded to"
            rows[f"unchanged entries, {how} {dtype}"] = [f"{100 * x:.1f} %" for x in d.unmoved(dtype)[0]]
        return pd.DataFrame([(name, *pair) for name, pair in rows.items()], columns=["quantity", "A", "B"])

    def _distances(self) -> list[float]:
        layers = self.tensors.by("layer")
        return [geometry.total_variation(share, layers.size_shares) for share in layers.shares.T]

    def frame(self, key: str | None = None) -> DataFrame:
        """Return one row per group of `Displacements.by`, or per tensor: the data of the figure, and more.

        Norms are in weight units; shares and unchanged entries are fractions; cosine_std is for random directions.
        """
        import pandas as pd

        found = self.tensors.by(key) if key else self.tensors
        cosines = geometry.cosines(self.tensors, key or (lambda name: name))
        columns = {key or "tensor": found.names, "entries": found.entries, "size_share": found.size_shares}
        for k, end in enumerate("ab"):
            columns[f"share_{end}"] = found.shares[:, k]
            columns[f"norm_{end}"] = found.norms[:, k]
            columns[f"relative_norm_{end}"] = found.relative_norms[:, k]
            columns |= {f"unchanged_{dtype}_{end}": found.unmoved(dtype)[:, k] for dtype in found.moved}
        columns["cosine"] = [cosines[name].value for name in found.names]
        columns["cosine_std"] = [cosines[name].std for name in found.names]
        return pd.DataFrame(columns)

    def sentences(self) -> list[str]:
        """Return sentences on what the numbers show and, above all, what they do not show."""
        said = []
        for k, end in enumerate("AB"):
            if not self.tensors.by("all").norms[0, k]:
                said.append(f"{end} has the weights of the base: nothing moved.")
                continue
            said += [self._about_norm(k)] if self.expected[k] is not None else []
            said += [self._about_shares(k), *self._about_rounding(k)]
        return [*said, self._about_cosine()]

    def _about_norm(self, k: int) -> str:
        expected, norm = self.expected[k], self.tensors.by("all").norms[0, k]
        (low, high), ratio = geometry.norm_band(expected.d), norm / expected.norm
        lies = f"outside {low:.4f} to {high:.4f}, where 95 % of the runs lie whose rewards mean nothing"
        if low <= ratio <= high:
            lies = f"within {low:.4f} to {high:.4f}: any ES with these settings moves as far, whatever it rewards"
        formula = f"{expected.formula} = {expected.norm:.3g} ({expected.settings})"
        return f"The norm of {'AB'[k]}, {norm:.3g}, is {ratio:.4f} times {formula}, {lies}."

    def _about_shares(self, k: int) -> str:
        layers, end, distance = self.tensors.by("layer"), "AB"[k], self._distances()[k]
        null = geometry.size_null(layers.entries).distance
        most = int(np.argmax(layers.shares[:, k] - layers.size_shares))
        share, size = 100 * layers.shares[most, k], 100 * layers.size_shares[most]
        are, how = "are", f"that {end} moves everywhere says nothing about what it learned."
        if distance > null:
            are, how = "are not", f"{layers.names[most]} has {share:.1f} % of |D|^2 and {size:.1f} % of the entries."
            how += " Compare with the shares of the gradient."
        stay = f"(distance {distance:.3g}; 95 % of random directions stay below {null:.3g})"
        return f"The shares of layers of {end} {are} those of its sizes {stay}: {how}"

    def _about_rounding(self, k: int) -> list[str]:
        all_, end, halves = self.tensors.by("all"), "AB"[k], sorted(self.dtypes[k] - {"float32"})
        exact, rounded = (all_.unmoved(dtype)[0, k] for dtype in ("float32", "bfloat16"))
        how = "the difference is rounding, not sparse training."
        if halves:
            how = f"it is stored as {' and '.join(halves)}, which lost what moved by less than its rounding."
        shares = f"{100 * exact:.1f} % of the entries are unchanged, and {100 * rounded:.1f} % in bfloat16"
        return [f"Of {end} {shares}: {how}"] if halves or rounded - exact > _LEAST_SHARE else []

    def _about_cosine(self) -> str:
        found = geometry.cosine(self.tensors)
        if np.isnan(found.value):
            return "The cosine is not defined, since one of the two did not move."
        value, band = self._cosine()
        if self.shared_noise:
            why = "A and B drew the same noise (one run key), so that the band of independent random directions"
            return f"The cosine is {value}. {why}, ±{band}, does not apply."
        where, what = "outside", f"the two {'share a direction' if found.value > 0 else 'have opposite parts'}"
        what += ". Compare its size with the cosine of two runs of one arm."
        if abs(found.value) <= found.band():
            where, what = "within", "it says nothing about whether the two solutions differ. Means of several runs of "
            what += "each would."
        return f"The cosine {value} lies {where} the band of a random direction, ±{band}: {what}"

    def _cosine(self) -> tuple[str, str]:
        """Return the cosine and its band for random directions, to two significant digits of the band."""
        found = geometry.cosine(self.tensors)
        digits = max(1, 1 - int(np.floor(np.log10(found.band())))) if found.band() > 0 else 1
        return f"{found.value:.{digits}f}", f"{found.band():.{digits}f}"

    def text(self) -> str:
        """Return the table, the cosine and the sentences as text for a terminal."""
        caption = "base {}\nA    {}\nB    {}".format(*self.sources)
        parts, found = [f"{caption}\n\n{self.table().to_string(index=False)}"], geometry.cosine(self.tensors)
        if not np.isnan(found.value):
            value, band = self._cosine()
            parts.append(f"cosine of A and B: {value}, random directions ±{band} (95 %), z {found.z:.2f}")
        return "\n\n".join([*parts, "\n".join(self.sentences())])


def compare(base: str | os.PathLike[str], a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Measure how far and where two models moved from their base.

    If the head is tied to the embedding in some of them only, those have a head with the embedding's entries.

    Args:
        base, a, b: anything that `weights` opens; base is also the base of adapters and ledgers.

    Raises:
        ValueError: a model that cannot be opened, or names or shapes that differ. All but a ledger of another base is
            detected before any weights are read.
    """
    opened = [weights(base), *(weights(end, base) for end in (a, b))]
    start, one, other = opened = [untied(state, set().union(*opened)) for state in opened]
    geometry.check_same(*opened)
    return Comparison(
        sources=(str(base), str(a), str(b)),
        tensors=geometry.measure(start, [one, other]),
        expected=(_expected(one), _expected(other)),
        dtypes=(one.dtypes, other.dtypes),
        shared_noise=bool(one.run and other.run) and one.run.header["run_key"] == other.run.header["run_key"],
    )


def _expected(end: StateDict) -> Expected | None:
    """Return the norm expected from the coefficients of a ledger; None without a ledger, or if nothing moved."""
    run = end.run
    if run is None:
        return None
    settings, updates = run.settings, [c for _, c in ledger.updates(run, len(run.steps))]
    moving = sum(len(c) > 0 for c in updates)  # with a decay, tied populations are included as empty updates
    if not moving:
        return None
    decay = settings["anchor_decay"]
    # each later update keeps a share of 1 - lambda of a step's noise
    coefficients = [c * (1 - decay) ** later for later, c in enumerate(reversed(updates))] if decay else updates
    d = sum(int(np.prod(shape)) for shape in end.shapes.values())
    plain = {"antithetic": False, "fitness_shaping": update_rules.SHAPINGS[0], "alpha_schedule": "constant"}
    is_plain = all(settings[name] == value for name, value in plain.items())
    formula = "alpha sqrt(d T_eff / N)" if is_plain else "sqrt(d sum c^2)"
    said = f"alpha {settings['alpha']:g}, T_eff {moving}, N {settings['population_size']}"
    if decay:
        formula, said = "sqrt(d sum_t c_t^2 (1 - lambda)^(2 (T - t)))", f"{said}, lambda {decay:g}"
    # entries that count twice leave the mean as it is and widen the spread
    independent = geometry.tied_d(end.shapes) if settings["noise"] == "tied" else d**2 / (d + 2 * end.repeated)
    return Expected(geometry.norm_of_coefficients(coefficients, d), formula, said, independent)


WRITTEN = ("compare.png", "compare.pdf", "compare.csv", "tensors.csv")


def write(comparison: Comparison, out: str | os.PathLike[str]) -> list[Path]:
    """Write the files WRITTEN into a folder: the figure in two formats, a table by layer and a table by tensor.

    Existing files of these names are replaced.

    Args:
        comparison: the comparison to write.
        out: the folder, created if it is missing.

    Returns:
        The paths of the files.

    Raises:
        OSError: the files cannot be written.
    """
    from matplotlib import pyplot as plt

    Path(out).mkdir(parents=True, exist_ok=True)
    fig = figure(comparison)
    picture, page, *tables = written = [Path(out, name) for name in WRITTEN]
    picture.write_bytes(drawing.png(fig, 200))
    fig.savefig(page, metadata={"CreationDate": None, "ModDate": None})
    plt.close(fig)
    for path, key in zip(tables, ("layer", None), strict=True):
        comparison.frame(key).to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    return written


def figure(comparison: Comparison) -> Figure:
    """Draw the shares of layers next to their size shares, and cosines by layer in the band of random directions."""
    from matplotlib import pyplot as plt

    drawing.use()
    rows = comparison.frame("layer")
    x, every = np.arange(len(rows)), -(-len(rows) // _MANY)  # of many layers only every k-th is named, other groups all
    named = [not name.startswith("layer ") or int(name.split()[1]) % every == 0 for name in rows["layer"]]
    fig, (left, right) = plt.subplots(1, 2, figsize=(drawing.PAGE, 2.5))
    sizes = "share of the entries, $d_l/d$"
    left.hlines(rows["size_share"], x - 0.45, x + 0.45, color=_SIZE, lw=4, label=sizes, capstyle="butt")
    for end, color, marker, shift in _LOOKS:
        shares = rows[f"share_{end}"].where(rows[f"share_{end}"] > 0)
        left.plot(x + shift, shares, color=color, marker=marker, ls="", label=f"{end.upper()}: $|D_l|^2/|D|^2$")
    left.set(yscale="log", ylabel="share of the layer")
    reach = geometry.Cosine(0.0, 1, 1.0).band() * rows["cosine_std"]
    right.bar(x, 2 * reach, 0.9, -reach, color=_SIZE, label="95 % of random directions")
    right.plot(x, rows["cosine"], color="black", marker="D", ls="", label="cosine of A and B")
    right.axhline(0, color="black", lw=0.6)
    right.set(ylabel="cosine of the displacements")
    if reach.notna().any():  # the bands of small and large layers differ by orders of magnitude
        right.set_yscale("symlog", linthresh=float(reach.min()))
    for ax in (left, right):
        ax.set_xticks(x[named], rows["layer"][named].str.removeprefix("layer "), rotation=90 if every > 1 else 0)
        ax.set_xlabel("layer")
        ax.grid(axis="x", visible=False)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1.0, handletextpad=0.4)
    return fig
