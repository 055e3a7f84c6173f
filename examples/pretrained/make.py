"""Lays out a page that runs a model trained by others: the one that the package magika ships, in ONNX.

`python make.py` needs no server and no training. `python -m http.server --directory site` then serves the page.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import magika

HERE = Path(__file__).resolve().parent
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")


def main() -> None:
    """Copy the model, what runs it, and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, default=HERE / "site", metavar="DIR", help="where the page goes")
    parser.add_argument("--runtime", type=Path, default=HERE / "node_modules/onnxruntime-web/dist", metavar="DIR")
    args = parser.parse_args()
    args.site.mkdir(exist_ok=True)
    model = max((Path(magika.__file__).parent / "models").glob("standard_v*"))
    files = [model / "model.onnx", model / "config.min.json", HERE.parent / "browser/page/style.css"]
    for file in [*files, *(HERE / "page").iterdir(), *(args.runtime / name for name in RUNTIME)]:
        shutil.copy(file, args.site)
    print(f"the page is in {args.site}; serve it: python -m http.server --directory {args.site}")


if __name__ == "__main__":
    main()
