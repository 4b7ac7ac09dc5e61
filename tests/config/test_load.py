"""Loading: files, dicts, overrides, short forms, checks across sections, and the way back to YAML."""

import contextlib
import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest
import yaml

from frugal.config import Config, config_schema, dump_yaml, load_config
from frugal.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"base": "m"}, "data": {"train": "rows.jsonl"}, "output": {"dir": "out"}}


def refused(source: Any, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides or [])
    return str(caught.value)


def write(tmp_path: pathlib.Path, text: str) -> pathlib.Path:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_import_is_light() -> None:
    code = (
        "import time, sys; t = time.perf_counter(); import frugal, frugal.config; t = time.perf_counter() - t\n"
        "assert not {'torch', 'transformers', 'peft', 'datasets'} & set(sys.modules), sorted(sys.modules)\n"
        "assert t < 5, t"  # a few tenths of a second; the bound only has to survive a busy machine
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize(
    ("train", "paths"),
    [
        ("a.jsonl", ["a.jsonl"]),
        (["a.jsonl", "b.csv"], ["a.jsonl", "b.csv"]),
        ([{"path": "a.jsonl", "weight": 0.5}, "b.csv"], ["a.jsonl", "b.csv"]),
        ({"path": "a.jsonl"}, ["a.jsonl"]),
        (pathlib.Path("a.jsonl"), ["a.jsonl"]),
        ([pathlib.Path("a.jsonl")], ["a.jsonl"]),
    ],
)
def test_short_forms_of_data(train: Any, paths: list[str]) -> None:
    config = load_config({**MINIMAL, "data": {"train": train}})
    assert [source.path for source in config.data.train] == paths


def test_a_text_with_commas_is_not_a_list_of_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"train": "a.jsonl,b.jsonl"}
    assert "write [a.jsonl, b.jsonl]" in refused({**MINIMAL, "data": data})
    pathlib.Path("a.jsonl,b.jsonl").touch()
    assert load_config({**MINIMAL, "data": data}).data.train[0].path == "a.jsonl,b.jsonl"


def test_sentences_may_hold_commas() -> None:
    config = load_config({**MINIMAL, "output": {"dir": "o", "sample_prompts": "Hi, who are you?"}})
    assert config.output.sample_prompts == ["Hi, who are you?"]


def test_the_callers_dict_is_left_alone() -> None:
    source = {"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": "o"}}
    load_config(source, ["data.train.0.weight=2", "train.max_steps=3"])
    assert source == {"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": "o"}}


def test_overrides() -> None:
    config = load_config(
        MINIMAL,
        [
            "train.learning_rate=1e-4",
            "model.revision=~",
            "data.train.0.weight=0.5",
            "lora.rank_pattern.model.layers.1.q_proj=4",
            "lora.target_modules=[q_proj, v_proj]",
            "output.sample_prompts=['What: is it?', two]",
            "data.system_prompt=Answer: short # really, [now]",
            "--train.max_steps=7",
            "output.dir=a=b",
        ],
    )
    assert config.train.learning_rate == 1e-4
    assert config.model.revision is None
    assert config.data.train[0].weight == 0.5
    assert config.lora.rank_pattern == {"model.layers.1.q_proj": 4}
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.output.sample_prompts == ["What: is it?", "two"]
    assert config.data.system_prompt == "Answer: short # really, [now]"
    assert config.train.max_steps == 7
    assert config.output.dir == "a=b"


def test_an_override_wins_over_the_file_and_its_faults(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, "model: {base: m}\ndata: {train: r}\noutput: {dir: o}\ntrain:\n  max_steps: many\n")
    assert load_config(path, ["train.max_steps=3"]).train.max_steps == 3


def test_faults_of_overrides_name_them() -> None:
    message = refused(
        MINIMAL,
        [
            "train.max_steps=x",
            "trian.seed=1",
            "nonsense",
            "learning_rate",
            "model.base.x=1",
            "data.train.5.weight=1",
            "data.train.weight=1",
            "train.seed=1",
            "train.seed=2",
            "lora.modules_to_save=[a",
        ],
    )
    assert [line.strip() for line in message.splitlines()[1:]] == [
        "override 'nonsense': neither an option nor key.sub=value",
        "override 'learning_rate': write train.learning_rate=VALUE",
        "override model.base.x=1: model.base is one value and has no keys below it",
        "override data.train.5.weight=1: data.train has 1 entries, numbered from 0",
        "override data.train.weight=1: name the source by its number, from 0: data.train.0.weight",
        "override train.seed=2: given twice with different values; keep one",
        "override lora.modules_to_save=[a: line 1: expected ',' or ']', but got '<stream end>' "
        "(while parsing a flow sequence)",
        "override train.max_steps=x: must be a whole number >= 1, got 'x'",
        "override trian.seed=1: trian: unknown key at the top level; did you mean train?",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["lora.init_lora_weights=pissa"], "pissa starts from the unquantised weights"),
        (["lora.init_lora_weights=loftq"], "set model.quantize: none"),
        (["data.eval_split=1.5"], "must be a whole number of rows, or a fraction below 1, got 1.5"),
        (["data.eval_split=0.1", "data.eval=e.jsonl"], "set together with data.eval"),
        (["output.keep_best=true"], "needs evaluation rows"),
        (["train.eval_steps=5"], "nothing to evaluate on"),
        (
            ["output.keep_best=true", "data.eval_split=10", "output.save_steps=5", "train.eval_steps=2"],
            "output.save_steps (5) must be a multiple of train.eval_steps (2)",
        ),
        (["train.warmup_steps=9", "train.max_steps=5"], "must be less than train.max_steps (5), got 9"),
        (["train.warmup_steps=9", "train.warmup_ratio=0.1"], "set together with train.warmup_ratio"),
        (["train.warmup_ratio=0.1", "train.lr_scheduler_type=constant"], "write constant_with_warmup"),
        (["train.min_lr_ratio=0.2"], "has no effect with train.lr_scheduler_type: cosine"),
        (["lora.target_modules=[lm_head]", "lora.modules_to_save=lm_head"], "lm_head: also in lora.target_modules"),
        (["lora.target_modules=[]"], "names no module"),
        (["data.train=[]"], "is an empty list"),
        (["train.learning_rate=0"], "override train.learning_rate=0: must be a number > 0, got 0"),
        (["train.adam_beta1=1.5"], "must be a number >= 0 and < 1, got 1.5"),
        (["model.quantize=~"], "must be nf4 or none, got nothing: write none"),
        (["model.dtype=BFloat16"], "got 'BFloat16': write bfloat16"),
        (["train.report_to=~"], "got nothing: write [] for none"),
        (["data.eval_split=10%"], "got '10%': write 0.1"),
        (["model.base="], "must be text, got nothing"),
    ],
)
def test_what_is_refused(change: list[str], message: str) -> None:
    assert message in refused(MINIMAL, change)


def test_checks_across_sections_come_with_all_other_faults() -> None:
    wrong = ["lora.init_lora_weights=pissa", "train.max_steps=-1", "train.foo=1", "data.eval_split=2.5"]
    message = refused(MINIMAL, wrong)
    assert "4 faults" in message.splitlines()[0]


def test_what_is_allowed() -> None:
    load_config(MINIMAL, ["data.packing=true", "train.group_by_length=true"])
    load_config(MINIMAL, ["lora.init_lora_weights=pissa", "model.quantize=none"])
    load_config(MINIMAL, ["data.eval_split=10", "output.keep_best=true"])
    load_config({**MINIMAL, "train": None, "lora": {}})


def test_missing_keys_say_what_they_are() -> None:
    message = refused({"model": {}, "data": {"train": "r"}})
    assert "model.base: is missing and has no default. The base model: a name known to `frugal fetch`" in message
    assert "output: is missing and has no default. It needs output.dir" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (
            b"just text\n",
            "line 1: expected sections (model, lora, data, objective, train, memory, distributed, output), "
            "got 'just text'",
        ),
        (
            b"model:\n  base: \xe4\n",
            "line 2: not UTF-8 text (byte 0xe4, byte 9 of the line, offset 15 of the file; probably WINDOWS-1252. "
            "Save it as UTF-8, for example: iconv -f WINDOWS-1252 -t UTF-8 ",
        ),
        (
            b"model: smollm2\ndata: rows.jsonl\n",
            "model: must be a section with keys (base, revision, quantize, ...) below it, got 'smollm2'",
        ),
        ("model: {base: 模型}\n".encode("utf-16"), "not UTF-8 text but UTF-16 (seen from its first bytes, offset 0)"),
        ("model: {base: m}\n".encode("utf-16-le"), "not UTF-8 text but UTF-16LE"),
        ("model: {base: m}\n".encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8 "),
    ],
)
def test_files_that_are_no_config(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    assert message in refused(path)


def test_paths_that_are_no_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.yaml").touch()
    assert f"did you mean {tmp_path / 'mine.yaml'}?" in refused(tmp_path / "mien.yaml")
    assert "did you mean" not in refused(tmp_path / "other.yaml")  # alike in the suffix alone
    assert "a folder, not a YAML file" in refused(tmp_path)


def test_byte_order_mark_and_other_scripts(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + "model: {base: 模型 → 😀}\ndata: {train: r}\noutput: {dir: o}\n".encode())
    assert load_config(path).model.base == "模型 → 😀"


AWKWARD = ["no", "1e-4", "010", "12:30", "null", "~", "", " x ", "a: b", "#c", "😀 →", "line\nbreak", "'q'", '"', "<<"]


def test_dump_and_load_give_the_same(tmp_path: pathlib.Path) -> None:
    rng = random.Random(1)
    for word in AWKWARD:
        name = word or "x"  # names of bases and files may not be empty
        config = load_config(
            {
                "model": {"base": name, "revision": rng.choice([None, word])},
                "data": {"train": [{"path": name, "weight": rng.uniform(1e-7, 1), "columns": {word or "k": word}}]},
                "lora": {"rank_pattern": {word or "k": 3}, "target_modules": rng.choice(["all-linear", ["q", "v"]])},
                "train": {"learning_rate": 10 ** rng.uniform(-12, 5), "warmup_steps": 3},
                "output": {"dir": name, "sample_prompts": AWKWARD},
            }
        )
        text = dump_yaml(config)
        assert load_config(write(tmp_path, text)) == config, text
        assert yaml.safe_load(text)["output"]["sample_prompts"] == AWKWARD  # a YAML 1.1 reader sees the same text
        assert load_config(config) == config


@pytest.mark.parametrize("blank", ["", "  "])
def test_names_of_files_are_not_empty(blank: str) -> None:
    """An empty path is the current folder to the file system, and nobody's wish."""
    message = refused({"model": {"base": blank}, "data": {"train": [blank]}, "output": {"dir": blank}})
    for key in ("model.base", "data.train[0].path", "output.dir"):
        assert f"{key}: must not be empty, got '{blank}'" in message


def test_every_auto_can_be_written_back_resolved(tmp_path: pathlib.Path) -> None:
    config = load_config(MINIMAL)
    resolved = {"model.dtype": "float16", "memory.checkpoint": "disk", "memory.budget": "11.5GiB"}
    resolved |= {"memory.attention": "sdpa", "memory.embedding": "host", "distributed.strategy": "zero1"}
    flags = {"memory.optimizer_in_backward": True, "distributed.shard_base": False, "distributed.offload": False}
    autos = {
        f"{name}.{key}"
        for name, section in config
        for key, value in section
        if value == "auto" and key != "chat_template"
    }
    assert autos == {*resolved, *flags}
    for key, value in {**resolved, **flags}.items():
        section, leaf = key.split(".")
        changed = getattr(config, section).model_copy(update={leaf: value})
        config = config.model_copy(update={section: changed})
    again = load_config(write(tmp_path, dump_yaml(config)))
    assert again == config
    assert again.memory.optimizer_in_backward is True
    assert again.distributed.offload is False
    assert load_config(config) == config


def test_label_smoothing() -> None:
    assert load_config(MINIMAL).train.label_smoothing == 0.0
    assert load_config(MINIMAL, ["train.label_smoothing=0.1"]).train.label_smoothing == 0.1
    assert "must be a number >= 0 and < 1, got 1" in refused(MINIMAL, ["train.label_smoothing=1"])
    message = refused({**MINIMAL, "train": {"label_smoothing_factor": 0.1}})
    assert "unknown key in train; here it is called train.label_smoothing" in message


def test_values_from_python_are_not_bent() -> None:
    for section, key, value in [
        ("train", "max_steps", True),
        ("train", "learning_rate", True),
        ("train", "seed", "seven"),
        ("lora", "use_dora", 1),
        ("distributed", "offload", 1),
        ("model", "revision", 7),
        ("model", "revision", b"main"),
        ("output", "sample_prompts", [1]),
        ("lora", "target_modules", [1]),
        ("lora", "rank_pattern", {"q": 2.5}),
    ]:
        message = refused({**MINIMAL, section: {**MINIMAL.get(section, {}), key: value}})
        assert f"{section}.{key}" in message
        assert "must be " in message


def test_faults_below_a_list_or_a_table_name_the_entry(tmp_path: pathlib.Path) -> None:
    text = "model: {base: m}\noutput: {dir: o}\nlora:\n  rank_pattern:\n    q: x\ndata:\n  train:\n    - a.jsonl\n"
    text += "    - path: b.jsonl\n      weight: 0\n      wieght: 1\ntrain:\n  report_to:\n    - wandb\n    - other\n"
    assert [line.strip() for line in refused(write(tmp_path, text)).splitlines()[1:]] == [
        "line 5: lora.rank_pattern.q: must be a whole number, got 'x'",
        "line 10: data.train[1].weight: must be a number > 0, got 0",
        "line 11: data.train[1].wieght: unknown key in data.train[1]; did you mean weight?",
        "line 15: train.report_to[1]: must be tensorboard, wandb, mlflow or trackio, got 'other'",
    ]


def test_a_config_is_frozen() -> None:
    config = load_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.train.seed = 3  # type: ignore[misc]


def test_schema_documents_every_key_and_knows_the_short_forms() -> None:
    schema = config_schema()
    for section in Config.model_fields.values():
        properties = schema["$defs"][section.annotation.__name__]["properties"]  # type: ignore[union-attr]
        assert all(entry.get("description") for entry in properties.values()), properties
    train = schema["$defs"]["DataSection"]["properties"]["train"]
    assert {"type": "string"} in train["anyOf"]
    assert schema["additionalProperties"] is False


def test_random_values_give_one_error_or_a_config() -> None:
    rng = random.Random(2)
    values: list[Any] = [None, True, 0, -1, 1.5, float("nan"), float("inf"), "", "x", "1e3", b"x"]
    values += [[], [1], [None], {}, {"a": 1}, {3: 4}]
    for _ in range(1000):
        tree: dict[str, Any] = {}
        for section, info in Config.model_fields.items():
            if rng.random() < 0.1:
                tree[section] = rng.choice(values)
                continue
            keys = rng.sample(list(info.annotation.model_fields), 1)  # type: ignore[union-attr]
            tree[section] = {key: rng.choice(values) for key in keys} | dict(MINIMAL.get(section, {}))
        with contextlib.suppress(ConfigError):
            assert isinstance(load_config(tree), Config)


def test_the_keys_of_a_section_are_listed_once() -> None:
    message = refused({**MINIMAL, "train": {"zzz": 1, "yyy": 2, "output": "x"}, "lora": {"xxx": 3}})
    assert message.count("its keys are num_train_epochs") == 1
    assert message.count("its keys are r, lora_alpha") == 1
    assert message.count("unknown key in train") == 3
    assert "train.output: unknown key in train; it is a section of its own, at the top level" in message


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lora_target_linear", "lora.target_modules"),
        ("flash_attention", "memory.attention"),
        ("plot_loss", "report.html"),
        ("global_batch_size", "train.gradient_accumulation_steps"),
        ("streaming", "has no counterpart"),
        ("use_unsloth", "memory.fused"),
    ],
)
def test_other_tools_keys_say_what_takes_their_place(key: str, hint: str) -> None:
    message = refused({**MINIMAL, key: True})
    assert f"{key}: unknown key at the top level; " in message
    assert hint in message
    assert "did you mean" not in message


def test_a_pattern_is_explained_in_words() -> None:
    message = refused(MINIMAL, ["memory.budget=lots"])
    assert "got 'lots'" in message
    assert "for example 6GB" in message
    assert "[0-9]" not in message
