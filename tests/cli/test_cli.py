"""The command line as a user meets it: real processes, exit codes, what is printed where."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from frugal import __version__
from frugal.cli.main import app, resume_argument

CONFIG = "model: {base: m}\ndata: {train: rows.jsonl}\noutput: {dir: out}\n"


def frugal(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "frugal", *arguments],
        cwd=cwd,
        capture_output=True,
        timeout=600,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "error: nowhere.yaml: no such file. `frugal configs list` shows ready ones\n"),
        (["train", "."], "error: .: a folder, not a YAML file. In it: c.yaml\n"),
        (["train", "c.yaml", "--num_epochs", "3"], "override '--num_epochs': neither an option nor key.sub=value"),
        (["preview", "c.yaml", "train.sede=1"], "did you mean seed?"),
        (["fetch", "nothing"], "error: frugal fetch does not know 'nothing'"),
        (["fetch"], "error: name what to fetch: smollm2-135m-instruct, chatterbot-corpus\n"),
        (["configs", "show", "nope"], "error: no ready configuration is called 'nope'; there are llama-3.1-8b-qlora, "),
        (["train"], "Missing argument 'CONFIG'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["merge", "runs/x"], "Missing option '--out'"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    done = frugal(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == b""
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_dry_run_of_several_processes_prints_once(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    done = frugal("train", "c.yaml", "--dry-run", cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (0, b"")


def test_dry_run_prints_the_whole_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    done = frugal("train", "c.yaml", "train.max_steps=3", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert b"  max_steps: 3\n" in done.stdout
    (tmp_path / "again.yaml").write_bytes(done.stdout)
    assert frugal("train", "again.yaml", "--dry-run", cwd=tmp_path).stdout == done.stdout


def test_configs_copy_never_overwrites(tmp_path: Path) -> None:
    assert frugal("configs", "copy", "quickstart", "mine.yaml", cwd=tmp_path).returncode == 0
    (tmp_path / "mine.yaml").write_text("mine")
    again = frugal("configs", "copy", "quickstart", "mine.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert b"exists already" in again.stderr
    assert (tmp_path / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    ],
)
def test_printing_never_kills(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG.replace("base: m", "base: 模型 → 😀"), encoding="utf-8")
    done = frugal("train", "c.yaml", "--dry-run", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert b"The configuration is right" in done.stdout
    wrong = frugal("train", "c.yaml", "model.dtype=→😀", cwd=tmp_path, **environment)
    assert wrong.returncode == 2
    assert b"Traceback" not in wrong.stderr


def test_names_and_words_are_utf8_in_a_c_locale(tmp_path: Path) -> None:
    environment = {"LC_ALL": "C"}  # Python itself reads it as UTF-8 then
    folder = tmp_path / "läufe 模型"
    folder.mkdir()
    (folder / "größe.yaml").write_text(CONFIG, encoding="utf-8")
    done = frugal(
        "train", "läufe 模型/größe.yaml", "data.system_prompt=Grüße", "--dry-run", cwd=tmp_path, **environment
    )
    assert done.returncode == 0, done.stderr
    assert "system_prompt: Grüße" in done.stdout.decode("utf-8")
    missing = frugal("train", "ö.yaml", cwd=tmp_path, **environment)
    assert missing.returncode == 2
    assert "error: ö.yaml: no such file" in missing.stderr.decode("utf-8")


def test_words_that_are_not_utf8_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "frugal", "train", "c.yaml", b"data.system_prompt=Gr\xfc\xdfe"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=600)
    assert done.returncode == 2
    assert b"must be UTF-8 text" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("place", ["nowhere/page.html", "folder", "/proc/page.html"])
def test_a_file_that_cannot_be_written_is_one_message(tmp_path: Path, place: str) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    done = frugal("schema", "--out", place, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"error: --out {place}: ")
    if place != "/proc/page.html":
        assert b"--html" in frugal("preview", "c.yaml", "--html", place, cwd=tmp_path).stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m frugal schema | head -n 1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, timeout=600)
    assert done.stdout == b"{\n"
    assert done.stderr == b""


def test_help_has_no_boxes_and_is_quick(tmp_path: Path) -> None:
    done = frugal("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.isascii()
    for name in ("train", "preview", "fetch", "chat", "eval", "merge", "schema", "configs"):
        assert name.encode() in done.stdout


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["train", "c.yaml", "--resume"], ["train", "c.yaml", "--resume", "auto"]),
        (["train", "--resume", "c.yaml"], ["train", "--resume", "auto", "c.yaml"]),
        (["train", "c.yaml", "--resume", "train.seed=1"], ["train", "c.yaml", "--resume", "auto", "train.seed=1"]),
        (["train", "c.yaml", "--resume", "--dry-run"], ["train", "c.yaml", "--resume", "auto", "--dry-run"]),
        (["train", "c.yaml", "--resume", "out/checkpoint-5"], ["train", "c.yaml", "--resume", "out/checkpoint-5"]),
        (["train", "c.yaml", "--resume", "auto"], ["train", "c.yaml", "--resume", "auto"]),
    ],
)
def test_resume_alone_means_auto(written: list[str], meant: list[str]) -> None:
    assert resume_argument(written) == meant


@pytest.mark.slow
def test_an_installed_wheel_carries_configurations_and_page_templates(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    source = tmp_path / "source"
    for name in ("frugal", "configs"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(root / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    build += ["-w", str(tmp_path), str(source)]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=600, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    shutil.rmtree(source)
    done = frugal("configs", "show", "quickstart", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout == (root / "configs" / "quickstart.yaml").read_bytes()
    (tmp_path / "mine.yaml").write_text("lora_rank: 8\n", encoding="utf-8")
    done = frugal("train", "mine.yaml", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert b"lora_rank: unknown key at the top level; here it is called lora.r" in done.stderr
    code = (
        "import frugal.config.shipped as s; print(s.__file__); import frugal.configs\n"
        "from frugal.web.pages import render; print(render('plan.html', title='<t>', picture='', rows=[]))"
    )
    where = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    shown = subprocess.run(
        where, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=600
    )
    assert shown.stdout.startswith(str(tmp_path / "site"))
    assert "<title>&lt;t&gt;</title>" in shown.stdout
    carried = {path.name for path in (tmp_path / "site" / "frugal" / "web" / "templates").iterdir()}
    assert carried == {path.name for path in (root / "frugal" / "web" / "templates").iterdir()}


def test_templates_are_listed(tmp_path: Path) -> None:
    assert b"chatml " in frugal("configs", "templates", cwd=tmp_path).stdout


@pytest.mark.slow
def test_public_names_are_functions_whatever_was_imported_first(tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, types, frugal
packages = {module.name for module in pkgutil.iter_modules(frugal.__path__)}
assert not packages & set(frugal.__all__), packages & set(frugal.__all__)
for name in frugal.__all__:
    value = getattr(frugal, name)
    assert name == "__version__" or (callable(value) and not isinstance(value, types.ModuleType)), name
from frugal import fetch, train
import frugal.assets, frugal.training.loop, frugal.run.train, frugal.planning.planner
assert fetch is frugal.fetch is frugal.assets.fetch and train is frugal.train
try:
    frugal.fetch("no such thing")
except frugal.FrugalError:
    pass
else:
    raise SystemExit("no error")
try:
    frugal.nothing
except AttributeError as error:
    assert "nothing" in str(error)
assert "load_config" in dir(frugal)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=600)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "fsdp2"], "--strategy fsdp2: for a run that several GPUs share, and --world-size is 1. Add"),
        (["--offload", "--gpus-per-host", "2"], "--offload --gpus-per-host 2: for a run that several GPUs share"),
        (["--world-size", "2", "--strategy", "ddp", "--shard-base", "true"], "--shard-base true: ddp keeps the base"),
        (["--world-size", "2", "--strategy", "zero3", "--shard-base", "false"], "zero3 cuts everything"),
        (["--world-size", "2", "--strategy", "ddp", "--offload"], "--offload: ddp keeps everything on its device"),
        (["--sweep", "--solve"], "give one of them"),
        (["--picture", "missing/x.svg"], "--picture missing/x.svg: no folder to write to"),
        (["--picture", "x.png"], "expected a file name that ends in .svg or .html"),
    ],
)
def test_plan_refuses_options_that_do_not_go_together(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", "some/model", "--vram", "8GB", *options])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_version() -> None:
    """U10."""
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output == f"frugal {__version__}\n"


def without_heavy_imports(words: list[str], cwd: Path) -> tuple[str, str]:
    """(exit code, what was said) of a command that imported neither torch nor peft."""
    code = (
        f"import sys; from frugal.cli.main import app\ntry: app(args={words!r})\n"
        'except SystemExit as end: sys.exit(f\'{end.code} {[m for m in ("torch", "peft") if m in sys.modules]}\')'
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=600)
    *said, last = (done.stdout + done.stderr).splitlines()
    exit_code, _, heavy = last.partition(" ")
    assert heavy == "[]", done
    return exit_code, "\n".join(said)


@pytest.mark.parametrize(
    "command", [["chat"], ["eval"], ["merge", "--out", "x"], ["export", "--to", "gguf", "--out", "x"]]
)
def test_a_wrong_path_is_told_before_anything_heavy_is_imported(tmp_path: Path, command: list[str]) -> None:
    """U10, U11: what is there is said as it is, and torch is not imported for it."""
    (tmp_path / "base.yaml").write_text("a: 1")
    for name, message in (("nothere", "does not exist"), ("base.yaml", "is a YAML file, not a run")):
        code, said = without_heavy_imports([command[0], str(tmp_path / name), *command[1:]], tmp_path)
        assert code == "2"
        assert message in said


@pytest.mark.slow
def test_what_train_and_plan_refuse_without_anything_heavy(tmp_path: Path, tiny_llama_folder: Path) -> None:
    """U11: a base that is not there, a used folder, a finished run; the whole configuration for a base not known."""
    (tmp_path / "rows.jsonl").write_text("")
    written = CONFIG.replace("base: m", "base: ./m").replace("dir: out", f"dir: {tmp_path / 'out'}")
    (tmp_path / "c.yaml").write_text(written, encoding="utf-8")
    code, said = without_heavy_imports(["train", "c.yaml"], tmp_path)
    assert (code, "there is no folder ./m" in said) == ("2", True)
    code, said = without_heavy_imports(["train", "c.yaml", "--dry-run"], tmp_path)
    assert (code, "no plan: './m' is neither" in said) == ("0", True)
    code, said = without_heavy_imports(["plan", "nothing"], tmp_path)
    assert (code, "neither a model's folder nor a hub id" in said) == ("2", True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_model.safetensors").write_text("")
    code, said = without_heavy_imports(["train", "c.yaml", f"model.base={tiny_llama_folder}"], tmp_path)
    assert (code, "already holds a finished adapter" in said) == ("2", True)
