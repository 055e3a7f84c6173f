"""The monitor as a page: the records of `penstock monitor`, and the newest samples as pictures. It only reads."""

from __future__ import annotations

import asyncio
import base64
import hmac
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from penstock.gateway.refusals import BAD_TOKEN, Kind, Refusal, refusal_of
from penstock.views.pictures import fitted
from penstock.views.show import image_decoder, shown_of
from penstock_common.errors import DamagedKey, EpochNotFound, PenstockError
from penstock_common.stream.client import connect
from penstock_common.stream.streams import load_stream
from penstock_consumer.replay.samples import Sample, SampleReader, newest_epoch

HTML = Path(__file__).with_name("monitor.html")
NO_STREAM = Kind("no_stream", 404)
SIDE = 96
"""The longest side of a picture in pixels."""
SAMPLES = 12
KEPT_S = 2.0
"""The time for which pictures are kept. Many pages cost what one costs."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing, and sends nothing to other hosts."""

Looks = Callable[[], Iterator[list[dict[str, Any]]]]


class LatestLook:
    """The latest records of the streams, which a thread renews. It begins again after an error, and keeps the error."""

    def __init__(self, looks: Looks, every_s: float) -> None:
        self._looks, self._every_s = looks, every_s
        self.found: dict[str, Any] = {"streams": [], "error": None, "every_s": every_s}
        """The records, and the error of the last look, if it failed."""
        threading.Thread(target=self._run, name="penstock-looks", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                for records in self._looks():
                    self.found = {"streams": records, "error": None, "every_s": self._every_s}
            except PenstockError as error:
                self.found = {**self.found, "error": str(error)}
                time.sleep(self._every_s)


class NewestPictures:
    """The newest samples of each stream as pictures."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, dict[str, Any]]] = {}

    def of(self, name: str) -> dict[str, Any]:
        """Return the newest samples of a stream. Raises PenstockError."""
        with self._lock:
            at, found = self._kept.get(name, (-KEPT_S, {}))
            if time.monotonic() - at >= KEPT_S:
                found = self._read(name)
                self._kept[name] = (time.monotonic(), found)
            return found

    def _read(self, name: str) -> dict[str, Any]:
        with connect(self._url) as client:
            stream = load_stream(client, name)
            samples: list[Sample] = []
            if stream.spec is not None:
                try:
                    epoch = newest_epoch(client, stream)
                    with SampleReader(client, stream, epoch, holds=False) as reader:
                        samples, _ = reader.newest(SAMPLES, {})
                except (EpochNotFound, DamagedKey):  # nothing is there yet, or the record of the stream tells it
                    samples = []
        decode = image_decoder()
        return {"stream": name, "samples": [_sample_fields(one, decode) for one in shown_of(stream, samples, None)]}


def _sample_fields(one: Any, decode: Any) -> dict[str, Any]:
    """Return a sample as the page draws it: RGB in base64, or words in the place of a picture."""
    rgb = one.picture(decode)
    fields: dict[str, Any] = {"captions": one.captions()}
    if rgb is None:
        return {**fields, "words": one.words()}
    if max(rgb.shape[:2]) > SIDE:
        rgb = fitted(rgb, SIDE, SIDE)
    height, width = rgb.shape[:2]
    return {**fields, "width": width, "height": height, "rgb": base64.b64encode(rgb.tobytes()).decode()}


def monitor_app(url: str, looks: Looks, every_s: float, token: str) -> Starlette:
    """Return the page and the two answers that it asks for.

    Args:
        url: the server of the streams.
        looks: yields the records of the streams at each interval, until an error.
        every_s: the interval.
        token: what a request must show. The page has it from the fragment of its address, which no server is sent.
    """
    latest, pictures = LatestLook(looks, every_s), NewestPictures(url)
    page = HTML.read_text(encoding="utf-8")

    def require(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
            raise Refusal(
                BAD_TOKEN, "this page has no valid token: open the address that `penstock monitor --web` printed"
            )
        request.state.unproven.accept()

    async def show(_: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})

    async def streams(request: Request) -> Response:
        require(request)
        return JSONResponse(latest.found, headers={"Cache-Control": "no-store"})

    async def samples(request: Request) -> Response:
        require(request)
        name = request.path_params["stream"]
        if name not in {record["stream"] for record in latest.found["streams"]}:
            raise Refusal(NO_STREAM, "no such stream is shown here: reload the page")
        try:
            found = await asyncio.to_thread(pictures.of, name)
        except PenstockError as error:
            raise refusal_of(error) from error
        return JSONResponse(found, headers={"Cache-Control": "no-store"})

    async def refused(_: Request, refusal: Refusal) -> Response:
        return JSONResponse(refusal.message(), refusal.kind.status)

    handlers: dict[Any, Any] = {Refusal: refused}
    routes = [Route("/", show), Route("/v1/streams", streams), Route("/v1/streams/{stream}/samples", samples)]
    return Starlette(routes=routes, exception_handlers=handlers)
