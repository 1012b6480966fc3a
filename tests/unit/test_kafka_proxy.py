"""The proxy of Kafka's requests, before something that only frames messages: each point is where it is said to be."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.kafka_proxy import HOST, Api, KafkaProxy, Point

WAIT_S = 20.0


def received(connection: socket.socket) -> bytes:
    """Read a frame without its length; b"" at the end of the connection."""
    head = connection.recv(4, socket.MSG_WAITALL)
    return connection.recv(struct.unpack(">i", head)[0], socket.MSG_WAITALL) if len(head) == 4 else b""


def request(api: Api, correlation: int, text: bytes = b"") -> bytes:
    body = struct.pack(">hhi", api, 9, correlation) + text
    return struct.pack(">i", len(body)) + body


class Echo(threading.Thread):
    """In place of a broker: answers each request with its text, once `answers` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        self.got, self.answers = list[bytes](), threading.Event()
        self.answers.set()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                while frame := received(connection):
                    self.got.append(frame[8:])
                    assert self.answers.wait(WAIT_S)
                    answer = frame[4:]
                    try:
                        connection.sendall(struct.pack(">i", len(answer)) + answer)
                    except OSError:
                        break

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.join(WAIT_S)


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    echo.start()
    yield echo
    echo.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[KafkaProxy]:
    before = set(threading.enumerate())
    proxy = KafkaProxy()
    proxy.open(echo.port)
    yield proxy
    proxy.close()
    proxy.close()
    assert set(threading.enumerate()) <= before


def client(proxy: KafkaProxy) -> socket.socket:
    return socket.create_connection((HOST, proxy.port), WAIT_S)


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(("point", "reaches_the_broker"), [("arrived", False), ("forwarded", True), ("answered", True)])
def test_an_order_is_carried_out_at_its_point(
    echo: Echo, proxy: KafkaProxy, point: Point, reaches_the_broker: bool
) -> None:
    if point == "forwarded":
        echo.answers.clear()
    seen: list[int] = []
    with client(proxy) as one, client(proxy) as other:
        order = proxy.order(Api.Fetch, point, lambda: seen.append(len(echo.got)), mentions=(b"topic",), nth=2)
        for number, (api, text) in enumerate([(Api.Produce, b"topic"), (Api.Fetch, b"x"), (Api.Fetch, b"a topic")]):
            if point != "forwarded":
                one.sendall(request(api, number, text))
                assert received(one) == struct.pack(">i", number) + text
        assert not order.fired.is_set()
        if point == "forwarded":
            order.nth = 1
        before = len(echo.got)
        one.sendall(request(Api.Fetch, 7, b"the topic"))
        assert order.fired.wait(WAIT_S)
        assert seen == [before + reaches_the_broker] or (point == "forwarded" and len(seen) == 1)
        echo.answers.set()
        assert ended(one), "the answer is not given"
        assert ended(other), "all connections end"
    assert order.request == "v9, correlation 7"
    deadline = time.monotonic() + WAIT_S
    while reaches_the_broker and echo.got[-1:] != [b"the topic"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (echo.got[-1:] == [b"the topic"]) == reaches_the_broker
    with pytest.raises(ConnectionRefusedError):
        client(proxy)
    proxy.open(echo.port)
    with client(proxy) as again:
        again.sendall(request(Api.Fetch, 8, b"the topic"))
        assert received(again) == struct.pack(">i", 8) + b"the topic"
    assert proxy.seen["Fetch"] == order.seen + 1 + (point != "forwarded")


def test_a_request_whose_answer_is_not_waited_for_does_not_use_an_order_up(echo: Echo, proxy: KafkaProxy) -> None:
    echo.answers.clear()
    order = proxy.order(Api.ListOffsets, "answered", lambda: None)
    with client(proxy) as one:
        one.sendall(request(Api.ListOffsets, 1))
        while not echo.got:
            time.sleep(0.01)
    echo.answers.set()
    with client(proxy) as other:
        while not order.fired.is_set():
            try:
                other.sendall(request(Api.ListOffsets, 2))
                received(other)
            except OSError:
                break
        assert order.fired.wait(WAIT_S)


def test_an_order_that_is_taken_back_is_forgotten_and_no_broker_ends_a_connection(
    echo: Echo, proxy: KafkaProxy
) -> None:
    order = proxy.order(Api.Metadata, "arrived", lambda: None)
    proxy.cancel(order)
    with client(proxy) as one:
        one.sendall(request(Api.Metadata, 1))
        assert received(one) == struct.pack(">i", 1)
    proxy.shut()
    with socket.create_server((HOST, 0)) as gone:
        nobody = gone.getsockname()[1]
    proxy.open(nobody)
    with client(proxy) as one:
        assert ended(one)
    assert not order.fired.is_set()
