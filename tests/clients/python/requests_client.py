"""requests. It takes its roots from REQUESTS_CA_BUNDLE and knows no SSL_CERT_FILE."""

import requests

from talk import ASKED, PATIENCE, Stopwatch, saw, serve


def get(url, headers):
    response = requests.get(url, headers=headers, timeout=PATIENCE)
    return saw(response.status_code, response.text)


def post(url, headers):
    response = requests.post(url, json=ASKED, headers=headers, timeout=PATIENCE)
    return saw(response.status_code, response.text)


def stream(url, headers):
    stopwatch = Stopwatch()
    with requests.get(url, headers=headers, timeout=PATIENCE, stream=True) as response:
        lines = []
        # The default chunk of 512 bytes would gather the events.
        for line in response.iter_lines(chunk_size=1):
            stopwatch.line(line)
            lines.append(line)
        return saw(response.status_code, b"\n".join(lines), stopwatch=stopwatch)


def twice(url, headers):
    with requests.Session() as session:
        session.get(url, headers=headers, timeout=PATIENCE).raise_for_status()
        response = session.get(url, headers=headers, timeout=PATIENCE)
        return saw(response.status_code, response.text)


serve(get=get, post=post, stream=stream, twice=twice)
