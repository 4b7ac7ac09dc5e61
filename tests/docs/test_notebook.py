"""The notebook: without outputs in the repository, and it runs from top to bottom, twice in one kernel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_clean(notebook: Any) -> None:
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
    assert "find_spec" in code_cells(notebook)[0].source


def smaller(notebook: Any, base: Path, rows: Path, out: Path) -> Any:
    """The same cells with a tiny model, few steps, and all of it twice."""
    swaps = {
        '"smollm2-135m-instruct"': repr(str(base)),
        '"chatterbot-corpus", "eval_split": 100': f'{str(rows)!r}, "eval_split": 4, "cache": False',
        '"max_steps": 60': '"max_steps": 4',
        '"eval_steps": 30': '"eval_steps": 2',
        '"save_steps": 30': '"save_steps": 2',
        "runs/notebook": f"{out.as_posix()}/notebook",
    }
    text = "\n".join(cell.source for cell in code_cells(notebook))
    for old in swaps:
        assert old in text, f"the notebook changed: {old} is gone"
    for cell in code_cells(notebook):
        for old, new in swaps.items():
            cell.source = cell.source.replace(old, new)
    again = copy.deepcopy(notebook.cells)
    for number, cell in enumerate(again):
        cell["id"] = f"again-{number:02d}"
    notebook.cells += again
    return notebook


def test_it_runs_twice(notebook: Any, tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    line = '{"messages": [{"role": "user", "content": "What is AI? %d"}, {"role": "assistant", "content": "good"}]}\n'
    rows.write_text("".join(line % number for number in range(24)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parent.parent))
    small = smaller(notebook, tiny_llama_folder, rows, tmp_path)
    client = nbclient.NotebookClient(
        small, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    done = client.execute()
    printed = "".join(
        output.get("text", "") for cell in code_cells(done) for output in cell.outputs if output.output_type == "stream"
    )
    assert printed.count("held-out loss") >= 2
    assert printed.count("base weights: dequantized") == 2
    shown = [output for cell in code_cells(done) for output in cell.outputs if output.output_type == "display_data"]
    shown += [o for cell in code_cells(done) for o in cell.outputs if o.output_type == "execute_result"]
    assert any("iframe" in str(output.data.get("text/html", "")) for output in shown)
    assert (tmp_path / "notebook" / "report.html").is_file()
    assert (tmp_path / "notebook-merged" / "model.safetensors").is_file()
    assert not (NOTEBOOK.parent / "runs").exists()
