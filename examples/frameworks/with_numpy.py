"""The NumPy group of together.py: without a framework, with the gradients computed explicitly."""

import digits
import numpy as np

import penstock

rng = np.random.default_rng(0)
w1, b1, w2, b2 = rng.normal(0, 1 / 8, (64, 64)), np.zeros(64), rng.normal(0, 1 / 8, (64, 10)), np.zeros(10)
params = [w1, b1, w2, b2]
speeds = [np.zeros_like(param) for param in params]
with penstock.Loader("train", group="numpy", batch_size=32, order="canonical") as loader:
    for _ in range(12):
        for batch in loader:
            x, rows = batch["x"] / 16, np.arange(batch.size)
            hidden = np.maximum(x @ w1 + b1, 0)
            slope = np.exp(hidden @ w2 + b2)
            slope /= slope.sum(axis=1, keepdims=True)  # softmax; then the gradient of the cross-entropy:
            slope[rows, batch["y"]] -= 1
            slope /= batch.size
            back = (slope @ w2.T) * (hidden > 0)
            for place, by in enumerate([x.T @ back, back.sum(0), hidden.T @ slope, slope.sum(0)]):
                speeds[place] = 0.9 * speeds[place] - 0.05 * by
                params[place] += speeds[place]
guesses = (np.maximum(digits.test["x"] / 16 @ w1 + b1, 0) @ w2 + b2).argmax(axis=1)
print(f"numpy: accuracy {(guesses == digits.test['y']).mean():.3f}")
