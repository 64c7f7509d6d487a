"""Tools: what a policy may call in environment `tools`. To add one, see rollout/README.md."""

TOOLS = {
    "calculate": "rollout.tools.calculator:calculate",
    "mcp": "rollout.tools.mcp:Mcp",
    "python": "rollout.tools.python:Python",
    "search": "rollout.tools.search:Search",
}
"""Names that `[environment.options] tools` knows."""
