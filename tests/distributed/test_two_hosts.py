"""Two network namespaces joined by a cable (veth) are two hosts: `accelerate launch --num_machines 2` trains alike."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks.harness import ROOT
from tests.distributed.ranks.launched_runs import ENVIRONMENT, Runs, same

HOSTS = {"frugal-test-a": ("fgtest-a", "10.213.7.1"), "frugal-test-b": ("fgtest-b", "10.213.7.2")}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and iproute2")
    try:
        for name in HOSTS:
            ip("netns", "add", name)
        cables = [cable for cable, _ in HOSTS.values()]
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, (cable, address) in HOSTS.items():
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=600)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_hosts_train_what_one_process_trains(
    hosts: None, name: str, tmp_path: Path, make_tiny_llama: Callable[..., Path]
) -> None:
    made = Runs(tmp_path, make_tiny_llama(tie_word_embeddings=False))
    file = made.file(name)
    processes = []
    try:
        for rank, (host, (cable, _)) in enumerate(HOSTS.items()):
            command = [
                *("ip", "netns", "exec", host, sys.executable, "-m", "accelerate.commands.launch"),
                *("--config_file", str(ROOT / "configs" / "accelerate" / f"{name}.yaml")),
                *("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank)),
                *(
                    "--main_process_ip",
                    "10.213.7.1",
                    "--main_process_port",
                    "29541",
                    "-m",
                    "frugal",
                    "train",
                    str(file),
                ),
            ]
            environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": cable}
            with open(tmp_path / f"{rank}.txt", "w", encoding="utf-8") as stream:
                processes.append(
                    subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
                )
        codes = [process.wait(timeout=250) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # the launcher ends its ranks
        for process in processes:
            process.wait(timeout=600)
    shown = "\n".join((tmp_path / f"{rank}.txt").read_text(encoding="utf-8")[-3000:] for rank in range(2))
    assert codes == [0, 0], shown
    assert "2 processes" in shown
    same(made.root / name, made.one)
