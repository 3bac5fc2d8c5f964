"""grpcio without generated code: a message is its bytes. It reads `https_proxy` in lower case alone."""

from urllib.parse import urlsplit

import grpc

from talk import PATIENCE, Stopwatch, saw, serve


def channel(url):
    return grpc.secure_channel(url.netloc, grpc.ssl_channel_credentials())


def unary(url, headers):
    url = urlsplit(url)
    with channel(url) as tools:
        call = tools.unary_unary(url.path)
        return saw(200, call(b"hello", timeout=PATIENCE, metadata=list(headers.items())))


def stream(url, headers):
    url, stopwatch, messages = urlsplit(url), Stopwatch(), []
    with channel(url) as tools:
        call = tools.unary_stream(url.path)
        for message in call(b"hello", timeout=PATIENCE, metadata=list(headers.items())):
            stopwatch.event()
            messages.append(message)
    return saw(200, b" ".join(messages), stopwatch=stopwatch)


serve(unary=unary, stream=stream)
