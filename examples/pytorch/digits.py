"""scikit-learn's handwritten digits as arrays: the workers make samples of `train`, and `test` is held out."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

_images, _labels = load_digits(return_X_y=True)
_x, _x_test, _y, _y_test = train_test_split(_images.astype(np.uint8), _labels, test_size=360, random_state=0)
train = {"x": _x, "y": _y}
"""``x`` uint8 [n, 64], from 0 to 16, and ``y`` int64 [n]."""
test = {"x": _x_test, "y": _y_test}
