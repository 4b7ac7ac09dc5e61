"""What commands tell before anything heavy is imported: what a name is, and what was meant (U10, U11)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import frugal.data.sources.read_columns as columns
from frugal.assets import CATALOGUE
from frugal.cli.early import before_rows, is_base, refuse_base
from frugal.cli.main import app
from frugal.config import SourceSection, load_config
from frugal.data.report import DataReport
from frugal.data.sources.find import find
from frugal.data.sources.read import read_rows
from frugal.errors import CheckpointError, DataError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "asked"), [("rows.jsonl", "rows"), ("Rows.CSV", "rows"), ("rows.json.gz", "rows"), ("a/b.parquet", "a/b")]
)
def test_a_name_without_its_suffix_is_the_file_beside_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, file: str, asked: str
) -> None:
    """U10: `data.train=rows` beside rows.jsonl asked a hub for half a minute."""
    (here / file).parent.mkdir(exist_ok=True)
    (here / file).write_text("")
    with pytest.raises(DataError, match=f"{asked}: there is no such file or folder. Did you mean {Path(file).name}"):
        find(SourceSection(path=asked))
    assert find(SourceSection(path="nothing-like-it")) is None


def test_an_unreachable_hub_is_not_tried(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U10: one look, not six tries of the library with its lines."""
    monkeypatch.setattr(columns, "reachable", lambda: False)
    with pytest.raises(DataError, match="no such file or folder here, and the hub cannot be reached"):
        list(read_rows(SourceSection(path="owner/no-such-rows"), DataReport()))


def test_a_path_of_rows_is_told_before_torch(here: Path) -> None:
    """U11: for train and preview, with nothing heavy imported."""
    (here / "c.yaml").write_text(
        "model: {base: smollm2-135m-instruct}\ndata: {train: nowhere.jsonl}\noutput: {dir: out}\n"
    )
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom frugal.cli.main import app\n"
        "for command in ('train', 'preview'):\n"
        "    done = CliRunner().invoke(app, [command, 'c.yaml'])\n"
        "    assert done.exit_code == 2 and 'nowhere.jsonl: there is no such file' in done.output, done.output\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stderr


def test_rows_that_are_there_pass(here: Path, tiny_llama_folder: Path) -> None:
    (here / "rows.jsonl").write_text("{}")
    config = {"model": {"base": str(tiny_llama_folder)}, "data": {"train": "rows.jsonl"}, "output": {"dir": "out"}}
    before_rows(load_config(config))


def test_what_a_name_is(here: Path, tiny_llama_folder: Path) -> None:
    """U10: a configuration, a base, a run and nothing are told apart."""
    base = tiny_llama_folder
    name = next(key for key, entry in CATALOGUE.items() if entry.kind == "model")
    assert is_base(base)
    assert is_base(Path(name))
    with pytest.raises(CheckpointError, match="is a base model, not a run: there is no adapter"):
        refuse_base(Path(name), "there is no adapter to merge")
    (here / "run").mkdir()
    shutil.copy(base / "config.json", here / "run")
    (here / "run" / "adapter_config.json").write_text("{}")
    assert not is_base(here / "run")
    config = "model: {base: b}\ndata: {train: r.jsonl}\noutput: {dir: runs/x}\n"
    (here / "base.yaml").write_text(config)
    with pytest.raises(CheckpointError, match=r"configuration, not a run, and its run runs/x does not exist.*chat b`"):
        is_base(Path("base.yaml"))
    (here / "runs" / "x").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"is a configuration, not a run\. Its run is in runs/x"):
        is_base(Path("base.yaml"))
    (here / "other.yml").write_text("a: 1\n")
    with pytest.raises(CheckpointError, match="is a YAML file, not a run"):
        is_base(Path("other.yml"))
    with pytest.raises(CheckpointError, match="runs/y does not exist"):
        is_base(Path("runs/y"))


def test_chat_with_a_base(tiny_llama_folder: Path) -> None:
    """U10: `frugal chat BASE` answers, and says that it is a base."""
    done = CliRunner().invoke(app, ["chat", str(tiny_llama_folder), "--prompt", "hello", "--max-new-tokens", "3"])
    assert done.exit_code == 0, done.output
    assert "is a base model: it answers without an adapter" in done.output


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("smollm2-135m-instruct", "is a base model: there is nothing to compare with it. Give a configuration"),
        ("nothing-here", "nothing-here does not exist. Give a configuration, or the folder of a run or an adapter."),
        ("runs", "runs is no run, but holds these: first, second. Give one of them, for example runs/first."),
    ],
)
def test_verify_says_what_it_can_take(here: Path, asked: str, told: str) -> None:
    for name in ("first", "second"):
        (here / "runs" / name).mkdir(parents=True)
        (here / "runs" / name / "adapter_config.json").write_text("{}")
    done = CliRunner().invoke(app, ["verify", asked])
    assert done.exit_code == 2
    assert told in done.output.replace("\n", " ")
