"""The OpenAI SDK as it comes: two retries of its own for whatever looks transient."""

import openai

from talk import PATIENCE, Stopwatch, saw, serve

ASKED = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}


def client(url, headers):
    return openai.OpenAI(api_key="none", base_url=url, default_headers=headers, timeout=PATIENCE)


def chat(url, headers):
    with client(url, headers) as api:
        try:
            return saw(200, api.chat.completions.create(**ASKED).choices[0].message.content)
        except openai.APIStatusError as refusal:
            return saw(refusal.status_code, refusal.response.text)


def stream(url, headers):
    stopwatch = Stopwatch()
    with client(url, headers) as api:
        words = []
        for chunk in api.chat.completions.create(**ASKED, stream=True):
            stopwatch.event()
            words.append(chunk.choices[0].delta.content)
        return saw(200, "".join(words), stopwatch=stopwatch)


def twice(url, headers):
    with client(url, headers) as api:
        api.chat.completions.create(**ASKED)
        return saw(200, api.chat.completions.create(**ASKED).choices[0].message.content)


serve(chat=chat, stream=stream, twice=twice)
