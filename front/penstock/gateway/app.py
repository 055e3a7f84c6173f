"""The gateway as an ASGI application: `/v1/read` over WebSocket, `/v1/members` over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.gateway.limits import (
    CLOSE_S,
    MAX_MESSAGE_BYTES,
    OPEN_S,
    Limits,
    OriginCheck,
    Places,
    RateLimit,
)
from penstock.gateway.member import BatchMessage, Ended, Event, GatewayMember, Report, Told
from penstock.gateway.refusals import BAD_MESSAGE, BAD_TOKEN, NO_MEMBER, TOO_MANY, TOO_SLOW, Refusal
from penstock.gateway.requests import acknowledged_in, batch_size_in, credits_in, parse_message, require_grant
from penstock.gateway.tokens import Grant, Tokens

MAX_WAIT_S = 30.0
"""The longest wait of one HTTP request for a batch."""
TELL_EVERY_S = 10.0
"""The pause between two lines of one kind. Strangers must not fill a log."""

Notify = Callable[[str], None]


class Gateway:
    """Members for clients that show a token. One event loop serves all of them, and each member has a thread."""

    def __init__(self, url: str, tokens: Tokens, origins: OriginCheck, limits: Limits, notify: Notify) -> None:
        self._url, self._tokens, self._origins, self._limits, self._notify = url, tokens, origins, limits, notify
        self._places = Places(limits)
        self._http: dict[str, HttpMember] = {}
        self._leaving: list[GatewayMember] = []
        """The members without a client that have a place until their threads end."""
        self._rates: dict[Grant, RateLimit] = {}
        self._reported_s: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(limits.members + 4, "penstock-gateway")
        """The threads that acknowledge and close, which may wait for Redis."""

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            WebSocketRoute("/v1/read", self._read),
            Route("/v1/members", self._open, methods=["POST"]),
            Route("/v1/members/{member}/next", self._next, methods=["POST"]),
            Route("/v1/members/{member}/ack", self._ack, methods=["POST"]),
            Route("/v1/members/{member}", self._close, methods=["DELETE"]),
        ]
        refusals: dict[Any, Any] = {Refusal: self._refused}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=refusals)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            await asyncio.gather(*[self._end(held) for held in list(self._http.values())])
            self._pool.shutdown()

    # --- WebSocket ---

    async def _read(self, socket: WebSocket) -> None:
        await socket.accept()
        try:
            self._origins.require(socket.headers.get("origin"), socket.headers.get("host"))
            message = await self._first_message(socket)
            grant = self._tokens.grant_of(message.get("token"))
            socket.state.unproven.accept()
            require_grant(message, grant)
            size = batch_size_in(message)
            await self._serve(socket, grant, size)
            with suppress(WebSocketDisconnect, RuntimeError):  # the client closed it
                await socket.close()
        except Refusal as refusal:
            self._tell(refusal)
            with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):  # it may have gone, or take nothing
                async with asyncio.timeout(CLOSE_S):
                    await socket.send_json(refusal.message())
                    await socket.close(refusal.close_code, refusal.reason)
        except WebSocketDisconnect:
            pass

    async def _first_message(self, socket: WebSocket) -> dict[str, Any]:
        """Return the message with the token."""
        try:
            async with asyncio.timeout_at(socket.state.unproven.until_s):
                message = parse_message(await _message(socket))
        except TimeoutError:
            raise Refusal(BAD_TOKEN, f"no token came within {OPEN_S:.0f} s: the first message shows it") from None
        if message.get("type") != "open":
            raise Refusal(BAD_MESSAGE, f"the first message is {str(message.get('type'))[:40]!r}, expected 'open'")
        return message

    async def _serve(self, socket: WebSocket, grant: Grant, batch_size: int) -> None:
        self._places.take(grant)
        events, deliver = _mailbox()
        member = GatewayMember(self._url, grant, batch_size, self._limits, deliver, self._report)
        client = socket.client.host if socket.client else "a client"
        self._notify(f"{client} joins {grant} as {member.name}: {self._members()}")
        member.start()
        tasks = {
            asyncio.ensure_future(self._send(socket, member, events)),
            asyncio.ensure_future(self._receive(socket, member)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            left = await self._stop(member)
            returned = f"; {left} batches that it had not acknowledged are given to others" if left else ""
            self._notify(f"{member.name} leaves {grant}{returned}")

    async def _send(self, socket: WebSocket, member: GatewayMember, events: asyncio.Queue[Event]) -> None:
        while not isinstance(event := await events.get(), Ended):
            if isinstance(event, Told):
                await self._in_time(socket.send_json(event.value))
            else:
                await self._in_time(socket.send_bytes(event.content))
                member.sent()
        if event.refusal is not None:
            raise event.refusal

    async def _receive(self, socket: WebSocket, member: GatewayMember) -> None:
        rate = RateLimit(self._limits.messages_per_s, time.monotonic)
        while True:
            text = await _message(socket)
            await asyncio.sleep(rate.spend())  # one that asks too often is read more slowly, and no other is
            message = parse_message(text)
            kind = message.get("type")
            if kind == "credits":
                member.grant_credits(credits_in(message))
            elif kind == "epoch":
                member.want_epoch()
            elif kind == "ack":
                numbers = acknowledged_in(message)
                await self._in_pool(member.acknowledge, numbers)
                await self._in_time(socket.send_json({"type": "acked", "batches": numbers}))
            elif kind == "close":
                return
            else:
                known = "credits, epoch, ack or close"
                raise Refusal(BAD_MESSAGE, f"a message has the type {str(kind)[:40]!r}, expected {known}")

    async def _in_time(self, sending: Any) -> None:
        """Wait until a message is on its way. Raises Refusal if the client takes nothing for the time of a lease."""
        try:
            async with asyncio.timeout(self._limits.lease_s):
                await sending
        except TimeoutError:
            took = f"the client took nothing for {self._limits.lease_s:g} s"
            raise Refusal(TOO_SLOW, f"{took}, so its batches go to others: grant fewer credits") from None

    # --- HTTP ---

    async def _open(self, request: Request) -> Response:
        grant = self._granted(request)
        message = await _body(request)
        require_grant(message, grant)
        size = batch_size_in(message)
        self._places.take(grant)
        held = HttpMember(self._url, grant, size, self._limits, self._report)
        self._http[held.member.name] = held
        self._notify(f"a client of HTTP joins {grant} as {held.member.name}: {self._members()}")
        try:
            facts = await held.opened()
        except BaseException:
            await self._end(held)
            raise
        return JSONResponse(facts, 201)

    async def _next(self, request: Request) -> Response:
        held = self._held(request)
        try:
            wait_s = min(MAX_WAIT_S, max(0.0, float(request.query_params.get("wait_s", "10"))))
        except ValueError:
            raise Refusal(BAD_MESSAGE, "wait_s is no number of seconds") from None
        try:
            event = await held.next(wait_s)
        except Refusal:
            await self._end(held)
            raise
        if event is None:
            return Response(status_code=204)
        if isinstance(event, Told):
            return JSONResponse(event.value)
        return Response(event.content, media_type="application/octet-stream")

    async def _ack(self, request: Request) -> Response:
        held = self._held(request)
        numbers = acknowledged_in(await _body(request))
        await self._in_pool(held.member.acknowledge, numbers)
        return JSONResponse({"type": "acked", "batches": numbers})

    async def _close(self, request: Request) -> Response:
        await self._end(self._held(request))
        return Response(status_code=204)

    def _granted(self, request: Request) -> Grant:
        """Return the group that the request's token opens, within the token's rate. Raises Refusal."""
        self._origins.require(request.headers.get("origin"), request.headers.get("host"))
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        grant = self._tokens.grant_of(token if scheme.lower() == "bearer" else None)
        request.state.unproven.accept()
        rate = self._rates.setdefault(grant, RateLimit(self._limits.messages_per_s, time.monotonic))
        if (late_s := rate.spend()) > 0:
            per_s = self._limits.messages_per_s
            raise Refusal(TOO_MANY, f"more than {per_s:g} requests a second (--rate): wait {late_s:.1f} s")
        return grant

    def _held(self, request: Request) -> HttpMember:
        grant = self._granted(request)
        held = self._http.get(request.path_params["member"])
        if held is None or held.member.grant != grant:
            raise Refusal(
                NO_MEMBER, f"no such member: one that asks nothing for {self._limits.lease_s:g} s leaves its group"
            )
        held.touch()
        return held

    async def _end(self, held: HttpMember) -> None:
        if self._http.pop(held.member.name, None) is not None:
            await self._stop(held.member)
            self._notify(f"{held.member.name} leaves {held.member.grant}")

    async def _sweep(self) -> None:
        """End the members of clients that stay away, as a lease would."""
        while True:
            await asyncio.sleep(min(1.0, self._limits.lease_s / 4))
            for held in [one for one in self._http.values() if one.idle_s > self._limits.lease_s]:
                await self._end(held)
            self._give_back()

    async def _refused(self, _: Request, refusal: Refusal) -> Response:
        self._tell(refusal)
        headers = {"Retry-After": "1"} if refusal.kind is TOO_MANY else {}
        return JSONResponse(refusal.message(), refusal.kind.status, headers)

    # --- both ---

    def _members(self) -> str:
        return f"{self._places.taken} of {self._limits.members} members"

    def _tell(self, refusal: Refusal) -> None:
        """Say to the operator what was refused."""
        self._report(refusal.kind.code, f"refused ({refusal.kind.code}): {refusal.cause}")

    def _report(self, kind: str, line: str) -> None:
        """Print a line for the operator, unless a line of this kind was printed just now."""
        now = time.monotonic()
        if now - self._reported_s.get(kind, -TELL_EVERY_S) >= TELL_EVERY_S:
            self._reported_s[kind] = now
            self._notify(line)

    async def _in_pool(self, call: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *given)

    async def _stop(self, member: GatewayMember) -> int:
        """Let a member leave its group, also if the request for it was cancelled."""
        try:
            left: int = await asyncio.shield(self._in_pool(member.stop))
        finally:
            self._leaving.append(member)
            self._give_back()
        return left

    def _give_back(self) -> None:
        """Give back the places of members whose threads have ended. One that joins a group may wait for its server."""
        for member in [one for one in self._leaving if not one.is_running]:
            self._leaving.remove(member)
            self._places.give_back(member.grant)


class HttpMember:
    """A member of a client that asks over HTTP. It has one credit at a time, from a request for a batch."""

    def __init__(self, url: str, grant: Grant, batch_size: int, limits: Limits, report: Report) -> None:
        self._events, deliver = _mailbox()
        self.member = GatewayMember(url, grant, batch_size, limits, deliver, report)
        self._turn = asyncio.Lock()
        self._has_credit = self._has_epoch = False
        self._asking = 0
        self._asked_s = time.monotonic()
        self.member.start()

    @property
    def idle_s(self) -> float:
        """Return the time since the client asked for something."""
        return 0.0 if self._asking else time.monotonic() - self._asked_s

    def touch(self) -> None:
        """Note that the client asks for something."""
        self._asked_s = time.monotonic()

    async def opened(self) -> dict[str, Any]:
        """Wait until the member has joined, and return the facts for the client. Raises Refusal."""
        event = await self._event(MAX_WAIT_S)
        if not isinstance(event, Told):
            raise Refusal(TOO_SLOW, "the stream has no sample yet, or Redis does not answer: try again later")
        return event.value

    async def next(self, wait_s: float) -> Told | BatchMessage | None:
        """Return the next batch, the end of an epoch, or None if neither comes in time. Raises Refusal."""
        self._asking += 1
        try:
            async with self._turn:
                if not self._has_epoch:
                    self.member.want_epoch()
                    self._has_epoch = True
                if not self._has_credit:
                    self.member.grant_credits(1)
                    self._has_credit = True
                event = await self._event(wait_s)
                if isinstance(event, BatchMessage):
                    self._has_credit = False
                    self.member.sent()
                elif event is not None:
                    self._has_epoch = False
                return event
        finally:
            self._asking -= 1
            self.touch()

    async def _event(self, wait_s: float) -> Told | BatchMessage | None:
        """Return the next event that is no notice, or None. Raises Refusal."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    event = await self._events.get()
                    if isinstance(event, Ended):
                        raise event.refusal or Refusal(NO_MEMBER, "the member has left its group")
                    if isinstance(event, BatchMessage) or event.value["type"] != "notice":
                        return event
        return None


def _mailbox() -> tuple[asyncio.Queue[Event], Callable[[Event], None]]:
    """Return a queue, and the function with which another thread puts events into it."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def deliver(event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(events.put_nowait, event)

    return events, deliver


async def _message(socket: WebSocket) -> str | None:
    """Return the text of the next message, or None for a binary one. Raises WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text: str | None = message.get("text")
    return text


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request, of a bounded size that comes in a bounded time. Raises Refusal."""
    content = b""
    try:
        async with asyncio.timeout(OPEN_S):
            async for piece in request.stream():
                content += piece
                if len(content) > MAX_MESSAGE_BYTES:
                    break
    except TimeoutError:
        raise Refusal(TOO_SLOW, f"the request's body did not come within {OPEN_S:.0f} s") from None
    return parse_message(content)
