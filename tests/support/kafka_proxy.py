"""A TCP proxy in front of one Kafka broker that stops at a named point of a request, such as to kill the broker there.

It reads no more of Kafka's protocol than the frames: a length (4 bytes, big-endian), then in a request the API's key
(int16), its version (int16) and a correlation id (int32), in a response the correlation id. The broker must advertise
the proxy's address, or clients go past it: `ProxiedBroker` does.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from backend.kafka_client.settings import KafkaSettings
from recovery.testing.broker import LocalBroker, _free_port

HOST = "127.0.0.1"
MAX_FRAME = 256 * 1024 * 1024
UNDER_WAY_S = 0.002
"""How long the broker has a request, at the point `forwarded`, before the order is carried out."""
LATER_S = 0.5
"""How long a refusal is kept back, at the point `refused`: a client that has more to send sends it meanwhile."""
CALL_S = 60.0
_LENGTH, _REQUEST, _RESPONSE = struct.Struct(">i"), struct.Struct(">hhi"), struct.Struct(">i")

Point = Literal["arrived", "forwarded", "answered", "refused"]
"""The request has come and is not forwarded; it is forwarded and its answer is not given; its answer has come from the
broker and is not given. Or it is forwarded with a topic's name turned round, of which the broker says that it does not
know it; that is given, `LATER_S` later, as if it were about the topic."""


class Api(IntEnum):
    """Kafka's names of the requests that tests care for."""

    Produce = 0
    Fetch = 1
    ListOffsets = 2
    Metadata = 3
    FindCoordinator = 10
    ApiVersions = 18
    InitProducerId = 22
    OffsetForLeaderEpoch = 23
    AddPartitionsToTxn = 24
    EndTxn = 26
    DescribeConfigs = 32
    DescribeTopicPartitions = 75


@dataclass(eq=False)
class Order:
    """What is done at a point of a request.

    Attributes:
        api: Which kind of request.
        point: When.
        act: What is done, in the proxy's thread: nothing is forwarded meanwhile, and all connections end after it.
            Nothing is done at the point `refused`.
        mentions: A request counts only if it has one of these in it, such as a topic's name or id; empty: each counts.
            At the point `refused`, the topic's name.
        nth: Which one, counted from 1 and from the order on.
        fired: Set when it is done.
        seen: Requests counted.
        request: Version and correlation id of the request that it was.
    """

    api: Api
    point: Point
    act: Callable[[], None]
    mentions: tuple[bytes, ...] = ()
    nth: int = 1
    fired: threading.Event = field(default_factory=threading.Event)
    seen: int = 0
    request: str = ""

    def counts(self, api: int, frame: bytes) -> bool:
        """Count a request, and return whether it is the one."""
        if api != self.api or (self.mentions and not any(text in frame for text in self.mentions)):
            return False
        self.seen += 1
        return self.seen >= self.nth


@dataclass(eq=False)
class _Connection:
    """Both directions of one client's connection."""

    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    broker: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    silent: bool = False
    due: dict[int, Order] = field(default_factory=dict)

    def abort(self) -> None:
        for _, writer in (self.client, self.broker):
            writer.transport.abort()


class KafkaProxy:
    """The proxy; all of it runs in one thread. Refuses connections until `open`. Close it in the end.

    Args:
        port: Its port; 0 takes a free one at the first `open`.

    Attributes:
        seen: Requests by name, for a look at what clients send.
    """

    def __init__(self, port: int = 0) -> None:
        self.port, self.seen = port, Counter[str]()
        self._upstream = 0
        self._orders: list[Order] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kafka-proxy", daemon=True)
        self._thread.start()

    def open(self, upstream: int) -> None:
        """Accept connections, for the broker at this port; nothing changes where the proxy is open."""
        self._run(self._listen(upstream))

    def shut(self) -> None:
        """End all connections and refuse new ones, as a dead broker does."""
        if threading.current_thread() is self._thread:
            self._end()
        else:
            self._run(self._ended())

    def close(self) -> None:
        """End the proxy; closing twice does nothing."""
        if self._loop.is_closed():
            return
        self._run(self._ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def order(
        self, api: Api, point: Point, act: Callable[[], None], *, mentions: tuple[bytes, ...] = (), nth: int = 1
    ) -> Order:
        """Order what is done at a point of a request; see `Order`."""
        order = Order(api, point, act, mentions, nth)
        self._run(self._take(order))
        return order

    def cancel(self, order: Order) -> None:
        """Forget an order; one that is carried out already stays so."""
        self._run(self._forget(order))

    # ------------------------------------------------------------------------------------------- in the proxy's thread

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    async def _listen(self, upstream: int) -> None:
        self._upstream = upstream
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _take(self, order: Order) -> None:
        self._orders.append(order)

    async def _forget(self, order: Order) -> None:
        with suppress(ValueError):
            self._orders.remove(order)

    async def _ended(self) -> None:
        tasks = set(self._tasks)
        self._end()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        if self._server is None:  # accepted just before the proxy was shut
            writer.transport.abort()
            return
        self._tasks.add(task)
        pumps: list[asyncio.Task[None]] = []
        connection = None
        try:
            connection = _Connection((reader, writer), await asyncio.open_connection(HOST, self._upstream))
            pumps = [asyncio.create_task(pump(connection)) for pump in (self._requests, self._responses)]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass  # there is no broker, or the proxy ends: its server logs a task that was cancelled
        finally:
            self._tasks.discard(task)
            for pump in pumps:
                pump.cancel()
            writer.transport.abort()
            if connection is not None:
                connection.abort()
                self._orders += connection.due.values()  # never answered: the next such request is the one
            for ended in await asyncio.gather(*pumps, return_exceptions=True):
                if isinstance(ended, Exception) and not isinstance(ended, OSError | EOFError):
                    raise ended

    async def _requests(self, connection: _Connection) -> None:
        (reader, _), (_, broker) = connection.client, connection.broker
        while True:
            frame = await _frame(reader)
            api, version, correlation = _REQUEST.unpack_from(frame)
            order = self._due(api, frame)
            if order is not None:
                order.request = f"v{version}, correlation {correlation}"
                if order.point == "arrived":
                    self._carry_out(order)
                    return
                if order.point in ("answered", "refused"):
                    connection.due[correlation] = order
                if order.point == "refused":
                    frame = _renamed(frame, order.mentions[0], order.mentions[0][::-1])
                connection.silent = order.point == "forwarded"
            broker.write(_LENGTH.pack(len(frame)) + frame)
            await broker.drain()
            if connection.silent:
                assert order is not None
                await asyncio.sleep(UNDER_WAY_S)
                self._carry_out(order)
                return

    async def _responses(self, connection: _Connection) -> None:
        (_, client), (reader, _) = connection.client, connection.broker
        while True:
            frame = await _frame(reader)
            order = connection.due.pop(_RESPONSE.unpack_from(frame)[0], None)
            if order is not None and order.point == "refused":
                await asyncio.sleep(LATER_S)
                frame = _renamed(frame, order.mentions[0][::-1], order.mentions[0])
                order.fired.set()
            elif order is not None:
                self._carry_out(order)
                return
            if not connection.silent:
                client.write(_LENGTH.pack(len(frame)) + frame)
                await client.drain()

    def _due(self, api: int, frame: bytes) -> Order | None:
        self.seen[Api(api).name if api in set(Api) else str(api)] += 1
        for order in self._orders:
            if order.counts(api, frame):
                self._orders.remove(order)
                return order
        return None

    def _carry_out(self, order: Order) -> None:
        order.act()
        self._end()
        order.fired.set()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Read a frame without its length.

    Raises:
        EOFError: The connection has ended.
        ValueError: It is no frame of Kafka's.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not _RESPONSE.size <= length <= MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def _renamed(frame: bytes, name: bytes, other: bytes) -> bytes:
    """Put another name of the same length in a topic's place; a `transactional.id` that has the name in it is before.

    Raises:
        ValueError: The name is not there.
    """
    at = frame.rfind(name)
    if at < 0 or len(name) != len(other):
        raise ValueError(f"{name!r} is not in a frame of {len(frame)} bytes")
    return frame[:at] + other + frame[at + len(name) :]


class ProxiedBroker(LocalBroker):
    """A local broker with one more listener, which is reached through a proxy.

    The broker itself and whoever uses `settings` go past the proxy. Whoever uses `proxied` goes through it, always.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proxy = KafkaProxy(_free_port())

    def __enter__(self) -> ProxiedBroker:
        super().__enter__()
        return self

    @property
    def proxied(self) -> KafkaSettings:
        """How to connect through the proxy."""
        return KafkaSettings(f"{HOST}:{self.proxy.port}")

    def start(self) -> None:
        """Start the broker, then let the proxy accept connections."""
        super().start()
        self.proxy.open(self._ports[2])

    def kill(self) -> None:
        """End the broker with SIGKILL, and all connections of the proxy."""
        super().kill()
        self.proxy.shut()

    def close(self) -> None:
        """End the broker and the proxy, and remove the broker's data."""
        super().close()
        self.proxy.close()

    def _properties(self, folder: Path) -> str:
        """Add a listener to the configuration: of lines with the same name, the last counts."""
        port, controller, behind = self._ports
        return super()._properties(folder) + "\n".join(
            [
                f"listeners=CLIENT://{HOST}:{port},PROXIED://{HOST}:{behind},CONTROLLER://{HOST}:{controller}",
                f"advertised.listeners=CLIENT://{HOST}:{port},PROXIED://{HOST}:{self.proxy.port}",
                "listener.security.protocol.map=CLIENT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT\n",
            ]
        )
