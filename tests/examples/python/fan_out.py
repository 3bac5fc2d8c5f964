"""A LangGraph agent whose tool node hands all calls of a turn to hedgerow at once.

However many tools hang, the model goes on at the deadline, with what has come and a sentence about what has not.
"""

import json
import os

import httpx
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import tools_condition

from stand_in import model

HEDGEROW = os.environ.get("HEDGEROW_URL", "http://127.0.0.1:15300")
TOOLS = {
    name: os.environ.get(f"{name.upper()}_URL", f"https://{name}.example.com")
    for name in ("quotes", "news", "filings", "ratings", "chatter")
}
# Good to have: without them an answer is complete, and when all others have ended they get this much longer.
OPTIONAL, GRACE_MS = {"chatter"}, 100
# For all calls of a turn together. A user waits for it at most, so it is the turn's time and not the slowest tool's.
DEADLINE_MS = 3000
PROMPT = "You are an analyst. Never invent what a tool could not tell: say that it was unavailable."


class State(MessagesState):
    warning: str | None


def think(state: State) -> dict:
    # The warning is of the last turn alone, and stands where a model looks first. Among the tools' messages it would be
    # one text more from outside, and some APIs take no system message between others.
    notes = [PROMPT, state.get("warning")]
    system = SystemMessage("\n\n".join(note for note in notes if note))
    return {"messages": [model([system, *state["messages"]])]}


def call_tools(state: State) -> dict:
    wanted = state["messages"][-1].tool_calls
    # The id is the call's name in the warning, so it says to a model what is missing. A list has each id once: equal
    # calls of a turn are one call.
    names = {call["id"]: f"{call['name']} {call['args']['symbol']}" for call in wanted}
    distinct = {names[call["id"]]: call for call in wanted}
    fan_out = {
        "deadline_ms": DEADLINE_MS,
        "grace_ms": GRACE_MS,
        "calls": [
            {
                "id": name,
                "url": str(httpx.URL(TOOLS[call["name"]], params=call["args"])),
                "optional": call["name"] in OPTIONAL,
            }
            for name, call in distinct.items()
        ],
    }
    # The answer comes by the deadline. The client's own timeout is for a sidecar that is gone.
    response = httpx.post(f"{HEDGEROW}/v1/fanout", json=fan_out, timeout=DEADLINE_MS / 1000 + 5)
    # Tools that fail are no error here: only a list that cannot be read is.
    answer = response.raise_for_status().json()
    # One sentence: what is missing, and on how much an analysis rests. None where all has come.
    return {"messages": [told(answer, names[call["id"]], call) for call in wanted], "warning": answer["warning"]}


def told(answer: dict, name: str, call: dict) -> ToolMessage:
    """Every call gets its message, as the APIs of models demand."""
    if result := answer["results"].get(name):
        # A 404 is a result too, so the status is told with the body.
        content, status = json.dumps({"status": result["status"], "body": result.get("body")}), "success"
    else:
        content, status = f"unavailable: {answer['missing'][name]['message']}", "error"
    return ToolMessage(content, name=call["name"], tool_call_id=call["id"], status=status)


graph = StateGraph(State)
graph.add_node("think", think)
graph.add_node("tools", call_tools)
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile()

if __name__ == "__main__":
    end = agent.invoke({"messages": [HumanMessage("What about AAPL?")]})
    print(end["messages"][-1].content)
