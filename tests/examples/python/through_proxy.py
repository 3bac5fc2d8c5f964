"""A LangGraph agent as anyone would write it: tools that make plain HTTP calls, and the prebuilt node that runs them.

Nothing in it knows of a proxy. The HTTP client follows HTTP_PROXY and HTTPS_PROXY, as most do:

    HTTP_PROXY=http://127.0.0.1:15300 python through_proxy.py
"""

import asyncio
import os

import httpx
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from stand_in import model

TOOLS = {
    name: os.environ.get(f"{name.upper()}_URL", f"https://{name}.example.com")
    for name in ("quotes", "news", "filings", "ratings", "chatter")
}
# Tools may take their time: a short timeout here would cut off the slow ones that answer. How long a turn may take
# and when a second try is worth it is for the policy to say.
client = httpx.AsyncClient(timeout=60)
PROMPT = "You are an analyst. Never invent what a tool could not tell: say that it was unavailable."


def tool_at(name: str, url: str) -> BaseTool:
    @tool(name, description=f"The {name} of a company.")
    async def ask(symbol: str) -> str:
        try:
            response = await client.get(url, params={"symbol": symbol})
        except httpx.HTTPError as error:
            return f"unavailable: {error!r}"
        # A failure's text goes to the model too: it says why, and whether another try makes sense.
        return response.text if response.is_success else f"unavailable ({response.status_code}): {response.text}"

    return ask


def think(state: MessagesState) -> dict:
    return {"messages": [model([SystemMessage(PROMPT), *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
# It runs all calls of a turn side by side.
graph.add_node("tools", ToolNode([tool_at(name, url) for name, url in TOOLS.items()]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile()

if __name__ == "__main__":
    end = asyncio.run(agent.ainvoke({"messages": [HumanMessage("What about AAPL?")]}))
    print(end["messages"][-1].content)
