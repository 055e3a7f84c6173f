"""Runs an example's notebook like its reader, in a separate Jupyter kernel, outside the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = [str(ROOT / folder) for folder in ("common", "producer", "consumer", "front")]
TIMEOUT_S = 280


def printed_by(notebook: str, folder: Path) -> str:
    """Return the cells' output on stdout. ``folder`` holds nothing else: the notebook alone must do.

    Raises AssertionError with the kernel's words where a cell fails.
    """
    (folder / "copy.ipynb").write_bytes((EXAMPLES / notebook).read_bytes())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(FOLDERS),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "IPYTHONDIR": str(folder / ".ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / ".jupyter"),
        "OMP_NUM_THREADS": "1",  # several trainers share the cores
        "OPENBLAS_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    environment.pop("PENSTOCK_URL", None)
    command = [sys.executable, "-m", "jupyter", "execute", "copy.ipynb", "--output=executed.ipynb"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cells = json.loads((folder / "executed.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")
