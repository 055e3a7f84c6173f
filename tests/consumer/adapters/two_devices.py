"""A process with two logical CPUs: what `tf.distribute` refuses, and the loop of docs/tensorflow.md on both."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import penstock.tensorflow
from penstock_consumer.read.hooks import hooks_of
from tests.contracts.adapter import delivered, loader_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "tensorflow.md").read_text()


def main(url: str) -> None:
    """Print the results as JSON."""
    (snippet,) = re.findall(r"^```python\n((?:(?!```).)*MirroredStrategy.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with loader_of(url) as loader:
        batches = penstock.tensorflow.dataset(loader, select=("x", "y"))
        told: dict[str, Any] = {
            "fit": refused(lambda: fit(mirrored, batches)),
            "experimental_distribute_dataset": refused(lambda: loop(mirrored, batches)),
            "acknowledging": refused(lambda: loop(mirrored, penstock.tensorflow.acknowledging(batches, batches))),
            "delivered before": delivered(url),
        }
        page: dict[str, Any] = {}
        exec(snippet, page)
        losses: list[int] = []
        for x, y in batches:
            losses.append(int(page["train"](page["share"](x), page["share"](y))))
            if len(losses) == 3:
                hooks_of(loader).acknowledger.flush()
                told["delivered in the third step"] = delivered(url)[0]
    print(json.dumps({**told, "seen": sum(losses)}))


def fit(strategy: Any, batches: Any) -> None:
    """Fit a model on both devices, as Keras does."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(batches, verbose=0)


def loop(strategy: Any, batches: Any) -> None:
    """Run the strategy's own loop."""
    for _ in strategy.experimental_distribute_dataset(batches):
        pass


def refused(way: Callable[[], None]) -> str:
    """Return the refusal's message, or '' if the call was not refused."""
    try:
        way()
    except tf.errors.OpError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
