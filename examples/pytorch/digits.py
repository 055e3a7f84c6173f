"""scikit-learn's handwritten digits as arrays: `train` is what the workers make samples of, `test` is held out."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

_images, _labels = load_digits(return_X_y=True)
_order = np.random.default_rng(0).permutation(len(_images))
_x, _y = _images[_order].astype(np.uint8), _labels[_order].astype(np.int64)
train = {"x": _x[360:], "y": _y[360:]}
"""``x`` uint8 [n, 64], 0 to 16; ``y`` int64 [n]."""
test = {"x": _x[:360], "y": _y[:360]}
