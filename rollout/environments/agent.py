"""Environment `agent`: your own agent plays, and knows no more of Laminar than an address and a key.

It is not stepped: it makes its calls itself, through the gateway (`rollout.agents`).
"""

from typing import Literal

from pydantic import Field, model_validator

from laminar.config.section import Section
from laminar.plugins import load_attribute


class Agent:
    """What to run for each trajectory."""

    gives_reward = True

    class Options(Section):
        """Settings of `agent`."""

        run: str = ""
        """`"package.module:function"`, called with a `Task`, plain or `async`; returns a reward, terms by name, or None."""
        command: list[str] = Field(default_factory=list)
        """Or a program: it finds OPENAI_BASE_URL, OPENAI_API_KEY (and ANTHROPIC_...) in its environment, and the data row
        as JSON on stdin."""
        call_format: Literal["hermes", "llama", "pythonic"] = "hermes"
        """How the model writes calls of the tools that the agent offers."""

        @model_validator(mode="after")
        def _one_of_both(self) -> "Agent.Options":
            if bool(self.run) == bool(self.command):
                raise ValueError("give either `run` or `command`")
            if self.run:
                load_attribute(self.run, "environment.options.run")
            return self
