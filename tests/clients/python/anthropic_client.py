"""The Anthropic SDK as it comes: two retries of its own for whatever looks transient."""

import anthropic

from talk import PATIENCE, Stopwatch, saw, serve

ASKED = {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


def client(url, headers):
    # The SDK adds the version to the path itself.
    base = url.removesuffix("/v1")
    return anthropic.Anthropic(api_key="none", base_url=base, default_headers=headers, timeout=PATIENCE)


def chat(url, headers):
    with client(url, headers) as api:
        try:
            return saw(200, api.messages.create(**ASKED).content[0].text)
        except anthropic.APIStatusError as refusal:
            return saw(refusal.status_code, refusal.response.text)


def stream(url, headers):
    stopwatch = Stopwatch()
    with client(url, headers) as api, api.messages.stream(**ASKED) as chunks:
        words = []
        for word in chunks.text_stream:
            stopwatch.event()
            words.append(word)
        return saw(200, "".join(words), stopwatch=stopwatch)


def twice(url, headers):
    with client(url, headers) as api:
        api.messages.create(**ASKED)
        return saw(200, api.messages.create(**ASKED).content[0].text)


serve(chat=chat, stream=stream, twice=twice)
