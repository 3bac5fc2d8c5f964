"""How the Python programs of the suite hear what to do and tell what they saw.

The runner writes a line for each case: verb, URL and header fields, with tabs between. The program does that
as its library's users would, and answers with a line of JSON. What is right, only the runner knows.
"""

import json
import sys
import time

# Seconds. No case lets a client wait so long on purpose.
PATIENCE = 10

ASKED = {"ask": "hello"}


class Stopwatch:
    """When the events of a stream came, in milliseconds after the call began."""

    def __init__(self):
        self.began = time.monotonic()
        self.events_ms = []

    def event(self):
        self.events_ms.append(round((time.monotonic() - self.began) * 1000))

    def line(self, line: bytes | str):
        """Counts the events among the lines of a stream."""
        if line.startswith(b"data:" if isinstance(line, bytes) else "data:"):
            self.event()


def saw(status, body="", http=None, stopwatch=None) -> dict:
    """The report of a call that was answered."""
    text = body.decode() if isinstance(body, bytes) else body
    report = {"status": status, "body": text, "http": http}
    return {**report, "events_ms": stopwatch.events_ms} if stopwatch else report


def serve(**verbs):
    """Carries out case after case, until the runner closes the line."""
    for line in sys.stdin:
        verb, url, *fields = line.rstrip("\n").split("\t")
        headers = dict(field.split(": ", 1) for field in fields)
        try:
            report = verbs[verb](url, headers)
        except Exception as error:
            report = {"failure": " < ".join(_causes(error))}
        print(json.dumps(report), flush=True)


def _causes(error) -> list[str]:
    """What a user would find in the traceback, groups of exceptions included."""
    told = []
    while error is not None and len(told) < 8:
        told.append(f"{type(error).__name__}: {error}")
        inner = getattr(error, "exceptions", ())
        error = inner[0] if inner else error.__cause__ or error.__context__
    return told
