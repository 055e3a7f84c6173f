"""Callbacks for ``fit``, and ``to_tfjs(model, folder)``. Importing this imports Keras."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from penstock_common.extras import needed
from penstock_common.hints import no_such_name

with needed("keras", "penstock.keras", "for its torch backend: pip install keras 'penstock[torch]'"):
    from penstock_consumer.adapters.keras import Acknowledge, ModelCheckpoint
    from penstock_consumer.adapters.keras_tfjs import TfjsModel, TfjsWeight, describe_tfjs, to_tfjs

__all__ = ["Acknowledge", "ModelCheckpoint", "TfjsModel", "TfjsWeight", "describe_tfjs", "to_tfjs"]

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name, __all__, sys._getframe(1))
