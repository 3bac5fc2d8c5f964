"""In place of a model, so that the examples need no key and no network: it wants every tool once, then repeats what
it was told. What it is given goes to standard output, since the examples are about what reaches a model."""

import json

from langchain_core.messages import AIMessage, AnyMessage

TOOLS = ["quotes", "news", "filings", "ratings", "chatter"]


def model(messages: list[AnyMessage]) -> AIMessage:
    print(json.dumps([{"role": each.type, "name": each.name, "content": each.content} for each in messages]))
    told = [f"{each.name}: {each.content}" for each in messages if each.type == "tool"]
    if told:
        return AIMessage("\n".join(told))
    wanted = [{"name": name, "args": {"symbol": "AAPL"}, "id": f"call-{name}"} for name in TOOLS]
    return AIMessage("", tool_calls=wanted)
