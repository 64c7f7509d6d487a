"""A small environment as a user of verifiers writes one: sums, a second chance, and a harness that runs in this process."""

from typing import ClassVar

import aiohttp
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str
    trouble: str = ""


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        if self.data.trouble == "setup":
            raise ValueError("the sandbox has no disk")

    @vf.reward
    async def right(self, trace) -> float:
        if self.data.trouble == "scoring":
            raise ValueError("the checker broke")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=-0.25)
    async def second_try(self, trace) -> float:
        return float(trace.num_turns > 1)


class SumsConfig(vf.TasksetConfig):
    count: int = 3


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(self.config.count):
            yield SumTask(SumData(prompt=f"{n} + 1 =", answer=str(n + 1)), self.config.task)


class SecondChanceConfig(vf.HarnessConfig):
    pass


class SecondChance(vf.Harness[SecondChanceConfig]):
    """Asks, and once more if the answer is not a number."""

    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        if data.trouble == "harness":
            raise RuntimeError("the harness broke")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    answer = await response.json()
                    if response.status != 200:
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=str(answer))
                message = answer["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "A number, please."}]
                if message["content"].strip().isdecimal():
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SecondChance", "SecondChanceConfig", "SumTask", "Sums", "SumsConfig"]
