"""The proxy of Kafka's requests, before something that only frames messages: each point is where it is said to be."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.support.kafka_proxy import HOST, Api, KafkaProxy, Point
from tests.support.waiting import until

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
            with connection, suppress(OSError):  # the proxy has ended it
                while frame := received(connection):
                    self.got.append(frame[8:])
                    assert self.answers.wait(WAIT_S)
                    answer = frame[4:]
                    connection.sendall(struct.pack(">i", len(answer)) + answer)

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


def eventually(true: Callable[[], bool]) -> None:
    until(true, what="what the proxy does")


def client(proxy: KafkaProxy) -> socket.socket:
    return socket.create_connection((HOST, proxy.port), WAIT_S)


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(("point", "forwarded"), [("arrived", False), ("forwarded", True), ("answered", True)])
def test_an_order_is_carried_out_at_its_point(echo: Echo, proxy: KafkaProxy, point: Point, forwarded: bool) -> None:
    carried_out = threading.Event()
    if point == "forwarded":
        echo.answers.clear()
    order = proxy.order(Api.Fetch, point, carried_out.set)
    with client(proxy) as one, client(proxy) as other:
        one.sendall(request(Api.Fetch, 7, b"the topic"))
        assert order.fired.wait(WAIT_S)
        assert carried_out.is_set()
        echo.answers.set()
        assert ended(one), "the answer is not given"
        assert ended(other), "all connections end"
    assert order.request == "v9, correlation 7"
    eventually(lambda: echo.got == [b"the topic"] * forwarded)
    with pytest.raises(ConnectionRefusedError):
        client(proxy)
    proxy.open(echo.port)
    with client(proxy) as again:
        again.sendall(request(Api.Fetch, 8, b"x"))
        assert received(again) == struct.pack(">i", 8) + b"x"
    assert echo.got == [b"the topic"] * forwarded + [b"x"], "nothing is forwarded later"


def test_an_order_is_for_the_nth_request_of_its_kind(echo: Echo, proxy: KafkaProxy) -> None:
    order = proxy.order(Api.Fetch, "arrived", lambda: None, mentions=(b"here", b"there"), nth=2)
    with client(proxy) as one:
        for api, text in [(Api.Produce, b"here"), (Api.Fetch, b"elsewhe"), (Api.Fetch, b"from here on")]:
            one.sendall(request(api, 3, text))
            assert received(one) == struct.pack(">i", 3) + text
        assert not order.fired.is_set()
        one.sendall(request(Api.Fetch, 4, b"there"))
        assert order.fired.wait(WAIT_S)
    assert order.seen == 2
    assert proxy.seen == {"Fetch": 3, "Produce": 1}


def test_a_request_whose_answer_is_not_waited_for_does_not_use_an_order_up(echo: Echo, proxy: KafkaProxy) -> None:
    echo.answers.clear()
    order = proxy.order(Api.ListOffsets, "answered", lambda: None)
    with client(proxy) as one:
        one.sendall(request(Api.ListOffsets, 1))
        eventually(lambda: len(echo.got) == 1)
    eventually(lambda: order in proxy._orders)
    echo.answers.set()
    with client(proxy) as other:
        other.sendall(request(Api.ListOffsets, 2))
        assert order.fired.wait(WAIT_S)


def test_a_refused_request_is_about_a_topic_that_is_not_there(echo: Echo, proxy: KafkaProxy) -> None:
    order = proxy.order(Api.Produce, "refused", lambda: None, mentions=(b"topic-1",))
    with client(proxy) as one:
        for number in (7, 8):
            one.sendall(request(Api.Produce, number, b"topic-1-writer topic-1 0"))
            assert received(one) == struct.pack(">i", number) + b"topic-1-writer topic-1 0"
            assert order.fired.is_set()
    assert echo.got == [b"topic-1-writer 1-cipot 0", b"topic-1-writer topic-1 0"]


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
