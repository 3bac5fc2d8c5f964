"""httpx; with the argument `h2` it offers HTTP/2, which it speaks inside of tunnels alone."""

import sys

import httpx

from talk import ASKED, PATIENCE, Stopwatch, saw, serve


def client():
    return httpx.Client(http2="h2" in sys.argv, timeout=PATIENCE)


def get(url, headers):
    with client() as http:
        response = http.get(url, headers=headers)
        return saw(response.status_code, response.text, version(response))


def post(url, headers):
    with client() as http:
        response = http.post(url, json=ASKED, headers=headers)
        return saw(response.status_code, response.text, version(response))


def stream(url, headers):
    stopwatch = Stopwatch()
    with client() as http, http.stream("GET", url, headers=headers) as response:
        lines = []
        for line in response.iter_lines():
            stopwatch.line(line)
            lines.append(line)
        return saw(response.status_code, "\n".join(lines), version(response), stopwatch)


def twice(url, headers):
    with client() as http:
        http.get(url, headers=headers).raise_for_status()
        response = http.get(url, headers=headers)
        return saw(response.status_code, response.text, version(response))


def version(response):
    return response.http_version.removeprefix("HTTP/")


serve(get=get, post=post, stream=stream, twice=twice)
