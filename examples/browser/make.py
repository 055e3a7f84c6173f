"""Makes a page that classifies digits: image files, workers, a stream, Keras, an export, a folder to serve.

`python make.py` does all of it. `python -m http.server --directory site` then serves the page.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DIGITS = HERE.parent / "digits"
SCRIPTS = ("tfjs/dist/tf.min.js", "tfjs-backend-wasm/dist/tf-backend-wasm.min.js")
WASM = ("tfjs-backend-wasm/dist/tfjs-backend-wasm.wasm", "tfjs-backend-wasm/dist/tfjs-backend-wasm-simd.wasm")


def main() -> None:
    """Write the images, train on them, and put the page next to the exported model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=HERE / "data", metavar="DIR", help="where the images go")
    parser.add_argument("--site", type=Path, default=HERE / "site", metavar="DIR", help="where the page goes")
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="processes that make samples (default: %(default)s)")
    args = parser.parse_args()
    data, site = args.data.resolve(), args.site.resolve()
    modules = tensorflow_js()
    data.mkdir(exist_ok=True)
    run(DIGITS / "prepare.py", data)
    site.mkdir(exist_ok=True)
    produce = [data / "train", "--mode", "gray", "--transform", "augment:augment", "--workers", args.workers]
    train = [sys.executable, HERE / "train.py", "--test", data / "test.npz", "--model", site / "model"]
    epochs = ["--epochs", args.epochs]
    run("-m", "penstock", "run", "images", *produce, *epochs, "--", *train, *epochs)
    for file in [*(HERE / "page").iterdir(), *(modules / name for name in (*SCRIPTS, *WASM))]:
        shutil.copy(file, site)
    print(f"the page is in {site}; serve it: python -m http.server --directory {site}")


def tensorflow_js() -> Path:
    """Return the folder of TensorFlow.js that npm installed here, or in the package of this repository."""
    for folder in (HERE, HERE.parents[1] / "js"):
        modules = folder / "node_modules/@tensorflow"
        if (modules / WASM[0]).exists():
            return modules
    sys.exit(f"TensorFlow.js is not installed: run npm install --prefix {HERE}")


def run(*command: object) -> None:
    """Run Python with these arguments in the folder of the transform, and end with it if it fails."""
    ended = subprocess.run([sys.executable, *map(str, command)], cwd=DIGITS, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
