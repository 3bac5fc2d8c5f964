"""What the document cannot say about requests, and what it says about events.

JSON Schema knows no "distinct by one key" and no "at most the number of", and a text that is made of a schema is
no URL that answers. Requests that are to be right are mended in that; all others go out as they are made.
"""

import json
import os
import re
import time
import zlib

import schemathesis
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

ORIGIN = os.environ["ORIGIN"]

DEADLINE = "x-request-deadline"
# What may be one: a date and time, or a number.
IN_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt].*|\d+(\.\d+)?")
EVENTS = "text/event-stream"
# Time enough for any request, even on a machine that does much else.
AHEAD = 60

# Milliseconds, where a call would last until the deadline.
SOON = 100

HANG = f"{ORIGIN}/hang"
# None is what was made. Only the origin may be reached.
URLS = [
    *(f"{ORIGIN}/{what}" for what in ("json", "text", "bytes", "nothing", "twice", "404", "503")),
    HANG,
    "http://127.0.0.1:9/",
    "https://api.example.com/v1/search?q=1",
    None,
]
CHOICES = {
    "url": URLS,
    "backup": [f"{ORIGIN}/json", None],
    "method": ["GET", "POST", "delete", None],
    "headers": [{"x-one": "1"}, {"x-two": ["1", "2"]}, None],
    "body_base64": ["aGVkZ2U=", None],
}


@schemathesis.hook
def before_call(context, case, kwargs):
    deadline = case.headers.get(DEADLINE)
    if isinstance(deadline, str) and IN_TIME.fullmatch(deadline):
        # What is past is answered with 504, as documented, but says nothing about the rest of the request.
        case.headers[DEADLINE] = later(deadline)
    if case.meta is None or not case.meta.generation.mode.is_positive or not isinstance(case.body, dict):
        return
    case.headers["accept"] = one_of(["application/json", EVENTS], json.dumps(case.body))
    case.body = mended(case.body)


def later(deadline: str) -> str:
    """In the form in which it was given."""
    end = time.time() + AHEAD
    if "-" in deadline:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end))
    return f"{end:.3f}" if "." in deadline else str(int(end * 1000))


def mended(fanout: dict) -> dict:
    """With ids that are distinct, URLs that lead somewhere, and no more results wanted than there are calls."""
    calls, ids = [], set()
    for at, call in enumerate(fanout["calls"]):
        id = call["id"]
        call = {**call, "id": id if id not in ids else f"{at} {id}"[:200]}
        ids.add(call["id"])
        for key in CHOICES.keys() & {key for key, value in call.items() if value is not None}:
            call[key] = one_of(CHOICES[key], f"{key} {at} {id}") or call[key]
        calls.append(call)
    fanout = {**fanout, "calls": calls}
    if any(HANG in (call["url"], call.get("backup")) for call in calls):
        fanout["deadline_ms"] = SOON
    if fanout.get("min_results"):
        fanout["min_results"] = min(fanout["min_results"], len(calls))
    return fanout


def one_of(choices: list, text: str):
    """The same for the same text in every run. The lower bits of a checksum alone are too regular."""
    return choices[zlib.crc32(text.encode()) // 7919 % len(choices)]


@schemathesis.check
def events_conformance(ctx, response, case):
    """A stream's events are those that the document tells of: numbered, one for each call, and the summary last."""
    if response.headers.get("content-type") != [f"{EVENTS}; charset=utf-8"]:
        return
    *blocks, done, rest = response.content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), "the stream does not end with [DONE]"
    events = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks if block[0] != ":"]
    assert [int(event["id"]) for event in events] == list(range(1, len(events) + 1)), "the ids do not count"
    told = [(event["event"], json.loads(event["data"])) for event in events]
    schemas = {"result": "Result", "missing": "Missing", "deadline": "Struck", "complete": "Summary"}
    for name, data in told:
        validate(case, schemas[name], data)
    *others, (last, summary) = told
    assert last == "complete"
    ids = [data["id"] for name, data in others if name != "deadline"]
    late = [id for name, data in others if name == "deadline" for id in data["pending"]]
    asked = {call["id"] for call in case.body["calls"]}
    assert len(ids + late) == len({*ids, *late}), "more than one event for a call"
    assert asked == {*ids, *late}, "no event for a call"
    assert summary["counts"]["results"] + len(summary["missing"]) == len(asked)


def validate(case, name: str, value):
    """By a schema of the document's components."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": case.operation.schema.raw_schema["components"]}
    error = best_match(Draft202012Validator(schema).iter_errors(value))
    assert error is None, f"no {name}: {error}"
