"""Draw docs/architecture.svg: the packages of frugal in their layers, and which imports which.

    python docs/architecture.py            # write the picture anew (make docs does)
    python docs/architecture.py --check    # exit code 1 when packages, imports or sizes are others

Read from what is there: layers from the import contract in pyproject.toml, files, lines and imports from the sources,
what a package is from the first sentence of its docstring. Imports that are written inside functions or behind
`TYPE_CHECKING` count too. Lines are shown to the nearest hundred.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = Path(__file__).with_suffix(".svg")

CELL, TOP, LEFT, NAME, SIZES = 20, 118, 12, 104, 150
INK, FAINT, BAND, BLUE = "#1c2430", "#667080", "#f1f4f8", (34, 94, 168)


@dataclass(frozen=True)
class Part:
    """A package or module directly in frugal/."""

    name: str
    layer: int
    files: int
    lines: int
    about: str
    imports: Counter[str]
    """Other part -> how many import statements name it."""


def layers() -> list[list[str]]:
    """Names of parts, top layer first, from the import contract."""
    with (ROOT / "pyproject.toml").open("rb") as handle:
        contracts = tomllib.load(handle)["tool"]["importlinter"]["contracts"]
    (found,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [re.split(r"\s*\|\s*", layer) for layer in found]


def imported_parts(tree: ast.AST) -> list[str]:
    """The part of frugal that each import statement of a module names."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            if node.module == "frugal":
                names += [f"frugal.{alias.name}" for alias in node.names]
            else:
                names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name.split(".")[1] for name in names if name.startswith("frugal.")]


def read_part(name: str, layer: int, known: set[str]) -> Part:
    """Count the files of one part and read its imports."""
    place = ROOT / "frugal" / name
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    imports: Counter[str] = Counter()
    lines, about = 0, ""
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines += len(text.splitlines())
        imports.update(part for part in imported_parts(tree) if part in known and part != name)
        if path in (place / "__init__.py", place.with_suffix(".py")):
            about = re.split(r"(?<=[.])\s", (ast.get_docstring(tree) or "").replace("\n", " "), maxsplit=1)[0]
    return Part(name, layer, len(files), lines, about.rstrip("."), imports)


def read_parts() -> list[Part]:
    """All parts in the order of the layers."""
    names = layers()
    known = {name for layer in names for name in layer}
    return [read_part(name, number, known) for number, layer in enumerate(names) for name in layer]


def short_lines(lines: int) -> str:
    """Lines to the nearest hundred, as thousands: `1.2k`."""
    return f"{max(lines, 50) / 1000 + 1e-9:.1f}k"


def text_at(x: float, y: float, text: str, *, fill: str = INK, more: str = "") -> str:
    """One line of text."""
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}"{more}>{escape(text)}</text>'


def picture(parts: list[Part]) -> str:
    """The drawing as SVG: one row a part, its size, and a matrix of its imports from the others."""
    matrix = LEFT + NAME + SIZES
    about = matrix + CELL * len(parts) + 14
    width, height = about + 660, TOP + CELL * len(parts) + 34
    most = max(part.lines for part in parts)
    total = f"{sum(part.files for part in parts)} files, {short_lines(sum(part.lines for part in parts))} lines"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        "<title>frugal: packages in layers, and which imports which</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text_at(LEFT, 24, "frugal", more=' font-size="18" font-weight="bold"'),
        text_at(LEFT, 44, total, fill=FAINT),
        text_at(LEFT, 62, "Layers from top to bottom;", fill=FAINT),
        text_at(LEFT, 78, "a row imports the columns with a number.", fill=FAINT),
        text_at(LEFT, 94, "Below the diagonal nothing: imports go down only.", fill=FAINT),
    ]
    for row, part in enumerate(parts):
        y = TOP + CELL * row
        if part.layer % 2 == 0:
            out.append(f'<rect x="{LEFT - 6}" y="{y}" width="{width - LEFT}" height="{CELL}" fill="{BAND}"/>')
    for row, part in enumerate(parts):
        y = TOP + CELL * row
        base = y + 14
        out.append(text_at(LEFT, base, part.name, more=' font-weight="bold"'))
        bar = 60 * part.lines / most
        out.append(f'<rect x="{LEFT + NAME}" y="{y + 5}" width="{bar:.0f}" height="10" fill="#9db8d9"/>')
        files = f"{part.files} file{'s' if part.files > 1 else ''}, {short_lines(part.lines)}"
        out.append(text_at(matrix - 8, base, files, fill=FAINT, more=' font-size="10" text-anchor="end"'))
        x = matrix + CELL * row
        turned = f' transform="rotate(-60 {x + 12:g} {TOP - 6:g})"'
        out.append(text_at(x + 12, TOP - 6, part.name, more=f' font-size="11"{turned}'))
        out.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="#c9d2de"/>')
        for column, other in enumerate(parts):
            if count := part.imports[other.name]:
                x = matrix + CELL * column
                share = min(1.0, 0.12 + count / 24)
                shade = "#" + "".join(f"{round(255 + (channel - 255) * share):02x}" for channel in BLUE)
                out.append(
                    f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" fill="{shade}">'
                    f"<title>{part.name} imports {other.name}: {count}</title></rect>"
                )
                ink = "#ffffff" if share > 0.55 else INK
                out.append(text_at(x + CELL / 2, base, str(count), fill=ink,
                                   more=' font-size="10" text-anchor="middle"'))  # fmt: skip
        out.append(text_at(about, base, part.about, fill=FAINT, more=' font-size="11"'))
    out.append(text_at(LEFT, height - 10, "Drawn by: python docs/architecture.py", fill=FAINT, more=' font-size="10"'))
    return "\n".join([*out, "</svg>", ""])


def facts(svg: str) -> tuple[set[str], dict[str, float]]:
    """What a picture says: (sentences "a imports b" and the parts' order, thousands of lines in each part)."""
    order = re.findall(r'font-weight="bold">(\w+)</text>', svg)
    sizes = [float(lines) for lines in re.findall(r">\d+ files?, ([\d.]+)k</text>", svg)]
    pairs = re.findall(r"<title>(\w+ imports \w+): \d+</title>", svg)
    return {*pairs, " ".join(order)}, dict(zip(order[1:], sizes, strict=True))


def out_of_date(written: str, wanted: str) -> list[str]:
    """What the picture ``written`` says and is no longer so; sizes may differ by a fifth, or by 100 lines."""
    (old, old_sizes), (new, new_sizes) = facts(written), facts(wanted)
    gone, come = sorted(old - new), sorted(new - old)
    grown = [
        f"{name}: {size}k lines, now {new_sizes[name]}k"
        for name, size in old_sizes.items()
        if abs(size - new_sizes.get(name, size)) > max(0.11, 0.2 * size)
    ]
    return [*(f"no longer: {one}" for one in gone), *(f"new: {one}" for one in come), *grown]


def main() -> int:
    """Write the picture, or compare it with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the picture is outdated")
    wanted = picture(read_parts())
    if parser.parse_args().check:
        found = out_of_date(PICTURE.read_text(encoding="utf-8"), wanted)
        if found:
            print(f"{PICTURE.relative_to(ROOT)} is out of date; run python docs/architecture.py", *found, sep="\n  ")
        return 1 if found else 0
    PICTURE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
