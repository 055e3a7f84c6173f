"""docs/slurm.md: each batch script runs, by sbatch where there is a Slurm, elsewhere in bash with a stand-in for srun.

The stand-in starts the tasks of a step on this host, and gives them their rank. It knows nothing of nodes and limits.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "slurm.md").read_text()
FILES = dict(re.findall(r"^```(?:bash|python) (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
SCRIPTS = [name for name in FILES if name.endswith(".sbatch")]
SRUN = """\
#!/bin/bash
tasks=$SLURM_NTASKS
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
trap 'kill $(jobs -p)' TERM
for ((rank = 0; rank < tasks; rank++)); do SLURM_PROCID=$rank SLURM_NTASKS=$tasks "$@" & done
failed=0
for task in $(jobs -p); do wait "$task" || failed=$?; done
exit $failed
"""
RANKS = {"one-node.sbatch": 1, "segments.sbatch": 1, "nodes.sbatch": 4}


@functools.cache
def has_slurm() -> bool:
    """Return whether a Slurm controller answers."""
    return (
        shutil.which("sbatch") is not None
        and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0
    )


def write_files(folder: Path) -> dict[str, str]:
    """Write what the page shows, and return the environment of a shell that has Penstock."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "bin").mkdir()
    srun = folder / "bin" / "srun"
    srun.write_text(SRUN)
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    path = [str(Path(sys.executable).parent), *([] if has_slurm() else [str(srun.parent)]), os.environ["PATH"]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "SLURM_"))}
    if has_slurm() and "SLURM_CONF" in os.environ:
        environment["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return environment | {"PATH": os.pathsep.join(path), "USER": "me"}


def submit(script: str, folder: Path, change: tuple[str, str] = ("", "")) -> tuple[int, str]:
    """Run a batch script to its end, after a change of the files. Return its exit code and its output."""
    environment = write_files(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text.replace(*change))
    if has_slurm():  # of one node
        command = ["sbatch", "--wait", "--nodes=1", f"--ntasks-per-node={RANKS[script]}", "--output=log", script]
    else:
        job = {"NTASKS": RANKS[script], "NNODES": 2, "CPUS_PER_TASK": 2, "PROCID": 0, "JOB_ID": os.getpid()}
        environment |= {f"SLURM_{name}": str(value) for name, value in job.items()}
        command = ["bash", script]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, (folder / "log").read_text() if has_slurm() else done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_bash_and_asks_for_what_it_uses(script: str, tmp_path: Path) -> None:
    """A script that fails at its first line has waited in the queue for hours."""
    write_files(tmp_path)
    assert subprocess.run(["bash", "-n", script], cwd=tmp_path, capture_output=True, check=False).stderr == b""
    head, asked, *_ = FILES[script].splitlines()
    assert head == "#!/bin/bash"
    assert all(option in asked for option in ("--nodes=", "--cpus-per-task=", "--mem=", "--time="))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_every_rank_and_leaves_nothing(script: str, tmp_path: Path) -> None:
    """Each of the ranks has the same steps, and neither a file nor an address stays on the node."""
    code, output = submit(script, tmp_path)
    assert code == 0, output
    ranks = RANKS[script]
    steps = 200 // ranks
    told = sorted(re.findall(rf"rank \d of {ranks}: (\d+) steps", output))
    assert told == [str(steps)] * ranks, output
    if script == "nodes.sbatch":
        assert "clean: lost 0, duplicate 0, pending 0" in output
        assert "connection broke" not in output
    assert [path.name for path in tmp_path.glob("penstock-*")] == []
    assert not [*Path("/dev/shm").glob("penstock-me-*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("index * index}", "index // (index % 3 // 2)}"),
        ("produce dataset mydata:train", "produce dataset mydata:trian"),
    ],
    ids=["bad samples", "no such dataset"],
)
def test_a_failed_production_fails_the_job_and_ends_its_ranks(change: tuple[str, str], tmp_path: Path) -> None:
    """A job that trained on a part of its data must not look like one that is done."""
    code, output = submit("nodes.sbatch", tmp_path, change)
    assert code == 1, output
    assert "clean: lost 0" not in output
    assert "WaitTimeout" not in output  # ranks that nobody ends wait for 60 s
    assert [path.name for path in tmp_path.glob("penstock-*")] == []


def test_the_address_is_private_and_names_this_host(tmp_path: Path) -> None:
    """Every user of the cluster can list the folder of the job."""
    environment = write_files(tmp_path)
    file = tmp_path / "job.url"
    command = [sys.executable, "-c", "import penstock\nexec(open('server.py').read().replace('server.wait()', 'pass'))"]
    subprocess.run(command, cwd=tmp_path, env=environment | {"PENSTOCK_URL_FILE": str(file)}, check=True)
    assert file.stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(rf"redis://default:\w{{64}}@{socket.gethostname()}:\d+", file.read_text())


def test_a_server_with_a_file_is_the_same_in_the_next_job(tmp_path: Path) -> None:
    """Trainers of the next job continue with the stream, so the server must have it."""
    environment = write_files(tmp_path)
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    begin = 'penstock.Writer("train", url=server.url, spec={"x": ("uint8", ())}).close()'
    go_on = 'penstock.Loader("train", group="net", batch_size=1, url=server.url, wait=False).close()'
    for program in (begin, go_on):
        command = [sys.executable, "-c", f"{snippet}\n{program}\nserver.close()"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
