"""urllib of the standard library. It closes each connection and CONNECTs in HTTP/1.0 without any field."""

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from talk import ASKED, PATIENCE, Stopwatch, saw, serve


def call(url, headers, body=None):
    try:
        return urlopen(Request(url, body, headers), timeout=PATIENCE)
    except HTTPError as answer:
        return answer


def get(url, headers):
    with call(url, headers) as response:
        return saw(response.status, response.read())


def post(url, headers):
    with call(url, {**headers, "content-type": "application/json"}, json.dumps(ASKED).encode()) as response:
        return saw(response.status, response.read())


def stream(url, headers):
    stopwatch = Stopwatch()
    with call(url, headers) as response:
        lines = []
        for line in response:
            stopwatch.line(line)
            lines.append(line)
        return saw(response.status, b"".join(lines), stopwatch=stopwatch)


def twice(url, headers):
    get(url, headers)
    return get(url, headers)


serve(get=get, post=post, stream=stream, twice=twice)
